"""What the engine reports, brought to the entries and streams it belongs to; and the requests it has been given."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from omlxd.core.errors import OmlxError
from omlxd.core.events import Event, EventLevel, EventName
from omlxd.core.memory import MemoryReading, Policy
from omlxd.core.snapshot import RequestSnapshot
from omlxd.core.states import EntryState, FinishReason, RequestState
from omlxd.core.waits import waits_in_engine
from omlxd.daemon.entry import EnginePoolEntry
from omlxd.daemon.learning import learn_from
from omlxd.daemon.refusals import decision_behind
from omlxd.daemon.request import Cut, Generation
from omlxd.daemon.request_log import TOLD_AFTER_S, RequestLog
from omlxd.engine.events import (
    CacheDropped,
    EngineEvent,
    EngineStarted,
    Finished,
    Generated,
    LoadDone,
    LoadEnded,
    LoadProgress,
    NeedsBlock,
    OverLimit,
    Prefilled,
    RequestFailed,
    RequestGone,
    StepFailed,
    Unloaded,
)
from omlxd.engine.orders import GenerationOrder

if TYPE_CHECKING:
    from omlxd.daemon.pool import EnginePool


NO_CUT: Final = Cut("")
LOOKS_AT_ONCE: Final = 16  # each may be a line in the log


class Leaving(Enum):
    """Why a request was taken out of the plan; what the engine tells of it meanwhile counts unless it is dropped."""

    DROPPED = auto()
    PARKED = auto()
    CUT_SHORT = auto()


@dataclass(eq=False)
class Attempt:
    """One stay of a request in the engine; a request that is parked or evicted makes another one.

    `prefill_kv_bytes` is what its KV cache takes so far, None once it decodes and what was promised is what it takes.
    """

    order: GenerationOrder
    entry: EnginePoolEntry
    generation: Generation
    gone: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    started: bool = False
    prefilled_tokens: int = 0
    prefill_kv_bytes: int | None = 0
    leaving: Leaving | None = None
    cut: Cut = NO_CUT

    def frees_bytes(self, promised_bytes: int) -> int:
        """What would be free without it: what was promised for it, or what it holds of that while it is prefilled."""
        return promised_bytes if self.prefill_kv_bytes is None else min(promised_bytes, self.prefill_kv_bytes)


class Dispatch:
    """Keeps the requests that are in the plan and applies the engine's events, on the loop's thread."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self.log = RequestLog(pool.emit, pool.decisions)
        self._attempts: dict[str, Attempt] = {}
        self._stays: dict[str, Attempt] = {}  # by the request's own id
        self._to_look_at: deque[tuple[float, Attempt]] = deque()
        self._look: asyncio.TimerHandle | None = None
        self.backend: str | None = None

    async def run(self, entry: EnginePoolEntry, generation: Generation, order: GenerationOrder) -> None:
        """Put the request into the plan and wait until the engine is done with it, one way or another."""
        generation.stays += 1
        if generation.stays > 1:  # under a name that the engine has not seen: it never starts the same one twice
            order = replace(order, request=f"{order.request}.{generation.stays}")
        attempt = Attempt(order, entry, generation)
        self._attempts[order.request] = self._stays[generation.id] = attempt
        entry.in_engine.add(generation.id)
        generation.runs_under(self._pool.limits)
        link = self._pool.link
        link.wanted.requests[order.request] = order
        link.changed()
        self._look_later(attempt)
        try:
            await asyncio.shield(attempt.gone)
        except asyncio.CancelledError:  # the pool is closing; the engine's end frees the rest
            self._gone(order.request)
            raise

    def remove(self, generation: Generation) -> bool:
        """Take a request that has ended out of the plan; False when the engine does not have it."""
        attempt = self._stays.get(generation.id)
        if attempt is not None:
            self._leave(attempt, Leaving.DROPPED)
        return attempt is not None

    async def park(self, request: str, why: str, decision: str | None = None) -> bool:
        """Take it out of the engine until it fits again; True once its memory is back, False when it is not there."""
        attempt = self._stays.get(request)
        if attempt is None or attempt.leaving is not None:
            return False
        parks = attempt.generation.parks
        self._leave(attempt, Leaving.PARKED, Cut(why, decision))
        await asyncio.wait([attempt.gone])
        return attempt.generation.parks > parks

    async def cut_short(self, request: str, why: str, decision: str | None = None) -> None:
        """Have it end with the text it has; one that has none yet is parked. Returns when its memory is back."""
        attempt = self._stays.get(request)
        if attempt is not None:
            leaving = Leaving.CUT_SHORT if attempt.generation.generated else Leaving.PARKED
            self._leave(attempt, leaving, Cut(why, decision))
            await asyncio.wait([attempt.gone])

    def take_out(self, model: str, error: OmlxError) -> None:
        """The model is being evicted: `graceful` parks its requests, `reference` ends what has begun with `error`."""
        parks = self._pool.limits.policy is Policy.GRACEFUL
        for attempt in self._of(model):
            if parks and attempt.started:
                self._leave(attempt, Leaving.PARKED, Cut("its model was unloaded", decision_behind(error)))
                continue
            if attempt.started:
                self._end(attempt.generation, error)
            self._leave(attempt, Leaving.DROPPED)

    def abort_all(self, model: str, error: OmlxError) -> list[asyncio.Future[None]]:
        """End all requests that the engine has for the model; the futures resolve when their memory is back."""
        attempts = self._of(model)
        for attempt in attempts:
            self._end(attempt.generation, error)
            self._leave(attempt, Leaving.DROPPED)
        return [attempt.gone for attempt in attempts]

    def running(self) -> dict[str, tuple[RequestSnapshot, ...]]:
        """By model, the requests that the engine has and keeps, oldest first."""
        running: dict[str, list[Attempt]] = {}
        for attempt in self._attempts.values():
            if attempt.leaving is None:
                running.setdefault(attempt.entry.name, []).append(attempt)
        snapshots = {}
        for model, attempts in running.items():
            promised_bytes = self._pool.ledger.frees_bytes(model)
            snapshots[model] = tuple(
                RequestSnapshot(
                    each.id,
                    each.order,
                    attempt.frees_bytes(promised_bytes.get(each.id, 0)),
                    each.parks,
                    begun=attempt.started or attempt.prefill_kv_bytes != 0,
                )
                for attempt in sorted(attempts, key=lambda attempt: attempt.generation.order)
                for each in (attempt.generation,)
            )
        return snapshots

    def limits_changed(self) -> None:
        """Other limits are in force for what the engine has."""
        for attempt in self._attempts.values():
            attempt.generation.runs_under(self._pool.limits)

    def finish(self, generation: Generation, reason: FinishReason, cut: Cut | None = None) -> None:
        """It ended well, with the text it has; `cut` says what kept it from going on."""
        if generation.finish(reason):
            self.log.finished(generation, cut)

    def handle(self, events: Sequence[EngineEvent]) -> None:
        """Apply a batch of events, in order.

        Who waits for a change is not woken for one more token of an answer: that is most events by far, and each of
        those who wait would look at all models.
        """
        is_change = False
        for event in events:
            try:
                is_change |= self._apply(event)
            except Exception as error:  # a bug of ours; the other events must not get lost with it
                what = f"`{type(event).__name__}` of the engine could not be handled"
                logging.getLogger("omlxd").error(what, exc_info=error)
                is_change = True
        if is_change:
            self._pool.notify()

    def _apply(self, event: EngineEvent) -> bool:
        """Whether it is more than one more token of an answer."""
        if isinstance(event, Generated):
            attempt = self._begun(event.request)
            return attempt is not None and self._generated(attempt, event)
        self._about_requests(event)
        return True

    def _about_requests(self, event: EngineEvent) -> None:
        match event:
            case Prefilled(request=request):
                if (attempt := self._begun(request)) is not None:
                    self._prefilled(attempt, event)
            case NeedsBlock(model=model, length_tokens=length):
                self._pool.growth.needs_block(model, length)
            case Finished(request=request, reason=reason):
                if (attempt := self._begun(request)) is not None:
                    attempt.generation.stop = event.stop
                    if attempt.generation.measured is not None:
                        attempt.generation.measured.model_kv_bytes = event.model_kv_bytes
                    self.finish(attempt.generation, reason)
                self._gone(request)
            case RequestFailed(request=request, error=error):
                if (attempt := self._attempts.get(request)) is not None:
                    self._end(attempt.generation, error)
                self._gone(request)
            case RequestGone(request=request):
                self._gone(request)
            case _:
                self._about_models(event)

    def _prefilled(self, attempt: Attempt, event: Prefilled) -> None:
        pool, generation = self._pool, attempt.generation
        run_tokens = event.done - max(attempt.prefilled_tokens, event.reused)
        if generation.measured is not None:
            generation.measured.prefilled(attempt.entry.costs, event, run_tokens)
        learn_from(pool, attempt.entry, event, run_tokens)
        attempt.prefilled_tokens = event.done
        attempt.prefill_kv_bytes = event.kv_bytes if event.done < event.total else None
        generation.prefilled(event.done, event.reused)
        if event.done >= event.total:
            pool.ledger.prefilled(attempt.entry.name, generation.id)
            pool.door.wake()

    def _generated(self, attempt: Attempt, event: Generated) -> bool:
        """Whether it is the first token of this stay."""
        generation = attempt.generation
        is_first = generation.state is not RequestState.DECODE
        attempt.prefill_kv_bytes = None
        generation.push(event.text, event.tokens, event.token_ids, event.logprobs, event.held_characters)
        if attempt.leaving is None:
            self._pool.growth.generated(attempt.entry.name, generation.id, event.tokens)
        return is_first

    def _about_models(self, event: EngineEvent) -> None:
        pool, about = self._pool, getattr(event, "model", None)
        if about is not None and about not in pool.entries:
            return  # a model that is gone from the manifest, and whose memory is back
        match event:
            case LoadProgress(order=order, model=model, done_bytes=done, total_bytes=total):
                pool.loads.progress(pool.entries[model], order, done, total)
            case LoadDone(order=order, model=model, info=info, reading=reading):
                pool.loads.done(pool.entries[model], order, info, reading)
            case LoadEnded(order=order, model=model, error=error):
                pool.loads.ended(pool.entries[model], order, error)
            case Unloaded(model=model, reading=reading):
                self._unloaded(pool.entries[model], reading)
            case CacheDropped(freed_bytes=freed, reading=reading):
                fields = {"freed_bytes": freed, "active_bytes": reading.active_bytes}
                self._emit(Event(EventName.CACHE_DROPPED, fields=fields))
            case StepFailed(model=failed):
                what = {"step": event.step, "reason": event.error, "stack": list(event.stack)}
                self._emit(Event(EventName.ENGINE_FAILED, EventLevel.ERROR, model=failed, fields=what))
            case OverLimit():
                self._over_limit(event)
            case EngineStarted(backend=backend, reading=reading):
                self.backend = backend
                started = {"backend": backend, "base_bytes": reading.base_bytes}
                self._emit(Event(EventName.ENGINE_STARTED, fields=started))
                if pool.on_engine_started is not None:
                    pool.on_engine_started()

    def _over_limit(self, event: OverLimit) -> None:
        """The engine stands still: the enforcer decides and lets it go on; without one nobody would."""
        pool = self._pool
        if pool.on_over_limit is not None:
            pool.link.hold(event)
            pool.on_over_limit(event)
        else:
            pool.link.changed()

    def _unloaded(self, entry: EnginePoolEntry, reading: MemoryReading) -> None:
        for attempt in self._of(entry.name):
            self._gone(attempt.order.request)
        self._pool.link.wanted.resident.discard(entry.name)
        entry.state = EntryState.UNLOADED
        self._pool.ledger.release_weights(entry.name)
        self._pool.door.wake()
        if entry.unloaded is not None and not entry.unloaded.done():
            entry.unloaded.set_result(None)
        entry.unloaded = None
        self._pool.loads.unloaded(entry, reading)
        decision, entry.unloaded_by = entry.unloaded_by, None
        fields = {"active_bytes": reading.active_bytes}
        self._emit(Event(EventName.UNLOADED, model=entry.name, decision=decision, fields=fields))

    def _begun(self, request: str) -> Attempt | None:
        attempt = self._attempts.get(request)
        if attempt is None or attempt.leaving is Leaving.DROPPED:
            return None
        if not attempt.started:
            attempt.started = True
            self.log.runs(attempt.generation, attempt.generation.resume())
        return attempt

    def _end(self, generation: Generation, error: OmlxError) -> None:
        if generation.fail(error):
            self.log.failed(generation, error)

    def _leave(self, attempt: Attempt, leaving: Leaving, cut: Cut = NO_CUT) -> None:
        """Take it out of the plan; its memory is back when the engine says so."""
        if attempt.leaving is not None:
            if leaving is Leaving.DROPPED:  # it ended while it was being parked
                attempt.leaving = leaving
            return
        attempt.leaving, attempt.cut = leaving, cut
        request, link = attempt.order.request, self._pool.link
        del link.wanted.requests[request]
        link.changed()
        if not attempt.started:  # perhaps the engine has never seen it, and will have nothing to say about it
            link.after_fence(lambda: self._gone(request))

    def _gone(self, request: str) -> None:
        """The engine has nothing of it any more."""
        attempt = self._attempts.pop(request, None)
        if attempt is None:
            return
        del self._stays[attempt.generation.id]
        leaving, attempt.leaving = attempt.leaving, Leaving.DROPPED
        if self._pool.link.wanted.requests.pop(request, None) is not None:
            self._pool.link.changed()
        generation = attempt.generation
        is_parked = leaving is Leaving.PARKED and not generation.ended
        promised_bytes = self._pool.ledger.frees_bytes(attempt.entry.name).get(generation.id, 0) if is_parked else 0
        attempt.entry.in_engine.discard(generation.id)
        self._pool.door.release(attempt.entry, generation.id)
        if leaving is Leaving.CUT_SHORT:
            generation.cut_short = attempt.cut
            self.log.cost(generation, attempt.cut.decision)
        elif is_parked:
            generation.park()
            self.log.parked(generation, promised_bytes, attempt.cut)
        if not attempt.gone.done():
            attempt.gone.set_result(None)
        self._pool.notify()

    def _look_later(self, attempt: Attempt) -> None:
        loop = asyncio.get_running_loop()
        self._to_look_at.append((loop.time() + TOLD_AFTER_S, attempt))
        if self._look is None:
            self._look = loop.call_later(TOLD_AFTER_S, self._look_who_waits)

    def _look_who_waits(self) -> None:
        """Say once of each why the engine has it and has not begun with it; what was parked is told as parked."""
        loop, due = asyncio.get_running_loop(), list[Attempt]()
        while self._to_look_at and self._to_look_at[0][0] <= loop.time() and len(due) < LOOKS_AT_ONCE:
            due.append(self._to_look_at.popleft()[1])
        self._tell_who_waits([each for each in due if not each.generation.started and not each.generation.turn_told])
        self._look = None
        if self._to_look_at:
            self._look = loop.call_at(self._to_look_at[0][0], self._look_who_waits)

    def _tell_who_waits(self, attempts: Sequence[Attempt]) -> None:
        if not attempts:
            return
        kept = [each for each in self._attempts.values() if each.leaving is None]
        running = Counter(each.entry.name for each in kept if each.started)
        prompts = sum(each.prefill_kv_bytes is not None for each in kept)
        for attempt in attempts:
            if attempt.leaving is not None:
                continue
            model, others = attempt.entry.name, prompts - (attempt.prefill_kv_bytes is not None)
            reason = waits_in_engine(
                model, running[model], self._pool.link.max_batch, others, self._pool.loads.in_progress
            )
            if reason is not None:
                attempt.generation.turn_told = True
                self.log.waits(attempt.generation, reason)

    def _of(self, model: str) -> list[Attempt]:
        return [attempt for attempt in self._attempts.values() if attempt.entry.name == model]

    def _emit(self, event: Event) -> None:
        self._pool.emit(event)
