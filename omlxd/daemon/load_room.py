"""Makes room for a load: evicts what nobody uses, and waits for its turn when everything is in use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from omlxd.core.admission import kept_bytes
from omlxd.core.events import Event, EventName
from omlxd.core.memory import MemoryReading
from omlxd.core.room import Room, RoomKind, make_room
from omlxd.core.snapshot import Snapshot
from omlxd.core.states import EntryState
from omlxd.core.turnover import TurnDecision, TurnKind, decide_turn
from omlxd.core.waits import load_waits_for
from omlxd.daemon.eviction import make_way
from omlxd.daemon.load_ticket import LoadTicket
from omlxd.daemon.refusals import does_not_fit, no_room_beside, nobody_asks, still_busy, system_short

if TYPE_CHECKING:
    from omlxd.daemon.pool import EnginePool

LEAST_BATCH_S: Final = 2.0  # with no patience at all a model could go before the engine has those who waited for it
RECHECK_S: Final = 1.0  # a waiting load also looks without being woken: memory can come back unannounced


class LoadRoom:
    """Finds memory for one load after the other.

    Args:
        pool: whose models may have to go.
        wait_s: seconds a load waits for memory that nobody in the pool can give it, before it ends in Busy.
        fair_wait_s: seconds its requests wait before models in use take nothing new; None for no turns: what is idle
            goes at once, and what is in use blocks the load for at most `wait_s`.
    """

    def __init__(self, pool: EnginePool, wait_s: float, fair_wait_s: float | None) -> None:
        self._pool = pool
        self._wait_s = wait_s
        self._fair_wait_s = fair_wait_s
        self._rested_s = float("-inf")

    def configure(self, wait_s: float, fair_wait_s: float | None) -> None:
        """Other patience from now on."""
        self._wait_s, self._fair_wait_s = wait_s, fair_wait_s

    async def find(self, ticket: LoadTicket, begin: Callable[[], None]) -> None:
        """Return when there is room and `begin` was called in the same breath.

        Raises:
            DoesNotFit: it can never fit; nothing was evicted.
            Busy: memory that nobody can give back was missing for too long, or the system is short of it.
            LoadCancelled: others would have to make way, and nobody asks for it any more.
        """
        try:
            await self._find(ticket, begin)
        finally:
            self._reopen()

    async def _find(self, ticket: LoadTicket, begin: Callable[[], None]) -> None:
        pool, told, stuck_since_s = self._pool, False, None
        while True:
            change = pool.change
            async with pool.lock:
                room, turn = await self._evict_for(ticket)
                if room.kind is RoomKind.FITS:
                    begin()
                    return
            if room.kind is RoomKind.NEVER:
                raise does_not_fit(ticket.entry.name, room)
            now_s = pool.clock()
            if turn is not None and turn.kind is TurnKind.CLOSE:
                self._close(ticket, turn)
            ticket.tell(load_waits_for(room))
            if not told:
                told = True
                self._tell_waiting(ticket, room)
            self._check_wanted(ticket, room)
            if room.blockers and self._fair_wait_s is not None:
                stuck_since_s = None  # those in use give way when its turn comes
            elif room.kind is RoomKind.WAIT:
                stuck_since_s = now_s if stuck_since_s is None else stuck_since_s
                if now_s - stuck_since_s >= self._wait_s:
                    raise still_busy(ticket.entry.name, room, self._wait_s)
            until_s = now_s + RECHECK_S if turn is None or turn.until_s is None else turn.until_s
            try:
                async with asyncio.timeout(min(max(0.0, until_s - now_s), RECHECK_S)):
                    await change.wait()
            except TimeoutError:
                pass

    async def _evict_for(self, ticket: LoadTicket) -> tuple[Room, TurnDecision | None]:
        """Unload models one by one, reading memory after each, until it fits or none may go now."""
        pool = self._pool
        while True:
            self._keep_closed()
            if pool.clock() - self._rested_s < RECHECK_S:  # those who run are not stopped for each look
                room, turn = self._look(ticket, pool.engine.read())
                if room.kind is RoomKind.WAIT and (turn is None or turn.kind is TurnKind.WAIT):
                    return room, turn
            reading = await pool.read_rest() or pool.engine.read()
            self._rested_s = pool.clock()
            room, turn = self._look(ticket, reading)
            if ticket.modest and room.kind in (RoomKind.EVICT, RoomKind.WAIT):
                raise no_room_beside(ticket.entry.name, room, [each.model for each in room.candidates])
            if turn is not None and turn.kind is TurnKind.EVICT:
                await self._evict(ticket, room, reading, turn.models, turn.why)
            elif turn is None and room.kind is RoomKind.EVICT:
                await self._evict(ticket, room, reading, room.victims, room.why)
            else:
                return room, turn

    def _look(self, ticket: LoadTicket, reading: MemoryReading) -> tuple[Room, TurnDecision | None]:
        pool, entry = self._pool, ticket.entry
        if pool.limits.system_short(reading):
            raise system_short(entry.name, reading, pool.limits)
        snapshot = pool.snapshot(reading)
        room = self._room(ticket, snapshot)
        if ticket.abandoned and room.kind is RoomKind.EVICT:
            raise nobody_asks(entry.name, room)  # nobody makes way for it; who asks again finds it loaded where it fits
        if self._fair_wait_s is None or room.kind not in (RoomKind.EVICT, RoomKind.WAIT):
            return room, None
        holders = [
            pool.entries[each.name].holder(each, pool.limits.policy)
            for each in snapshot.entries
            if each.state is EntryState.LOADED and not each.pinned and each.name != entry.name
        ]
        rivals = sum(each.ticket is not None and not each.ticket.begun for each in pool.entries.values())
        waiting = replace(ticket.waiting, rivals=max(1, rivals))
        return room, decide_turn(snapshot.now_s, waiting, room, holders, self._fair_wait_s)

    def _room(self, ticket: LoadTicket, snapshot: Snapshot) -> Room:
        """Whether the model fits, and with it the prompt of the request that comes first: it would be loaded in vain,
        and stand in others' way, where that has to wait for memory afterwards.

        Where it cannot have both, it is loaded alone, and the door tells the request what it lacks. Of a model that is
        loaded for the first time no prompt has tokens yet; and nothing rests on a guess of what they take.
        """
        pool, entry = self._pool, ticket.entry
        if not (pool.door.guarded and entry.costs.certain):
            return make_room(snapshot, pool.limits, entry.name, ticket.total_bytes)
        first = min((each for each in entry.requests.values() if not each.ended), key=attrgetter("order"), default=None)
        prompt_tokens = 0 if first is None else first.prompt_tokens + len(first.generated)
        for tokens in sorted({max(1, prompt_tokens), 1}, reverse=True):
            need_bytes = ticket.total_bytes + kept_bytes(entry.costs, tokens)
            room = make_room(snapshot, pool.limits, entry.name, need_bytes, tokens)
            if room.kind is not RoomKind.NEVER:
                break
        return room

    async def _evict(
        self, ticket: LoadTicket, room: Room, reading: MemoryReading, victims: Sequence[str], why: str
    ) -> None:
        """Unload the first of them; what it still runs is parked."""
        victim = victims[0]
        ticket.tell(f"unloading `{victim}` first")
        numbers = {"victims": list(victims), "need_bytes": room.need_bytes, "short_bytes": room.short_bytes}
        candidates = [
            replace(each, chosen=True, why="its turn is over") if each.model in victims and not each.chosen else each
            for each in room.candidates
        ]
        await make_way(
            self._pool,
            victim,
            ticket.entry.name,
            trigger="load",
            why=why,
            before=reading,
            candidates=candidates,
            extra={**numbers, "waited_s": self._waited_s(ticket), "for_request": ticket.for_request},
        )
        ticket.evicted.append(victim)

    def _close(self, ticket: LoadTicket, turn: TurnDecision) -> None:
        """From now on these models serve what they have; who comes later waits for their next turn."""
        for name in turn.models:
            entry = self._pool.entries[name]
            self._close_door(name)
            fields = {
                "for_model": ticket.entry.name,
                "waited_s": self._waited_s(ticket),
                "serves": len(entry.served),
                "waiting": len(entry.requests) - len(entry.served),
                "reason": turn.why,
            }
            self._pool.emit(Event(EventName.TURN_ENDED, model=name, fields=fields))
        self._pool.door.wake()

    def _keep_closed(self) -> None:
        """Who had gathered for a turn and did not get to run within the bound waits for the next one."""
        for name, entry in self._pool.entries.items():
            if entry.gives_way:
                self._close_door(name)

    def _close_door(self, name: str) -> None:
        entry = self._pool.entries[name]
        if entry.turn is not None:
            batch_s = max(self._fair_wait_s or 0.0, LEAST_BATCH_S)
            entry.turn.close(entry.in_engine, self._pool.clock(), entry.turn.began_s + batch_s)

    def _reopen(self) -> None:
        closed = [entry for entry in self._pool.entries.values() if entry.gives_way]
        for entry in closed:
            if entry.turn is not None:
                entry.turn.reopen()
        if closed:
            self._pool.door.wake()
            self._pool.notify()

    def _waited_s(self, ticket: LoadTicket) -> float:
        return round(self._pool.clock() - ticket.waiting.since_s, 3)

    def _check_wanted(self, ticket: LoadTicket, room: Room) -> None:
        """It keeps its place for a while when all have gone, but does not wait for ever if nobody comes back."""
        left_s, limit_s = ticket.unwanted_since_s, self._fair_wait_s
        if room.kind is not RoomKind.WAIT or left_s is None or limit_s is None:
            return
        if self._pool.clock() - left_s >= limit_s:
            raise nobody_asks(ticket.entry.name, room)

    def _tell_waiting(self, ticket: LoadTicket, room: Room) -> None:
        numbers = {"blockers": list(room.blockers), "short_bytes": room.short_bytes, "reason": room.why}
        model, request = ticket.entry.name, ticket.for_request
        self._pool.emit(Event(EventName.LOAD_WAITING, model=model, request=request, fields=numbers))
