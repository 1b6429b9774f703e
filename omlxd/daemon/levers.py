"""What a decision can do to a pool: each lever returns when it has taken effect and the memory is back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from omlxd.core.errors import OmlxError
from omlxd.core.states import EntryState
from omlxd.daemon.refusals import decision_behind

if TYPE_CHECKING:
    from omlxd.daemon.pool import EnginePool


class Levers:
    """The actions of `core.policy` on one pool; whoever pulls one has decided, and tells of it."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    async def evict(self, name: str, error: OmlxError) -> None:
        """Unload the model now; those that wait survive. Hold the pool's lock.

        Requests that run are parked under the `graceful` policy, and end with `error` under `reference`.

        Giving up the wait does not stop the unload.
        """
        pool, entry = self._pool, self._pool.entries[name]
        if entry.state is EntryState.LOADED:
            entry.state, entry.unloaded = EntryState.UNLOADING, asyncio.get_running_loop().create_future()
            entry.unloaded_by = decision_behind(error)
            pool.link.wanted.resident.discard(name)
            pool.dispatch.take_out(name, error)
            pool.link.changed()
        if entry.unloaded is not None:
            await asyncio.shield(entry.unloaded)

    async def park(self, request_id: str, reason: str, decision: str | None = None) -> bool:
        """Take a running request out of the engine, and run it again when it fits; its caller sees a pause only.

        `decision` is the id of the decision that took it out.

        Returns:
            True when it is parked, False when the engine does not have it or it ended.
        """
        return await self._pool.dispatch.park(request_id, reason, decision)

    async def abort_requests(self, name: str, error: OmlxError) -> None:
        """Abort all requests that the engine has for the model."""
        gone = self._pool.dispatch.abort_all(name, error)
        self._pool.link.release()
        self._pool.link.changed()
        if gone:
            await asyncio.wait(gone)

    async def cancel_load(self, name: str, error: OmlxError) -> bool:
        """Stop the model's load at its next step; False when there was none."""
        self._pool.link.release()
        return await self._pool.loads.cancel(self._pool.entries[name], error)

    async def postpone_load(self, name: str, error: OmlxError) -> bool:
        """Stop the model's load like `cancel_load`, but have it tried again by itself after a while."""
        self._pool.link.release()
        return await self._pool.loads.postpone(self._pool.entries[name], error)

    async def trim_prefix_caches(self, keep_bytes: int) -> None:
        """Shrink the prefix caches of all models together to `keep_bytes`."""
        await self._pool.prefix.trim(keep_bytes)
