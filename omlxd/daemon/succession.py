"""What another manifest means for models that are in use: the removed ones go, the changed ones are loaded again.

Nobody loses anything. A removed model serves the requests it has, and is unloaded then. A changed model is unloaded and
loaded again once nobody uses it; when it is not idle for long, it serves what it has, and later requests wait for the
new weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from omlxd.core.errors import OmlxError
from omlxd.core.events import Event, EventLevel, EventName
from omlxd.core.manifest_diff import source_of
from omlxd.core.states import EntryState
from omlxd.daemon.entry import EnginePoolEntry
from omlxd.daemon.eviction import unload
from omlxd.daemon.pool import EnginePool
from omlxd.daemon.refusals import cancelled

GONE = "it was removed from the manifest"
OTHER = "the manifest names other weights or another context for it"


class Succession:
    """Follows one pool's roster, with a task for each model that has to go or to change.

    Args:
        pool: whose models they are.
        patience_s: asked each time: seconds after which a changed model takes nothing new, so that it comes to rest.
    """

    def __init__(self, pool: EnginePool, patience_s: Callable[[], float]) -> None:
        self._pool = pool
        self._patience_s = patience_s
        self._tasks: dict[EnginePoolEntry, asyncio.Task[None]] = {}

    @property
    def pending(self) -> tuple[str, ...]:
        """The models that still have to go or to change, and that somebody still uses."""
        return tuple(entry.name for entry in self._tasks if entry.requests)

    def begin(self) -> None:
        """Look after every model that is removed or has an heir; those that are looked after already take notice."""
        for entry in self._pool.entries.values():
            if (entry.removed or entry.heir is not None) and entry not in self._tasks:
                self._tasks[entry] = asyncio.create_task(self._follow(entry), name=f"omlxd-succession-{entry.name}")
        self._pool.notify()

    async def settled(self) -> None:
        """Return when all of them have gone or changed; giving up the wait leaves them to it."""
        while tasks := [task for task in self._tasks.values() if not task.done()]:
            await asyncio.wait(tasks)

    async def stop(self) -> None:
        """End the tasks; what they were about stays as it is."""
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, entry: EnginePoolEntry) -> None:
        """Until it is as the manifest says; which may change its mind meanwhile."""
        try:
            while True:
                if entry.removed:
                    if await self._retire(entry):
                        return
                elif entry.heir is None or not await self._renew(entry):
                    return
        finally:
            del self._tasks[entry]

    async def _retire(self, entry: EnginePoolEntry) -> bool:
        """True when it is gone; False when it is in the manifest again."""
        pool = self._pool
        await self._wait_while(lambda: entry.removed and bool(entry.requests))
        if not entry.removed:
            return False
        if entry.ticket is not None:
            await pool.loads.cancel(entry, cancelled(entry.name, GONE))
        await self._unload(entry, lambda: entry.removed, GONE)
        await self._wait_while(lambda: entry.removed and _in_use(entry))
        if entry.removed:
            pool.roster.forget(entry)
            pool.notify()
        return entry.removed

    async def _renew(self, entry: EnginePoolEntry) -> bool:
        """Unload it when nobody uses it, and load it again with what the manifest says; False to leave it as it is."""
        pool, heir = self._pool, entry.heir

        def waits() -> bool:
            return entry.heir is heir and not entry.removed

        def served() -> bool:
            drains = entry.draining
            mine = entry.requests if drains is None else drains & entry.requests.keys()
            return waits() and entry.loaded and bool(mine)

        await self._wait_while(lambda: waits() and (entry.ticket is not None or entry.state is EntryState.UNLOADING))
        if not entry.loaded:
            pool.inherit(entry)
            if waits():  # an answer that was parked goes on with the old weights first
                await pool.change.wait()
            return True
        if not await self._can_be_loaded(entry):
            return False
        try:
            if not await self._wait_while(served, self._patience_s()) and entry.draining is None:
                entry.draining = frozenset(entry.requests)
            await self._wait_while(served)
            unloaded = await self._unload(entry, lambda: waits() and not served(), OTHER)
        finally:
            entry.draining = None
            pool.notify()
        pool.inherit(entry)
        if unloaded and entry.heir is None and not entry.removed:
            await self._load_again(entry)
        return True

    async def _can_be_loaded(self, entry: EnginePoolEntry) -> bool:
        """Look at the new files before the old weights go: what cannot be loaded must not cost what can."""
        heir = entry.heir
        if heir is None:
            return True
        try:
            await asyncio.to_thread(self._pool.read_folder, heir)
        except OmlxError as error:
            fields = {"path": source_of(heir), "error": error.to_json()}
            self._pool.emit(Event(EventName.MODEL_KEPT, EventLevel.WARNING, model=entry.name, fields=fields))
            return False
        return True

    async def _load_again(self, entry: EnginePoolEntry) -> None:
        try:
            if entry.pinned:
                await self._pool.load(entry.name)
            else:
                await self._pool.preload(entry.name)  # it takes nobody's memory, unless somebody asks for it
        except OmlxError:
            pass  # the pool has told why, and `status` shows it

    async def _unload(self, entry: EnginePoolEntry, wanted: Callable[[], bool], why: str) -> bool:
        """Unload it if it is loaded and that is still wanted under the pool's lock, and record it."""
        pool = self._pool
        async with pool.lock:
            if not entry.loaded or not wanted():
                return False
            await unload(pool, entry.name, why, trigger="reload", told=why)
            return True

    async def _wait_while(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait for changes in the pool while the condition holds; False when it held for longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while condition():
                    await self._pool.change.wait()
        except TimeoutError:
            return False
        return True


def _in_use(entry: EnginePoolEntry) -> bool:
    idle_states = (EntryState.UNLOADED, EntryState.FAILED)
    return bool(entry.requests) or entry.ticket is not None or entry.state not in idle_states
