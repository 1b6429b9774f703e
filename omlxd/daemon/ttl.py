"""Time to live: unloads a model that nobody has used for its `ttl`, or for what its last request asked for, on a timer
of its own.

A pinned model, one with requests and one whose load is under way are never touched; what was used in the instant
before its time is up is left alone, since the state is looked at again under the pool's lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from omlxd.core.states import EntryState
from omlxd.core.units import format_duration
from omlxd.daemon.entry import EnginePoolEntry
from omlxd.daemon.eviction import unload
from omlxd.daemon.pool import EnginePool
from omlxd.daemon.watcher import Watcher

LONGEST_SLEEP_S = 3600.0


def ttl_left_s(entry: EnginePoolEntry, now_s: float) -> float | None:
    """Seconds until the model is unloaded for being idle; None while nothing counts down."""
    if not entry.loaded or (ttl_s := entry.idle_limit_s) is None:
        return None
    if entry.pinned or entry.requests or entry.ticket or entry.used_at_s is None:
        return None
    return max(0.0, entry.used_at_s + ttl_s - now_s)


class IdleTimer(Watcher):
    """Watches one pool.

    Args:
        pool: whose models have a `ttl`, or requests that want them kept for a time of their own.
        sleep: waits until the next model's time is up; woken early when something changes in the pool.
    """

    task_name = "omlxd-ttl"

    def __init__(self, pool: EnginePool, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._pool = pool
        self._sleep = sleep

    async def _watch(self) -> None:
        while True:
            changed = asyncio.ensure_future(self._pool.change.wait())
            loaded = [entry for entry in self._pool.entries.values() if entry.state is EntryState.LOADED]
            left = [left_s for entry in loaded if (left_s := self._left_s(entry)) is not None]
            if any(left_s <= 0 for left_s in left):
                await self._unload_expired()
            else:
                timer = asyncio.ensure_future(self._sleep(min([*left, LONGEST_SLEEP_S])))
                try:
                    await asyncio.wait([timer, changed], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    timer.cancel()
            changed.cancel()

    def _left_s(self, entry: EnginePoolEntry) -> float | None:
        return ttl_left_s(entry, self._pool.clock())

    async def _unload_expired(self) -> None:
        for entry in self._pool.entries.values():
            if self._left_s(entry) == 0:
                async with self._pool.lock:
                    if self._left_s(entry) == 0:
                        await self._unload(entry)

    async def _unload(self, entry: EnginePoolEntry) -> None:
        now_s = self._pool.clock()
        idle_s = now_s - (entry.used_at_s or now_s)
        whose = "its ttl is" if entry.idle_limit_s == entry.settings.ttl_s else "its last request's keep_alive was"
        reason = f"unused for {format_duration(idle_s)}, {whose} {format_duration(entry.idle_limit_s or 0.0)}"
        await unload(self._pool, entry.name, reason, trigger="ttl", told=f"it was unloaded, {reason}")
