"""A decode that grows past the soft limit, watched inside the process: when it crossed, when somebody acted.

`python -m tests.bench.growth_child BUSY IDLE POLL_S ROUNDS` prints JSON; BUSY decodes, IDLE is the one to go.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from omlxd import EnginePool, ProcessMemoryEnforcer
from omlxd.core.events import Event, EventName

WATCH_S = 0.001
PROMPT_TOKENS, KV_STEP_TOKENS = 200, 256  # the KV cache grows by 256 tokens at a time
DEADLINE_S = 30.0


class Watch:
    """Notes when active memory went over `soft_bytes` for good, and when it came back; looks each millisecond."""

    def __init__(self) -> None:
        self.soft_bytes = 0
        self.crossed_s = self.back_s = 0.0
        self._over_since_s = 0.0
        self.came_back = threading.Event()
        self._frozen = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def begin(self, soft_bytes: int) -> None:
        """Watch for this limit from now on."""
        self.crossed_s = self.back_s = self._over_since_s = 0.0
        self._frozen = False
        self.came_back.clear()
        self.soft_bytes = soft_bytes

    def acted(self) -> None:
        """Somebody acts: the crossing is where the present stretch over the limit began."""
        if not self._frozen:
            self.crossed_s, self._frozen = self._over_since_s or time.perf_counter(), True

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        import mlx.core as mx

        while not self._ended.wait(WATCH_S):
            soft_bytes, now_s = self.soft_bytes, time.perf_counter()
            if not soft_bytes:
                continue
            if mx.get_active_memory() > soft_bytes:
                self._over_since_s = self._over_since_s or now_s
            elif self._frozen:
                self.back_s = self.back_s or now_s
                self.came_back.set()
            else:
                self._over_since_s = 0.0  # it was the transient of a step


async def measure(busy: Path, idle: Path, poll_s: float, rounds: int) -> dict[str, Any]:
    """Milliseconds from the crossing to the action and to the memory, each round, and of one decode step."""
    watch, acted = Watch(), asyncio.Event()
    action_s = 0.0

    def hear(event: Event) -> None:
        nonlocal action_s
        if event.event is EventName.LEVEL_CHANGED and event.fields["level_now"] == "over":
            watch.acted()
            action_s = time.perf_counter()
        elif event.event is EventName.DECISION:
            acted.set()

    found: dict[str, Any] = {"action_ms": [], "back_ms": [], "step_ms": 0.0}
    async with EnginePool({"busy": busy, "idle": idle}, emit=hear) as pool:
        enforcer = ProcessMemoryEnforcer(pool, 0, poll_interval=poll_s)
        enforcer.start()
        for _ in range(rounds):
            acted.clear()
            await pool.load("idle")
            await pool.load("busy")
            step_ms = await _grow(pool, enforcer, watch, acted)
            await asyncio.to_thread(watch.came_back.wait, DEADLINE_S)
            found["action_ms"].append(1000 * (action_s - watch.crossed_s))
            found["back_ms"].append(1000 * (watch.back_s - watch.crossed_s))
            found["step_ms"] = max(found["step_ms"], step_ms)
            watch.begin(0)
            enforcer.max_bytes = 0
        await enforcer.stop()
    watch.close()
    return found


async def _grow(pool: EnginePool, enforcer: ProcessMemoryEnforcer, watch: Watch, acted: asyncio.Event) -> float:
    """Decode over the next growth of the KV cache, with the limit in its middle; milliseconds of a step."""
    generation = pool.generate("busy", tokens=[100] * PROMPT_TOKENS, max_tokens=4 * KV_STEP_TOKENS, temperature=0.0)
    async with generation, asyncio.timeout(DEADLINE_S):
        await anext(generation)
        reading = await pool.read_rest()
        assert reading is not None
        kv_bytes = pool.engine.kv_bytes()["busy"] or 1
        soft_bytes = reading.active_bytes + kv_bytes // 2
        watch.begin(soft_bytes)
        enforcer.max_bytes = soft_bytes
        while not acted.is_set():
            await anext(generation)
        return 1000 / (generation.tokens_per_s or 1000)


if __name__ == "__main__":
    busy, idle, poll_s, rounds = sys.argv[1:]
    print(json.dumps(asyncio.run(measure(Path(busy), Path(idle), float(poll_s), int(rounds)))))
