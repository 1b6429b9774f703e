"""The door: a request goes to the engine when its memory has been reserved, waits its turn, or is refused (R11, R12).

Requests of one model wait in the order they came, also those that were parked and want to come back. One that needs
much lets requests to other models pass while it waits, but only so many; then nobody passes, and what runs makes room
for it by ending. The next block of what runs comes before everybody at the door.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from omlxd.core.admission import Admission, AdmissionKind, Ask, decide_request, never_fits
from omlxd.core.events import Event, EventName
from omlxd.core.graceful import PARKED_ENOUGH
from omlxd.core.memory import MemoryReading
from omlxd.core.states import EntryState
from omlxd.core.waits import request_waits_for, waits_behind
from omlxd.daemon.entry import EnginePoolEntry
from omlxd.daemon.eviction import make_way
from omlxd.daemon.refusals import no_room, prompt_too_large
from omlxd.daemon.request import Generation
from omlxd.daemon.request_log import TOLD_AFTER_S
from omlxd.daemon.snapshots import holdings_of
from omlxd.engine.orders import GenerationOrder

if TYPE_CHECKING:
    from omlxd.daemon.pool import EnginePool

MAX_OVERTAKES: Final = 8
RECHECK_S: Final = 1.0  # memory can come back unannounced: other programs, a leak that ends


@dataclass(eq=False)
class Ticket:
    """A request that waits at the door; its result is the chunk it may use, None when its model has gone."""

    entry: EnginePoolEntry
    generation: Generation
    ask: Ask
    overtaken: int = 0
    stuck_since_s: float | None = None
    told: bool = False
    came_s: float = 0.0
    behind_told: bool = False
    admitted: bool = False
    result: asyncio.Future[int | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Door:
    """Admits requests to one pool's engine.

    Args:
        pool: whose ledger is written.
        wait_s: seconds a request waits when there is nobody whose end would make room.
    """

    def __init__(self, pool: EnginePool, wait_s: float) -> None:
        self._pool = pool
        self.wait_s = wait_s
        self._queue: list[Ticket] = []
        self._worker: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    @property
    def guarded(self) -> bool:
        """Whether requests may be kept waiting or refused at all."""
        return self._pool.link.wanted.limits.prefill_memory_guard

    def check(self, entry: EnginePoolEntry, generation: Generation, length_tokens: int) -> None:
        """Refuse what can never run before its model is loaded for it; raises PrefillMemoryExceeded."""
        if self._bound(generation):
            pool, ask = self._pool, self._ask(entry, length_tokens)
            refusal = never_fits(holdings_of(pool, pool.engine.read(), entry.name), pool.limits, ask)
            if refusal is not None:
                raise prompt_too_large(ask, refusal)

    async def admit(
        self, entry: EnginePoolEntry, generation: Generation, order: GenerationOrder
    ) -> GenerationOrder | None:
        """Reserve the request's memory, as soon as there is enough; None when the model was unloaded meanwhile.

        When it returns an order the request must go to the engine in the same turn of the loop, or be released.

        Raises:
            PrefillMemoryExceeded: it could not run even alone.
            Busy: memory that belongs to nobody, or the lack of it in the system, kept it waiting for `wait_s`; one that
                was parked waits on.
        """
        ask = self._ask(entry, len(order.prompt) + len(order.generated))
        if not self._bound(generation):
            self._reserve(entry, generation.id, ask, ask.chunk_tokens)
            return order
        chunk = None if self._must_queue(entry, generation) else self._at_once(entry, generation.id, ask)
        if chunk is None:
            chunk = await self._in_turn(Ticket(entry, generation, ask, came_s=self._pool.clock()))
        return None if chunk is None else replace(order, prefill_chunk_tokens=chunk)

    def release(self, entry: EnginePoolEntry, request: str) -> None:
        """The request's memory is back."""
        self._pool.ledger.release(entry.name, request)
        self._pool.growth.grant()
        self.wake()

    def wake(self) -> None:
        """There may be more room than before."""
        self._changed.set()

    async def close(self) -> None:
        """End the worker; those who wait are ended by who waits for them."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait([self._worker])

    def _bound(self, generation: Generation) -> bool:
        """Whether it has to fit: with the guard; and always when it was parked, or it would only be parked again."""
        return self.guarded or generation.parks > 0

    def _ask(self, entry: EnginePoolEntry, length_tokens: int) -> Ask:
        return Ask(entry.name, length_tokens, self._pool.link.prefill_chunk_tokens, entry.costs)

    def _must_queue(self, entry: EnginePoolEntry, generation: Generation) -> bool:
        """Whether others come first; who was parked comes back under the pool's lock only, when nobody decides."""
        if generation.parks or self._pool.growth.waiting:
            return True
        return any(ticket.entry is entry or ticket.overtaken >= MAX_OVERTAKES for ticket in self._waiting())

    def _waiting(self) -> list[Ticket]:
        return [ticket for ticket in self._queue if not ticket.result.done()]

    def _at_once(self, entry: EnginePoolEntry, request: str, ask: Ask) -> int | None:
        """Without a wait when even a reading inside a step leaves room; None when it does not."""
        pool = self._pool
        answer = decide_request(holdings_of(pool, pool.engine.read(), entry.name), pool.limits, pool.ledger, ask)
        if answer.kind is AdmissionKind.NEVER:
            raise prompt_too_large(ask, answer)
        if answer.kind is not AdmissionKind.ADMIT:
            return None
        self._overtake(self._waiting())
        self._reserve(entry, request, ask, answer.chunk_tokens)
        return answer.chunk_tokens

    async def _in_turn(self, ticket: Ticket) -> int | None:
        insort(self._queue, ticket, key=lambda each: each.generation.order)
        self.wake()
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work(), name="omlxd-door")
        admitted = False
        try:
            chunk = await ticket.result
            admitted = ticket.admitted and ticket.entry.takes(ticket.generation.id)
            return chunk if admitted else None
        finally:
            self._queue.remove(ticket)
            ticket.generation.waits_for = None
            if ticket.admitted and not admitted:  # its caller went away, or its model did, in that very moment
                self.release(ticket.entry, ticket.generation.id)
            self.wake()

    def _reserve(self, entry: EnginePoolEntry, request: str, ask: Ask, chunk: int) -> None:
        self._pool.ledger.reserve(entry.name, request, ask.costs, ask.prompt_tokens, chunk)
        self._pool.growth.grant()

    def _overtake(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            ticket.overtaken += 1

    async def _work(self) -> None:
        while self._queue:
            self._changed.clear()
            async with self._pool.lock:
                await self._serve()
            self._tell_who_is_behind()
            try:
                async with asyncio.timeout(RECHECK_S):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _serve(self) -> None:
        """Look at everybody once, in order: admit, evict for, refuse, or leave waiting."""
        pool = self._pool
        if pool.growth.waiting:
            return  # what runs already goes on first; it wakes the door
        reading = await pool.read_rest() or pool.engine.read()
        passed: list[Ticket] = []
        for ticket in self._waiting():
            if ticket.result.done():  # ended while somebody else was looked at
                continue
            if not ticket.entry.takes(ticket.generation.id):
                ticket.result.set_result(None)
                continue
            if any(other.entry is ticket.entry for other in passed):
                continue
            if _is_behind_parked(ticket.entry, ticket.generation):
                continue
            answer = _comes_alone(ticket.generation, pool.ledger.running())
            if answer is None:
                answer, reading = await self._evict_for(ticket, reading, first=not passed)
            if ticket.result.done() or not ticket.entry.takes(ticket.generation.id):
                continue  # the next look finds it
            if not self._bound(ticket.generation):
                answer = replace(answer, kind=AdmissionKind.ADMIT, chunk_tokens=ticket.ask.chunk_tokens)
            if answer.kind is AdmissionKind.ADMIT:
                self._overtake([other for other in passed if not other.result.done()])
                self._reserve(ticket.entry, ticket.generation.id, ticket.ask, answer.chunk_tokens)
                ticket.admitted = True
                ticket.result.set_result(answer.chunk_tokens)
            elif answer.kind is AdmissionKind.NEVER:
                ticket.result.set_exception(prompt_too_large(ticket.ask, answer))
            else:
                passed.append(ticket)
                self._wait_longer(ticket, answer)
                if ticket.overtaken >= MAX_OVERTAKES:
                    break

    def _tell_who_is_behind(self) -> None:
        """Say once of each that it stands behind others, when nothing was said of its own memory yet."""
        now_s = self._pool.clock()
        for ahead, ticket in enumerate(self._waiting()):
            if not (ticket.told or ticket.behind_told) and now_s - ticket.came_s >= TOLD_AFTER_S:
                ticket.behind_told = True
                self._pool.dispatch.log.waits(ticket.generation, waits_behind(ahead, ticket.entry.name))

    async def _evict_for(
        self, ticket: Ticket, reading: MemoryReading, *, first: bool
    ) -> tuple[Admission, MemoryReading]:
        """The answer for this ticket, after idle models that stand in its way have been unloaded one by one."""
        pool, model = self._pool, ticket.entry.name
        while True:
            yielding = self._yielding() if first else frozenset[str]()
            answer = decide_request(holdings_of(pool, reading, model), pool.limits, pool.ledger, ticket.ask, yielding)
            if answer.kind is not AdmissionKind.EVICT or ticket.result.done() or not self._bound(ticket.generation):
                return answer, reading
            numbers = {"victims": list(answer.victims), "need_bytes": answer.need_bytes}
            reading = await make_way(
                pool,
                answer.victims[0],
                model,
                trigger="request",
                why=answer.why,
                before=reading,
                candidates=answer.candidates,
                extra={**numbers, "short_bytes": answer.short_bytes, "for_request": ticket.generation.id},
            )

    def _yielding(self) -> frozenset[str]:
        """Models whose requests all wait, when nothing runs: else two that wait for each other would wait for ever."""
        entries = self._pool.entries.values()
        if self._pool.ledger.running() or any(entry.state is EntryState.LOADING for entry in entries):
            return frozenset()
        return frozenset(entry.name for entry in entries if entry.loaded and not entry.in_engine)

    def _wait_longer(self, ticket: Ticket, answer: Admission) -> None:
        now_s = self._pool.clock()
        ticket.generation.waits_for = request_waits_for(answer)
        if not ticket.told:
            ticket.told = True
            fields = {"reason": answer.why, "short_bytes": answer.short_bytes, "blockers": list(answer.blockers)}
            self._pool.emit(
                Event(EventName.REQUEST_WAITING, model=ticket.entry.name, request=ticket.generation.id, fields=fields)
            )
        if answer.blockers or ticket.generation.parks:
            ticket.stuck_since_s = None
        elif ticket.stuck_since_s is None:
            ticket.stuck_since_s = now_s
        elif now_s - ticket.stuck_since_s >= self.wait_s:
            ticket.result.set_exception(no_room(ticket.entry.name, answer, now_s - ticket.stuck_since_s))


def _comes_alone(generation: Generation, running: frozenset[str]) -> Admission | None:
    """Who was parked so often takes more than was predicted: it comes back when nobody else runs, and is not the one
    to be parked again then."""
    if generation.parks < PARKED_ENOUGH or not running:
        return None
    why = f"it was parked {generation.parks} times and comes back when nobody else runs"
    return Admission(AdmissionKind.WAIT, why, blockers=tuple(sorted(running)))


def _is_behind_parked(entry: EnginePoolEntry, generation: Generation) -> bool:
    """Whether an older request to the same model is parked: it comes back first, perhaps before it stands here."""
    return any(each.order < generation.order and entry.takes(each.id) for each in entry.parked)
