"""The load queue: one load at a time in first-come order, room made for it first, and shared by all who want it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from omlxd.core.errors import Busy, DoesNotFit, LoadCancelled, LoadFailed, NotPermitted, OmlxError, ShuttingDown
from omlxd.core.events import Event, EventLevel, EventName
from omlxd.core.memory import MemoryReading
from omlxd.core.states import EntryState
from omlxd.daemon import load_size
from omlxd.daemon.entry import EnginePoolEntry, LoadReport
from omlxd.daemon.load_room import LoadRoom
from omlxd.daemon.load_ticket import LoadTicket, OnProgress
from omlxd.daemon.refusals import cancelled, decision_behind, fresh, shutting_down
from omlxd.daemon.turn import Turn
from omlxd.engine.events import ModelInfo
from omlxd.engine.orders import LoadOrder

if TYPE_CHECKING:
    from omlxd.daemon.pool import EnginePool

RETRY_AFTER_S: Final = (1.0, 2.0, 4.0)
"""How long a load that had to give way waits before each new try; after the last it is cancelled."""


class LoadQueue:
    """Serves one ticket after the other; a ticket lives on when those who asked for it have gone, unless others would
    have to make way for nobody.

    Args:
        pool: whose entries are loaded.
        load_wait_s: seconds a load may wait for memory that nobody gives back before it ends in Busy.
        fair_wait_s: seconds a load waits before models in use make way for it; None for no turns.
    """

    def __init__(self, pool: EnginePool, load_wait_s: float, fair_wait_s: float | None) -> None:
        self._pool = pool
        self._room = LoadRoom(pool, load_wait_s, fair_wait_s)
        self._queue: deque[LoadTicket] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._ids = count(1)
        self._enqueued = asyncio.Event()
        self._current: LoadTicket | None = None

    @property
    def in_progress(self) -> str | None:
        """The model whose weights are being read."""
        entry = None if self._current is None else self._current.entry
        return entry.name if entry is not None and entry.state is EntryState.LOADING else None

    def configure(self, load_wait_s: float, fair_wait_s: float | None) -> None:
        """Other patience from now on."""
        self._room.configure(load_wait_s, fair_wait_s)

    async def join(
        self, entry: EnginePoolEntry, on_progress: OnProgress | None = None, *, request: str | None = None
    ) -> None:
        """Wait until the entry is loaded, by a load that is under way or a new one; cancelling the wait leaves it be.

        Args:
            request: who wants it; None when the model itself is wanted, and not only an answer of it.

        Raises:
            DoesNotFit, Busy, LoadFailed, LoadCancelled: why it did not get loaded.
        """
        ticket = entry.ticket or self._enqueue(entry, request)
        ticket.by_user, ticket.modest = ticket.by_user or request is None, False
        if on_progress is not None:
            ticket.listeners.append(on_progress)
            on_progress(ticket.status)
        try:
            with ticket.asked():
                await asyncio.shield(ticket.result)
        except OmlxError as error:
            raise fresh(error) from None
        finally:
            if on_progress is not None:
                ticket.listeners.remove(on_progress)

    async def preload(self, entry: EnginePoolEntry) -> None:
        """Load it if that takes nobody's memory; who else asks for it meanwhile makes it a load like any other.

        Raises:
            DoesNotFit, Busy, LoadFailed, LoadCancelled: why it did not get loaded.
        """
        if entry.ticket is not None:
            await self.join(entry)
        elif not entry.loaded:
            ticket = self._enqueue(entry, None)
            ticket.modest = True
            try:
                with ticket.asked():
                    await asyncio.shield(ticket.result)
            except OmlxError as error:
                raise fresh(error) from None

    async def cancel(self, entry: EnginePoolEntry, error: OmlxError) -> bool:
        """Stop the entry's load wherever it is, and wait until its memory is back; False when there is none."""
        ticket = entry.ticket
        if ticket is None:
            return False
        self.abort(ticket, error)
        await asyncio.wait([ticket.result])
        return True

    async def postpone(self, entry: EnginePoolEntry, error: OmlxError) -> bool:
        """Stop the entry's load in progress, and wait until its memory is back; it is tried again after a while.

        One that was tried again too often, or has not begun, is cancelled. False when there is none.
        """
        ticket = entry.ticket
        if ticket is None or entry.state is not EntryState.LOADING or ticket.retries >= len(RETRY_AFTER_S):
            return await self.cancel(entry, error)
        put_off = ticket.put_off
        ticket.gives_way = error
        entry.abort_loading = True
        await asyncio.wait([ticket.result, put_off], return_when=asyncio.FIRST_COMPLETED)
        return True

    def abort(self, ticket: LoadTicket, error: OmlxError) -> None:
        """Stop the load wherever it is, at once; the ticket ends when its memory is back."""
        ticket.cancelled = ticket.cancelled or error
        ticket.entry.abort_loading = True  # which calls `_stop`

    async def close(self) -> None:
        """End all tickets with ShuttingDown."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait([self._worker])
        for ticket in tuple(self._queue):
            self._finish(ticket, shutting_down())
        self._queue.clear()

    def progress(self, entry: EnginePoolEntry, order: int, done_bytes: int, total_bytes: int) -> None:
        """The engine has a slice more."""
        if (ticket := entry.ticket) is not None and ticket.order_id == order:
            ticket.progress(done_bytes, total_bytes)

    def done(self, entry: EnginePoolEntry, order: int, info: ModelInfo, reading: MemoryReading) -> None:
        """The engine has all of it; one that was cancelled too late, or is larger than predicted, is unloaded again."""
        ticket = entry.ticket
        link = self._pool.link
        link.wanted.load = None
        load_size.measured(self._pool, entry, ticket, info, reading)
        if ticket is None or ticket.order_id != order or ticket.cancelled is not None:
            entry.state = EntryState.UNLOADING  # the plan leaves it out; `unloaded` ends the ticket
        else:
            entry.state = EntryState.LOADED
            entry.context_length = info.context_length
            entry.turn = Turn(entry.clock(), frozenset(entry.requests), kept=ticket.by_user)
            link.wanted.resident.add(entry.name)
            entry.last_load = LoadReport(info.load_s, tuple(ticket.evicted), info.disk_bytes, info.vocab_size)
            figures = {"weights_bytes": info.weights_bytes, "load_s": info.load_s, "evicted": list(ticket.evicted)}
            figures["disk_bytes"] = info.disk_bytes
            self._emit(EventName.LOAD_FINISHED, entry, figures)
            self._finish(ticket, None)
        link.changed()

    def ended(self, entry: EnginePoolEntry, order: int, error: OmlxError) -> None:
        """The engine stopped loading it, and its memory is back."""
        ticket = entry.ticket
        if ticket is None or ticket.order_id != order or entry.state is not EntryState.LOADING:
            return
        self._pool.link.wanted.load = None
        self._pool.link.changed()
        entry.state = EntryState.UNLOADED
        self._pool.ledger.release_weights(entry.name)
        if ticket.gives_way is not None and ticket.cancelled is None and isinstance(error, LoadCancelled):
            self._put_off(ticket, ticket.gives_way)
        else:
            self._finish(ticket, ticket.cancelled or error)

    def unloaded(self, entry: EnginePoolEntry, reading: MemoryReading) -> None:
        """A model that was loaded although its load had been cancelled is gone again."""
        ticket = entry.ticket
        if ticket is None or ticket.cancelled is None:
            return
        if ticket.too_large is not None:
            load_size.record_too_large(self._pool, entry, ticket.cancelled, ticket.too_large, reading)
        self._finish(ticket, ticket.cancelled)

    def _stop(self, ticket: LoadTicket) -> None:
        entry, error = ticket.entry, ticket.cancelled or ticket.gives_way
        if error is None:
            error = ticket.cancelled = cancelled(entry.name, "it was asked to stop")
        if entry.state is EntryState.LOADING:
            link = self._pool.link
            link.wanted.load = None
            link.changed()
            if not ticket.begun:  # perhaps the engine has never seen the order, and will have nothing to say about it
                order = ticket.order_id
                link.after_fence(lambda: self.ended(entry, order, error))
        elif ticket.task is not None:
            ticket.task.cancel()
        else:
            self._queue.remove(ticket)
            self._finish(ticket, error)

    def _put_off(self, ticket: LoadTicket, error: OmlxError) -> None:
        """It gave way; those who wait for it go on waiting, and others may load meanwhile."""
        delay_s = RETRY_AFTER_S[ticket.retries]
        ticket.try_again_after(delay_s)
        ticket.entry.abort_loading = False
        ticket.tell(f"gave way to others, and is tried again in {delay_s:g} s")
        fields = {"after_s": delay_s, "retries": ticket.retries, "reason": error.message}
        self._emit(EventName.LOAD_RETRIED, ticket.entry, fields, decision=decision_behind(error))
        self._queue.append(ticket)
        self._enqueued.set()
        self._pool.door.wake()
        self._pool.notify()

    def _enqueue(self, entry: EnginePoolEntry, request: str | None) -> LoadTicket:
        ticket = entry.ticket = LoadTicket(entry, self._stop)
        ticket.for_request = request
        if entry.state is EntryState.FAILED:
            entry.state = EntryState.UNLOADED
        entry.error = None
        self._queue.append(ticket)
        self._enqueued.set()
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work(), name="omlxd-loads")
        return ticket

    async def _work(self) -> None:
        while (ticket := await self._next()) is not None:
            put_off, self._current = ticket.put_off, ticket
            task = ticket.task = asyncio.create_task(self._load(ticket), name=f"omlxd-load-{ticket.entry.name}")
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                ticket.cancelled = ticket.cancelled or shutting_down()
                task.cancel()
                await asyncio.wait([task])
                raise
            finally:
                if not put_off.done():
                    self._finish(ticket, ticket.cancelled or shutting_down())  # cancelled before its first line

    async def _next(self) -> LoadTicket | None:
        """The first of the queue whose time has come; None when there is none left."""
        now_s = asyncio.get_running_loop().time
        while self._queue:
            ready = next((ticket for ticket in self._queue if ticket.not_before_s <= now_s()), None)
            if ready is not None:
                self._queue.remove(ready)
                ready.order_id = next(self._ids)  # the engine takes rising numbers only, and turns are not in order
                return ready
            self._enqueued.clear()
            try:
                async with asyncio.timeout_at(min(ticket.not_before_s for ticket in self._queue)):
                    await self._enqueued.wait()
            except TimeoutError:
                pass
        return None

    async def _load(self, ticket: LoadTicket) -> None:
        """From the files to the end of the load; whatever happens, the ticket ends, or is put off."""
        entry, put_off = ticket.entry, ticket.put_off
        try:
            order = await load_size.predicted(self._pool, ticket)
            await self._room.find(ticket, lambda: self._begin(ticket, order))
            await asyncio.wait([ticket.result, put_off], return_when=asyncio.FIRST_COMPLETED)  # by the engine's events
            if entry.state is EntryState.FAILED:
                now = await asyncio.to_thread(self._pool.fingerprint, entry.settings)
                if now != entry.fingerprint:  # perhaps only because they changed meanwhile: nothing is known of them
                    entry.fingerprint = None
        except OmlxError as error:
            self._finish(ticket, error)
        except Exception as unexpected:
            message = f"loading `{entry.name}` failed: {unexpected}"
            self._finish(ticket, LoadFailed(message, details={"kind": "internal"}))
        finally:
            if not put_off.done():
                self._finish(ticket, ticket.cancelled or shutting_down())

    def _begin(self, ticket: LoadTicket, order: LoadOrder) -> None:
        entry, link = ticket.entry, self._pool.link
        entry.state, entry.abort_loading = EntryState.LOADING, False
        entry.touch()
        link.wanted.load = order
        link.changed()
        self._pool.ledger.reserve_weights(entry.name, entry.weights_bytes or 0)
        ticket.begin()
        figures = {"weights_bytes": order.weights_bytes, "path": order.path}
        self._emit(EventName.LOAD_STARTED, entry, figures, request=ticket.for_request)

    def _finish(self, ticket: LoadTicket, error: OmlxError | None) -> None:
        """End the ticket once, and leave the entry as its end says: loaded, failed, or unloaded with the reason."""
        entry = ticket.entry
        if ticket.result.done():
            return
        entry.ticket, entry.abort_loading = None, False
        self._pool.door.wake()
        if error is None:
            entry.touch()
            ticket.result.set_result(None)
        else:
            self._give_up(entry, error)
            ticket.result.set_exception(error)
        self._pool.notify()

    def _give_up(self, entry: EnginePoolEntry, error: OmlxError) -> None:
        if isinstance(error, LoadFailed | NotPermitted):
            error.details.setdefault("model", entry.name)
        entry.error = fresh(error)
        if isinstance(error, LoadCancelled | ShuttingDown):
            fields = {"reason": error.message}
            self._emit(EventName.LOAD_CANCELLED, entry, fields, decision=decision_behind(error))
            return
        if not isinstance(error, Busy | DoesNotFit):
            entry.state, entry.failed_at_s = EntryState.FAILED, entry.clock()
        level = EventLevel.ERROR if entry.state is EntryState.FAILED else EventLevel.WARNING
        self._emit(EventName.LOAD_FAILED, entry, {"error": error.to_log()}, level)

    def _emit(
        self,
        name: EventName,
        entry: EnginePoolEntry,
        fields: Mapping[str, Any],
        level: EventLevel = EventLevel.INFO,
        *,
        request: str | None = None,
        decision: str | None = None,
    ) -> None:
        self._pool.emit(Event(name, level, model=entry.name, request=request, decision=decision, fields=fields))
