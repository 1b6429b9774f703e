"""Makes room for a load: evicts what nobody uses, and waits for what somebody uses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from omlxd.core.events import Event, EventName
from omlxd.core.room import Room, RoomKind, make_room
from omlxd.daemon.eviction import make_way
from omlxd.daemon.load_ticket import LoadTicket
from omlxd.daemon.refusals import does_not_fit, still_busy, system_short

if TYPE_CHECKING:
    from omlxd.daemon.pool import EnginePool

RECHECK_S: Final = 1.0  # a waiting load also looks without being woken: memory can come back unannounced


class LoadRoom:
    """Finds memory for one load after the other.

    Args:
        pool: whose idle models may go.
        wait_s: seconds a load may wait for room before it ends in Busy.
    """

    def __init__(self, pool: EnginePool, wait_s: float) -> None:
        self._pool = pool
        self._wait_s = wait_s

    async def find(self, ticket: LoadTicket, need_bytes: int, begin: Callable[[], None]) -> None:
        """Return when there is room and `begin` was called in the same breath.

        Raises:
            DoesNotFit: it can never fit; nothing was evicted.
            Busy: others held its memory for too long, or the system is short of it.
        """
        pool, loop = self._pool, asyncio.get_running_loop()
        deadline_s, told = loop.time() + self._wait_s, False
        while True:
            change = pool.change
            async with pool.lock:
                room = await self._evict_for(ticket, need_bytes)
                if room.kind is RoomKind.FITS:
                    begin()
                    return
            if room.kind is RoomKind.NEVER:
                raise does_not_fit(ticket.entry.name, room)
            ticket.tell(room.why)
            if not told:
                told = True
                self._tell_waiting(ticket, room)
            left_s = deadline_s - loop.time()
            if left_s <= 0:
                raise still_busy(ticket.entry.name, room, self._wait_s)
            try:
                async with asyncio.timeout(min(left_s, RECHECK_S)):
                    await change.wait()
            except TimeoutError:
                pass

    async def _evict_for(self, ticket: LoadTicket, need_bytes: int) -> Room:
        """Unload idle models one by one, reading memory after each, until it fits or none may go."""
        pool, entry = self._pool, ticket.entry
        while True:
            reading = await pool.read_rest() or pool.engine.read()
            snapshot = pool.snapshot(reading)
            if pool.limits.system_short(reading):
                raise system_short(entry.name, reading, pool.limits)
            room = make_room(snapshot, pool.limits, entry.name, need_bytes)
            if room.kind is not RoomKind.EVICT:
                return room
            victim = pool.entries[room.victims[0]]
            ticket.tell(f"unloads `{victim.name}` first")
            numbers = {"victims": list(room.victims), "need_bytes": need_bytes, "short_bytes": room.short_bytes}
            await make_way(
                pool,
                victim.name,
                entry.name,
                trigger="load",
                why=room.why,
                before=reading,
                candidates=room.candidates,
                extra={**numbers, "for_request": ticket.for_request},
            )
            ticket.evicted.append(victim.name)

    def _tell_waiting(self, ticket: LoadTicket, room: Room) -> None:
        numbers = {"blockers": list(room.blockers), "short_bytes": room.short_bytes, "reason": room.why}
        model, request = ticket.entry.name, ticket.for_request
        self._pool.emit(Event(EventName.LOAD_WAITING, model=model, request=request, fields=numbers))
