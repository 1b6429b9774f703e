"""Who waits for a model to take requests again, as long as it makes way for another: one looks for all of them.

Something changes in a pool many times for each request that is served. A hundred that wait for the next turn of their
model would each look at it every time.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omlxd.daemon.entry import EnginePoolEntry
    from omlxd.daemon.pool import EnginePool


class ModelWatch:
    """One pool's models, each watched by one task while anybody waits for it."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._tasks: dict[EnginePoolEntry, asyncio.Task[None]] = {}

    async def changed(self, entry: EnginePoolEntry) -> None:
        """Return when whom the model takes may be another question than now."""
        task = self._tasks.get(entry)
        if task is None or task.done():
            watch = self._watch(entry, _whom(entry))
            task = self._tasks[entry] = asyncio.create_task(watch, name=f"omlxd-watch-{entry.name}")
        await asyncio.shield(task)

    async def close(self) -> None:
        """End the tasks; nobody waits any longer."""
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, entry: EnginePoolEntry, seen: tuple[object, ...]) -> None:
        try:
            while _whom(entry) == seen:
                await self._pool.change.wait()
        finally:
            self._tasks.pop(entry, None)


def _whom(entry: EnginePoolEntry) -> tuple[object, ...]:
    """All that `EnginePoolEntry.takes` depends on."""
    turn = entry.turn
    return entry.state, entry.draining, turn, None if turn is None else turn.serves
