"""The engine pool: which models are loaded, pinned and used, and how a request finds its model.

Everything here runs on one event loop. `lock` is held while planning and evicting and while a load begins, never across
a slice of a load, a generation or a wait for somebody else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import Any, Unpack

from omlxd.core.costs import KvCosts
from omlxd.core.errors import DoesNotFit, OmlxError
from omlxd.core.events import Emit, Event, EventName
from omlxd.core.learned_costs import LearnedCosts
from omlxd.core.ledger import Ledger
from omlxd.core.manifest import DaemonSettings, ModelSettings
from omlxd.core.memory import MemoryReading
from omlxd.core.snapshot import Limits, Snapshot
from omlxd.core.states import EntryState
from omlxd.daemon.admission import Door
from omlxd.daemon.decisions import DecisionLog
from omlxd.daemon.dispatch import Dispatch
from omlxd.daemon.entry import EnginePoolEntry
from omlxd.daemon.growth import Growth
from omlxd.daemon.learning import costs_of_files
from omlxd.daemon.levers import Levers
from omlxd.daemon.link import EngineLink
from omlxd.daemon.load_ticket import OnProgress
from omlxd.daemon.loading import LoadQueue
from omlxd.daemon.memory_terms import memory_terms
from omlxd.daemon.model_files import ModelFiles, folder_fingerprint, model_folder, read_model_folder
from omlxd.daemon.prefix import PrefixBudget
from omlxd.daemon.refusals import aborted, cancelled, shutting_down, too_many_wait
from omlxd.daemon.request import Generation
from omlxd.daemon.roster import ModelSource, Roster
from omlxd.daemon.serving import Serving
from omlxd.daemon.snapshots import snapshot_of
from omlxd.daemon.wish import Options, check_prompt, check_wish
from omlxd.engine.events import OverLimit
from omlxd.engine.orders import EngineLimits
from omlxd.engine.protocol import Engine

REST_TIMEOUT_S = 5.0  # a step that takes longer is stuck; nothing is decided on what it shows

CostsOf = Callable[[ModelFiles, LearnedCosts | None, str | None], KvCosts]
"""What a model's requests cost: from its files, what was measured, and the backend if that is known."""


@dataclass(frozen=True, slots=True)
class UnloadResult:
    """What `unload` found and did: the entry, its state before (loaded, loading or unloaded), active memory freed."""

    entry: EnginePoolEntry
    was: EntryState
    freed_bytes: int


