"""Our enforcer while memory grows 1 GB/s: `python -m tests.bench.peers.enforcer_ours VICTIM OTHER ROUNDS HOW`; JSON.

A real pool: VICTIM is the least recently used and idle, OTHER answers a request when HOW is `busy`, and is `idle` else.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from pathlib import Path

from omlxd import EnginePool, ProcessMemoryEnforcer
from omlxd.core.errors import OmlxError
from omlxd.core.events import Event, EventName
from tests.bench.peers.growth import DEADLINE_S, Growth, Seen

ROOM_BYTES = 300_000_000
HARD_SHARE = 0.95 / 0.85  # of the peer's marks: its hard one is so much above its soft one


async def measure(victim: Path, other: Path, rounds: int, busy: bool) -> list[Seen]:
    """One `Seen` a round; each begins somewhere between two polls."""
    growth: Growth | None = None

    def hear(event: Event) -> None:
        if growth and event.event is EventName.LEVEL_CHANGED and event.fields["level_now"] == "over":
            growth.acted()

    chance, seen = random.Random(1), []
    models = {"victim": victim, "other": other}
    async with EnginePool(models, emit=hear) as pool:
        enforcer = ProcessMemoryEnforcer(pool, 0, poll_interval=1.0)
        enforcer.start()
        for _ in range(rounds):
            for name in models:
                await pool.load(name)
            reading = await pool.read_rest()
            assert reading is not None
            growth = Growth(reading.active_bytes + ROOM_BYTES)
            enforcer.max_bytes = growth.soft_bytes
            asking = asyncio.create_task(_decode(pool)) if busy else None
            await asyncio.sleep(1 + chance.random())
            growth.start()
            await asyncio.to_thread(growth.back.wait, DEADLINE_S)
            found = await asyncio.to_thread(growth.release)
            found.past_hard = found.overshoot_bytes > (HARD_SHARE - 1) * growth.soft_bytes
            if asking:
                found.lost = asking.result() if asking.done() else 0
                asking.cancel()
                await asyncio.wait([asking])
            seen.append(found)
            enforcer.max_bytes = 0
        await enforcer.stop()
    return seen


async def _decode(pool: EnginePool) -> int:
    """An answer longer than the round; 1 when it was lost."""
    try:
        await pool.generate("other", prompt="Hi", max_tokens=30_000, temperature=0.0).text()
    except OmlxError:
        return 1
    return 0


if __name__ == "__main__":
    victim, other, rounds, how = sys.argv[1:]
    seen = asyncio.run(measure(Path(victim), Path(other), int(rounds), how == "busy"))
    print(json.dumps([each.to_json() for each in seen]), flush=True)
    os._exit(0)
