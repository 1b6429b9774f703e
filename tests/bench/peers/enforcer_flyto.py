"""flyto-mlx's enforcer while memory grows 1 GB/s: `python -m tests.bench.peers.enforcer_flyto ROUNDS` prints JSON.

Run by the python of its own environment. Its real pool and its real `ProcessMemoryEnforcer`, with the marks it comes
with (soft 0.85 and hard 0.95 of the ceiling, poll 1 s); only the two engines are stand-ins: one idle that holds 1 GB,
and one that says it has a request until it is told to abort it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from typing import Any

import mlx.core as mx
import numpy as np
from omlx.engine_pool import EngineEntry, EnginePool
from omlx.process_memory_enforcer import ProcessMemoryEnforcer

from tests.bench.peers.growth import DEADLINE_S, Growth, Seen

VICTIM_BYTES, ROOM_BYTES = 1_000_000_000, 300_000_000
GIB = 1024**3


class _Engine:
    """What the pool and the enforcer ask of an engine."""

    def __init__(self, held: Any, requests: int, growth: Growth) -> None:
        self.held, self.requests, self.lost, self._growth = held, requests, 0, growth

    def has_active_requests(self) -> bool:
        return self.requests > 0

    async def abort_all_requests(self) -> int:
        aborted, self.requests = self.requests, 0
        self.lost += aborted
        return aborted

    async def stop(self) -> None:
        self._growth.acted()
        self.held = None


async def measure(rounds: int) -> list[Seen]:
    """One `Seen` a round; each begins somewhere between two polls."""
    chance, seen = random.Random(1), []
    for _ in range(rounds):
        pool = EnginePool()
        held = mx.array(np.ones(VICTIM_BYTES // 4, dtype=np.float32))
        growth = Growth(mx.get_active_memory() + ROOM_BYTES)
        victim, busy = _Engine(held, 0, growth), _Engine(None, 1, growth)
        del held
        for at, (name, engine) in enumerate((("victim", victim), ("busy", busy)), start=1):
            entry = EngineEntry(name, "", "llm", "batched", VICTIM_BYTES if engine is victim else 0)
            entry.engine, entry.last_access = engine, float(at)
            pool._entries[name] = entry
        enforcer = ProcessMemoryEnforcer(
            pool, memory_guard_tier="custom", memory_guard_custom_ceiling_gb=growth.soft_bytes / 0.85 / GIB
        )
        enforcer.start()
        await asyncio.sleep(1 + chance.random())
        growth.start()
        await asyncio.to_thread(growth.back.wait, DEADLINE_S)
        found = await asyncio.to_thread(growth.release)
        await enforcer.stop()
        found.past_hard = found.overshoot_bytes > (0.95 / 0.85 - 1) * growth.soft_bytes
        found.lost = busy.lost
        seen.append(found)
    return seen


if __name__ == "__main__":
    print(json.dumps([each.to_json() for each in asyncio.run(measure(int(sys.argv[1])))]), flush=True)
    os._exit(0)