class EnginePool:
    """Several models in one process, loaded when they are asked for.

    It binds to the running event loop, and starts the engine, when it is first used.

    Args:
        models: by name: a model folder, or its settings.
        engine: what runs the models; by default one thread with MLX.
        clock: monotonic seconds.
        emit: where events go.
        load_wait_s: seconds a load may wait for memory that nobody in the pool gives back before it ends in Busy.
        fair_wait_s: seconds a load waits before models in use take nothing new, end what they have, and make way; None
            for no turns: what is idle goes at once, and a model in use blocks a load for up to `load_wait_s`.
        drain_timeout_s: seconds that `unload` lets running requests go on.
        prefill_chunk_tokens: tokens of one prefill step at most.
        max_batch: requests of one model that decode together.
        max_waiting: requests of one model that may wait; one more is told to come back later.
        park_deadline_s: seconds after which a parked request that does not fit again ends with the text it has.
        prefix_cache_bytes: what ended requests may leave for prompts that begin the same way, all models together;
            None for an eighth of the limit. It only ever takes what nobody else needs.
        read_folder: reads a model's files before it is loaded.
        fingerprint: tells whether they have changed since.
        costs_of: predicts what a model's requests take.
    """

    def __init__(
        self,
        models: Mapping[str, ModelSource],
        *,
        engine: Engine | None = None,
        clock: Callable[[], float] = time.monotonic,
        emit: Emit | None = None,
        load_wait_s: float = 60.0,
        fair_wait_s: float | None = 10.0,
        drain_timeout_s: float = 30.0,
        prefill_chunk_tokens: int = 256,
        max_batch: int = 32,
        max_waiting: int = 256,
        park_deadline_s: float = 300.0,
        prefix_cache_bytes: int | None = None,
        read_folder: Callable[[ModelSettings], ModelFiles] | None = None,
        fingerprint: Callable[[ModelSettings], str | None] | None = None,
        costs_of: CostsOf = costs_of_files,
    ) -> None:
        if engine is None:
            from omlxd.engine.thread import EngineThread  # brings numpy and psutil along: 30 ms

            engine = EngineThread()
        self.clock = clock
        self.emit: Emit = emit or _nowhere
        self.read_folder = read_folder or _read_folder
        self.fingerprint = fingerprint or _fingerprint
        self.costs_of = costs_of
        self.lock = asyncio.Lock()
        self.roster = Roster(models, clock)
        self.limits = Limits()
        self.draining = False
        self.decisions = DecisionLog(self.emit)
        self.ledger = Ledger(max_batch)
        self.dispatch = Dispatch(self)
        self.prefix = PrefixBudget(self, prefix_cache_bytes)
        self.link = EngineLink(
            engine,
            self.dispatch.handle,
            prefill_chunk_tokens=prefill_chunk_tokens,
            max_batch=max_batch,
            terms=partial(memory_terms, self),
        )
        self.on_over_limit: Callable[[OverLimit], None] | None = None
        self.on_engine_started: Callable[[], None] | None = None
        self.on_wanted_block: Callable[[str], Awaitable[None]] | None = None
        self.change = asyncio.Event()
        self.door = Door(self, load_wait_s)
        self.growth = Growth(self)
        self.levers = Levers(self)
        self._serving = Serving(self, park_deadline_s)
        self._drain_timeout_s = drain_timeout_s
        self._max_waiting = max_waiting
        self._loads = LoadQueue(self, load_wait_s, fair_wait_s)
        self._ids = count(1)
        self._admitting, self._restarting = True, False

    async def __aenter__(self) -> EnginePool:
        self.bind()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @property
    def engine(self) -> Engine:
        """What runs the models."""
        return self.link.engine

    @property
    def loads(self) -> LoadQueue:
        """The loads that wait or are in progress."""
        return self._loads

    @property
    def entries(self) -> Mapping[str, EnginePoolEntry]:
        """All models by name, loaded or not."""
        return MappingProxyType(self.roster.entries)

    @property
    def generations(self) -> tuple[Generation, ...]:
        """The requests in flight, oldest first."""
        return tuple(g for entry in self.roster.entries.values() for g in entry.requests.values() if not g.ended)

    @property
    def serves_any(self) -> bool:
        """Whether any request is in flight."""
        return any(not g.ended for entry in self.roster.entries.values() for g in entry.requests.values())

    def bind(self) -> None:
        """Start the engine for the running loop, if that has not been done."""
        self.link.bind()

    def resolve(self, name_or_alias: str) -> EnginePoolEntry:
        """The entry of this name or alias; raises UnknownModel with the nearest name as the hint."""
        return self.roster.resolve(name_or_alias)

    # Loading and unloading

    async def load(self, name: str, *, on_progress: OnProgress | None = None) -> EnginePoolEntry:
        """Load the model, or join the load that is under way; returns when it is resident.

        Cancelling the call does not cancel the load.

        Raises:
            UnknownModel: no such model.
            DoesNotFit: it can never fit; nothing was evicted.
            Busy: memory that nobody gives back was missing for `load_wait_s`.
            LoadCancelled, ShuttingDown: it was stopped.
            LoadFailed: its files do not make a model.
        """
        entry = self.resolve(name)
        self._check_admitting()
        self.bind()
        await self._serving.until_loaded(entry, on_progress=on_progress)
        return entry

    async def preload(self, name: str) -> EnginePoolEntry:
        """Load the model if it fits as things are: nobody makes way for it.

        Raises:
            UnknownModel: no such model.
            DoesNotFit: it can never fit, or not beside what is loaded.
            Busy, LoadCancelled, LoadFailed, ShuttingDown: as from `load`.
        """
        entry = self.resolve(name)
        self._check_admitting()
        self.bind()
        await self._loads.preload(entry)
        return entry

    async def unload(self, name: str, *, now: bool = False, drain_timeout_s: float | None = None) -> UnloadResult:
        """Unload the model, pinned or not; a load in progress is cancelled instead.

        Its requests are served for `drain_timeout_s` (the pool's, when None) and aborted then; with `now` at once.

        Raises:
            UnknownModel: no such model.
        """
        entry = self.resolve(name)
        if entry.ticket is not None:
            await self._loads.cancel(entry, cancelled(entry.name, "it was unloaded"))
            return UnloadResult(entry, EntryState.LOADING, 0)
        while entry.state is EntryState.UNLOADING:
            await self.change.wait()
        if not entry.loaded:
            return UnloadResult(entry, EntryState.UNLOADED, 0)
        timeout_s = 0.0 if now else self._drain_timeout_s if drain_timeout_s is None else drain_timeout_s
        entry.draining = frozenset(entry.requests)
        self.notify()  # who is parked and can never go on ends now
        try:
            before_bytes = self.engine.read().active_bytes
            await self._serving.drain(entry.requests.values(), timeout_s, "it was unloaded")
            async with self.lock:
                await self.levers.evict(entry.name, aborted(entry.name, "it was unloaded"))
            after_bytes = self.engine.read().active_bytes
        finally:
            entry.draining = None
            self.notify()
        return UnloadResult(entry, EntryState.LOADED, max(0, before_bytes - after_bytes))

    def pin(self, name: str) -> EnginePoolEntry:
        """Never unload this model for another; does not load it. Raises UnknownModel."""
        return self._set_pinned(name, True)

    def unpin(self, name: str) -> EnginePoolEntry:
        """Treat this model like any other again. Raises UnknownModel."""
        return self._set_pinned(name, False)

    def configure(self, settings: DaemonSettings) -> None:
        """Take over what another manifest says of waiting, draining and prefill; who waits already is not hurried."""
        self._drain_timeout_s, self._max_waiting = settings.drain_timeout_s, settings.max_waiting
        self._serving.park_deadline_s = settings.park_deadline_s
        self.door.wait_s = settings.load_timeout_s
        self._loads.configure(settings.load_timeout_s, settings.fair_wait_s)
        self.link.prefill_chunk_tokens = settings.prefill_chunk_tokens
        self.link.changed()
        self.notify()

    def inherit(self, entry: EnginePoolEntry) -> None:
        """Let a model that nobody uses become what a newer manifest says of it."""
        if entry.inherit():
            self.engine.forget_codec(entry.name)

    # Generating

    def generate(
        self,
        name: str,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        prompt: str | None = None,
        tokens: Sequence[int] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | None = None,
        **options: Unpack[Options],
    ) -> Generation:
        """Start a generation and return its stream; the model is loaded for it when it is not resident.

        Errors that come later (the model cannot be loaded, the prompt is longer than the context, the request had to
        give way) are raised once, from the iteration.

        Args:
            name: the model, or an alias.
            messages, prompt, tokens: exactly one of them: a conversation, plain text, token ids.
            tools: the functions on offer in the conversation, as OpenAI describes them.
            thinking: whether the model is to reason first, where its chat template knows how; None for its own way.
            max_tokens: at most this many; by default what the context leaves, at most 4096.
            temperature, top_p, top_k, min_p, seed: how tokens are chosen; temperature 0 (the default) is greedy, no
                seed is another one each time.
            presence_penalty, frequency_penalty, repetition_penalty, logit_bias: see `Sampling`.
            stop: texts that end the answer and are not part of it, at most 16.
            top_logprobs: tell how likely each token was, and this many likeliest ones; None tells nothing.
            form: what the answer is held to, whatever the model would rather say; None for nothing.
            keep_alive_s: seconds that the model is kept when nobody uses it after this request, infinite for no end;
                None for its own `ttl`.
            ignore_eos: the answer goes on behind an end that the model makes; not with a form.
            cache_prompt: whether it may use the prefix cache, and leave something there (the default).
            reasoning_field: the field of a request that asks for reasoning, which a model that cannot reason refuses;
                without it such a model answers as it can.

        Raises:
            UnknownModel: no such model.
            InvalidRequest: an option is out of range or the prompt is empty.
            Busy: too many requests wait for this model already; ShuttingDown: nothing new is taken.
        """
        entry = self.resolve(name)
        wish, asked = check_wish(options), check_prompt(messages, prompt, tokens, tools, thinking)
        self._check_admitting()
        if entry.waiting >= self._max_waiting:
            raise too_many_wait(entry.name, entry.waiting)
        self.bind()
        order = next(self._ids)
        generation = Generation(f"r{order}", entry.name, self, self.clock, order)
        self._serving.begin(entry, generation, asked, wish)
        return generation

    async def count_tokens(
        self,
        name: str,
        *,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | None = None,
    ) -> int:
        """How many tokens the conversation has as a prompt; the model is not loaded for it, only its tokenizer.

        Raises:
            UnknownModel: no such model.
            InvalidRequest: the conversation is empty, its template refuses it, or it is beyond the context by far.
            LoadFailed: there is no tokenizer that can be used.
        """
        return await self._serving.count(self.resolve(name), check_prompt(messages, None, None, tools, thinking))

    def abort(self, request_id: str, reason: str) -> bool:
        """End a request with one clear error now; its memory is back after the next step. False when there is none."""
        for entry in self.roster.entries.values():
            if (generation := entry.requests.get(request_id)) is not None:
                return self._serving.abort(generation, aborted(entry.name, reason))
        return False

    # For the enforcer and the load queue

    async def read_rest(self, timeout_s: float = REST_TIMEOUT_S) -> MemoryReading | None:
        """Memory with no step in flight; None when the running step does not end in time."""
        return await self.link.read_rest(timeout_s)

    def snapshot(self, reading: MemoryReading) -> Snapshot:
        """What a decision may depend on, now: the models that hold memory, and their requests."""
        return snapshot_of(self, reading)

    def set_limits(self, limits: Limits, engine_limits: EngineLimits) -> None:
        """Put limits in force, for loads and in the engine (R5); what did not fit under others may fit now."""
        if limits != self.limits:
            for entry in self.roster.entries.values():
                if entry.state is EntryState.UNLOADED and isinstance(entry.error, DoesNotFit):
                    entry.error = None
        self.limits = limits
        self.dispatch.limits_changed()
        self.link.wanted.limits = engine_limits
        self.link.changed()
        self.growth.grant()
        self.door.wake()
        self.notify()

    def notify(self) -> None:
        """Something changed that somebody may be waiting for."""
        self.change.set()
        self.change = asyncio.Event()

    # The end

    def stop_admitting(self, *, restarting: bool = False) -> None:
        """Refuse new requests and loads with ShuttingDown; what is there goes on."""
        self._admitting, self._restarting = False, restarting

    async def drain(self, timeout_s: float) -> list[str]:
        """Serve what is there for at most `timeout_s`, then abort the rest; what can never go on ends at once.

        Returns:
            The model of each request that was aborted.
        """
        self.draining = True
        self.notify()
        return await self._serving.drain(self.generations, timeout_s, "omlxd is shutting down")

    async def close(self, timeout_s: float = 10.0) -> bool:
        """End all requests and loads, give the memory back and end the engine; True when it ended in time."""
        self._admitting = False
        await self._serving.close()
        await self.door.close()
        await self.growth.close()
        await self._loads.close()
        for entry in self.roster.entries.values():
            if entry.loaded:
                entry.state = EntryState.UNLOADING
        in_time = await self.link.close(timeout_s)
        for entry in self.roster.entries.values():
            if entry.state is not EntryState.FAILED:
                entry.state = EntryState.UNLOADED
            if entry.unloaded is not None and not entry.unloaded.done():
                entry.unloaded.set_result(None)
            self.ledger.release_weights(entry.name)
        self.notify()
        return in_time

    # Below: how it is done

    def _set_pinned(self, name: str, pinned: bool) -> EnginePoolEntry:
        entry = self.resolve(name)
        if entry.pinned is not pinned:
            entry.pinned = pinned
            self.emit(Event(EventName.PINNED if pinned else EventName.UNPINNED, model=entry.name))
            self.door.wake()
            self.notify()
        return entry

    def _check_admitting(self) -> None:
        if not self._admitting:
            raise shutting_down(restarting=self._restarting)


def _read_folder(settings: ModelSettings) -> ModelFiles:
    return read_model_folder(model_folder(settings))


def _fingerprint(settings: ModelSettings) -> str | None:
    try:
        return folder_fingerprint(model_folder(settings))
    except OmlxError:  # not in the cache of the hub
        return None


def _nowhere(event: Event) -> None:
    """Events of a pool that nobody listens to."""
