"""Closes the difference between a plan and what there is, and takes the steps; single-threaded, no waiting.

Everything here runs on the engine's thread. What happened is collected in `report`; the thread sends it on.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import suppress

from omlxd.core.errors import EngineFailed, LoadCancelled, OmlxError
from omlxd.core.wording import INSTALL_HINT
from omlxd.engine import buffer_cache, mishaps, mlxlm
from omlxd.engine.events import (
    CacheDropped,
    EngineStarted,
    LoadDone,
    LoadEnded,
    LoadProgress,
    ModelInfo,
    NeedsBlock,
    Prefilled,
    Unloaded,
)
from omlxd.engine.gauges import Gauges
from omlxd.engine.glibc import tame_glibc, trim_heap
from omlxd.engine.loader import LoadedModel, SlicedLoad
from omlxd.engine.orders import Plan
from omlxd.engine.pace import Gathering, LoadTurn, Pace, PromptTurn
from omlxd.engine.prefix_cache import PrefixCaches
from omlxd.engine.report import Report
from omlxd.engine.resident import ResidentModel
from omlxd.engine.running import Running
from omlxd.engine.unloading import give_back
from omlxd.engine.warm_codecs import WarmCodecs


class PlanExecutor:
    """The models, the load in progress and their requests.

    Args:
        gauges: memory, and MLX's knobs.
        clock: monotonic seconds.

    Attributes:
        report: what happened, and is to be sent on.
        kv_bytes: KV cache bytes by model, at most 0.1 s old; replaced, never changed.
        prefixes: what ended requests have left for later ones.
        codecs: the tokenizers that are kept, of models that are loaded and others.
        waits_s: how long the round that took no step waits at most for what the next plan may bring.
    """

    def __init__(self, gauges: Gauges, clock: Callable[[], float]) -> None:
        self.report = Report(lambda model: self._models[model].kv_bytes)
        self.kv_bytes: dict[str, int] = {}
        self.prefixes = PrefixCaches()
        self.codecs = WarmCodecs(gauges.grow_base)
        self.started = False
        self._gauges, self._clock = gauges, clock
        self._plan = Plan()
        self._asked_block: dict[str, int] = {}
        self._cache_drops = 0
        self._models: dict[str, ResidentModel] = {}
        self._done_seq: dict[str, int] = {}
        self._pace = Pace()
        self.waits_s = 0.0
        self._load: SlicedLoad | None = None
        self._last_order = 0
        self._kv_at = 0.0

    @property
    def has_work(self) -> bool:
        """Whether `steps` would do anything."""
        return self._load is not None or any(
            model.prompts or (model.decoding and self._is_granted(model)) for model in self._models.values()
        )

    def steps(self) -> Iterator[None]:
        """One round: a decode step of everybody whom no hold stops, then one turn of a prompt or the load.

        Yields after each step, when the caller may stop the round.
        """
        decoding = [model for model in self._models.values() if model.decoding and self._is_granted(model)]
        going_on = [model for model in decoding if not self._pace.holds(model, self._clock())]
        for model in going_on:
            self._leave_room()
            self._decode(model)
            yield
        if decoding:
            self._pace.decoded(self._clock())
        if self._take_turn(answers_wait=bool(going_on)):
            yield

    def _take_turn(self, *, answers_wait: bool) -> bool:
        """A chunk of the prompt, or a slice of the load, whose turn it is; False when nobody waits.

        On its own, since the round may stand still behind it: what it holds must not outlive the step, or a request
        that is taken out meanwhile keeps its KV cache.
        """
        load = self._load
        if load and load.awaits_codec and any(model.prompts or model.decoding for model in self._models.values()):
            load = None  # it is not kept waiting, it waits
        turn = self._pace.next_turn(self._models.values(), load, self._clock(), answers_wait=answers_wait)
        self.waits_s = turn.left_s if isinstance(turn, Gathering) else 0.0
        if isinstance(turn, PromptTurn):
            self._leave_room()
            self._prefill(turn)
            return True
        if self._load and isinstance(turn, LoadTurn):
            self._load_slice(self._load, turn)
            return True
        return False

    def _is_granted(self, model: ResidentModel) -> bool:
        """Whether the next decode step stays within what was reserved; asks once for more when it does not."""
        granted, length = self._plan.granted_tokens.get(model.name), model.length_tokens
        if granted is None or length < granted:
            self._asked_block.pop(model.name, None)  # whoever stands there next asks anew
            return True
        if self._asked_block.get(model.name) != length:
            self._asked_block[model.name] = length
            self.report.tell(NeedsBlock, model.name, length)
        return False

    def follow(self, plan: Plan) -> None:
        """Close the difference: end, unload, cancel, start."""
        if plan.granted_tokens != self._plan.granted_tokens:
            self._asked_block.clear()
        has_new_limits, self._plan = plan.limits != self._plan.limits, plan
        self._gauges.obey(plan.limits)
        if has_new_limits and self._gauges.cache_bytes() > self._gauges.cache_room_bytes:
            self._drop_cache()  # where MLX does not look at a new limit before it frees something next, as on CUDA
        self.prefixes.obey(plan.prefix_cache_bytes)  # before anything new begins in the room it makes
        if plan.cache_drops > self._cache_drops:
            self._cache_drops = plan.cache_drops
            gc.collect()
            self._drop_cache()
        for model in self._models.values():
            model.obey(plan)
        self._remove_requests(plan)
        if self._load and (plan.load is None or plan.load.id != self._load.order.id):
            self._end_load(
                self._load,
                LoadCancelled(f"the load of `{self._load.order.model}` was cancelled", details={"retry_after_s": 1.0}),
            )
        for name in list(self._models):
            if name not in plan.resident and plan.seen_seq >= self._done_seq[name]:
                self._unload(name)
        self.codecs.use(plan.resident | ({plan.load.model} if plan.load else set()))
        if plan.load and plan.load.id > self._last_order and self._load is None:
            self._last_order = plan.load.id
            self._load = SlicedLoad(plan.load, self._gauges, self.codecs, self._clock())
        self._add_requests(plan)

    def _remove_requests(self, plan: Plan) -> None:
        self.report.ended &= plan.requests.keys()
        for model in self._models.values():
            leaving = {request for request in model.requests if request not in plan.requests}
            if leaving:
                # Those that stay are copied, layer by layer: all KV caches are more than that takes in passing.
                buffer_cache.leave_room(self._gauges, plan.limits.hard_bytes, model.kv_bytes)
                try:
                    model.remove(leaving)
                except Exception as error:
                    self._step_failed(model, "abort", error, leaving | model.batched)
                self.measure_kv(now=True)
                self.report.gone(sorted(leaving))

    def _add_requests(self, plan: Plan) -> None:
        known = {request for model in self._models.values() for request in model.requests} | self.report.ended
        for request, order in plan.requests.items():
            if request in known:
                continue
            model = self._models.get(order.model)
            try:
                if model is None:
                    raise EngineFailed(f"`{order.model}` is not loaded any more", hint="try again")
                model.add(order, self._clock())
            except OmlxError as error:
                self.report.failed(request, error)
            except Exception as error:
                self.report.failed(request, mishaps.failure(order.model, error))

    def _unload(self, name: str) -> None:
        model = self._models.pop(name)
        del self._done_seq[name]
        gone = model.requests
        self.report.ended.update(gone)
        try:
            self.prefixes.drop(name)
            give_back(model, self._gauges, self._clock)
        except Exception as error:  # it is gone all the same, and whoever waits for that has to hear of it
            self.report.stumbled(name, "unload", error)
            with suppress(Exception):
                model.close()
                mlxlm.release_memory()
        self._gauges.unsettle()
        self.measure_kv(now=True)
        self.report.gone(gone)
        self.report.tell(Unloaded, name, self._gauges.read(at_rest=True))

    def _leave_room(self) -> None:
        plan, kept_bytes = self._plan, sum(self.prefixes.by_model.values())
        stays_bytes = plan.promised_bytes + kept_bytes
        buffer_cache.leave_room(self._gauges, plan.limits.hard_bytes, plan.transient_bytes, stays_bytes)

    def keep_under_hard(self) -> None:
        """Give MLX's buffer cache back when `active + cache` is above the hard limit (rung 1)."""
        hard_bytes = self._plan.limits.hard_bytes
        if hard_bytes and self._gauges.active_bytes() + self._gauges.cache_bytes() > hard_bytes:
            self._drop_cache()

    def _drop_cache(self) -> None:
        if (freed_bytes := buffer_cache.drop(self._gauges)) > 0:
            self.report.tell(CacheDropped, freed_bytes, self._gauges.read(at_rest=True))

    def give_back(self) -> None:
        """Give back what MLX and the C library keep of what was freed: nothing runs that would use it soon."""
        if self._gauges.cache_bytes():
            self._drop_cache()
            trim_heap()

    def measure_kv(self, *, now: bool = False) -> None:
        """Refresh `kv_bytes` when it is older than 0.1 s, or `now`."""
        if now or self._clock() - self._kv_at > 0.1:
            self._kv_at = self._clock()
            self.kv_bytes = {name: model.kv_bytes for name, model in self._models.items()}

    def fail_everything(self, error: Exception) -> None:
        """A bug of ours: end every request and the load, each with one error, and keep the models. Never raises."""
        self.report.stumbled(None, "plan", error)
        error.__traceback__ = None  # its frames hold arrays
        failed = EngineFailed(f"the engine stumbled: {type(error).__name__}: {error}", hint="`omlxd logs -n 20`")
        failed.logged = f"the engine stumbled: {type(error).__name__}"
        for model in self._models.values():
            model.reset()
        if self._load:
            self._end_load(self._load, failed)
        elif self._plan.load and self._plan.load.id > self._last_order:  # it stumbled before it began with it
            order, self._last_order = self._plan.load, self._plan.load.id
            reading = self._gauges.read(at_rest=False)
            self.report.tell(LoadEnded, order.id, order.model, failed, reading)
        self.report.finished()
        for request in self._plan.requests.keys() - self.report.ended:
            self.report.failed(request, failed)
        with suppress(Exception):
            mlxlm.release_memory()

    def close(self) -> None:
        """Drop everything; each request and the load end with one error."""
        closing = EngineFailed("the engine is closed", hint="`omlxd start`")
        for model in self._models.values():
            for request in model.close():
                self.report.failed(request, closing)
        for name in self._models:
            self.prefixes.drop(name)
        self._models.clear()
        if self._load:
            self._end_load(self._load, closing)
        if self.started:
            mlxlm.release_memory()

    def _load_slice(self, load: SlicedLoad, turn: LoadTurn) -> None:
        began_s, done_bytes = self._clock(), load.done_bytes
        self._gauges.unsettle()
        try:
            self._ensure_started()
            loaded = load.step(self._plan.limits, turn.slice_bytes)
        except OmlxError as error:
            self._end_load(load, error)
            return
        except Exception as error:
            self.report.stumbled(load.order.model, "load", error)
            self._end_load(load, mishaps.failure(load.order.model, error))
            return
        load.moved_s = self._clock()
        if load.codec is None:
            return  # nothing to tell: its tokenizer comes before the weights, so that prompts can be judged meanwhile
        self._pace.loaded(load.done_bytes - done_bytes, load.moved_s - began_s)
        self.report.tell(LoadProgress, load.order.id, load.order.model, load.done_bytes, load.total_bytes)
        if loaded:
            self._load = None
            self._admit(load, loaded)

    def _admit(self, load: SlicedLoad, loaded: LoadedModel) -> None:
        name, plan = loaded.name, self._plan
        model = ResidentModel(loaded, plan.prefill_chunk_tokens, plan.max_batch, self.prefixes)
        model.obey(plan)
        self._models[name] = model
        self._gauges.unsettle()
        codec, took = loaded.codec, (loaded.load_s, loaded.disk_bytes)
        info = ModelInfo(loaded.weights_bytes, codec.context_length, codec.vocab_size, *took)
        done = self.report.tell(LoadDone, load.order.id, name, info, self._gauges.read(at_rest=False))
        self._done_seq[name] = done.seq

    def _end_load(self, load: SlicedLoad, error: OmlxError) -> None:
        self._load = None
        error.__traceback__ = None  # its frames hold arrays
        try:
            if self.started:
                load.abandon()
        except Exception as mishap:  # whoever waits for its end has to hear of it
            self.report.stumbled(load.order.model, "load", mishap)
        self._gauges.unsettle()
        self.report.tell(LoadEnded, load.order.id, load.order.model, error, self._gauges.read(at_rest=True))

    def _prefill(self, turn: PromptTurn) -> None:
        model, head, before = turn.model, turn.request.order.request, turn.request.prefilled
        self._gauges.reset_peak()
        began_s, live = self._clock(), self._gauges.active_bytes()
        alone = self._pace.holds_after(model, turn.request, began_s)
        try:
            requests = model.prefill_step(
                turn.request,
                turn.chunk_tokens,
                self.report.token,
                group_tokens=turn.group_tokens,
                least_reused=turn.least_reused,
                alone=alone,
            )
            if len(requests) == 1:
                self._prefilled(turn, requests[0], before, began_s, live)
            else:
                tokens = len(requests) * max(len(request.tokens) for request in requests)
                self._pace.prefilled(model.name, tokens, self._clock() - began_s)
                for request in requests:
                    self.report.tell(Prefilled, request.order.request, request.prefilled, len(request.tokens))
            model.tell_first([each for each in requests if each.prefilled == len(each.tokens)], self.report.token)
        except Exception as error:
            self._step_failed(model, "prefill", error, {head} | model.in_step)
            return
        self.report.finished()

    def _prefilled(self, turn: PromptTurn, request: Running, before: int, began_s: float, live_bytes: int) -> None:
        """What the step took; `before` are the tokens that were read before it, `live_bytes` what was active."""
        request.moved_s = self._clock()
        run_tokens = min(turn.chunk_tokens, request.prefilled - max(before, request.reused))
        self._pace.prefilled(turn.model.name, run_tokens, request.moved_s - began_s)
        total, transient = len(request.tokens), self._gauges.above_active_bytes()
        peak = self._gauges.active_bytes() + transient
        figures = (request.prefilled, total, transient, request.kv_bytes, request.reused, live_bytes, peak)
        self.report.tell(Prefilled, request.order.request, *figures)

    def _decode(self, model: ResidentModel) -> None:
        try:
            model.decode_step(self.report.token)
        except Exception as error:
            self._step_failed(model, "decode", error, model.in_step)
        self.report.finished()

    def _step_failed(self, model: ResidentModel, step: str, error: Exception, concerned: set[str]) -> None:
        """End the requests whose step it was, and those that got lost in it; all others stay where they are."""
        self.report.stumbled(model.name, step, error)
        failed = mishaps.failure(model.name, error)
        error.__traceback__ = None  # its frames hold arrays
        try:
            model.salvage(concerned)
        except Exception as mishap:
            self.report.stumbled(model.name, step, mishap)
            model.reset()
        self.report.finished()
        left = set(model.requests)
        for request, order in self._plan.requests.items():
            if order.model == model.name and request not in left and request not in self.report.ended:
                self.report.failed(request, failed)
        with suppress(Exception):
            mlxlm.release_memory()

    def _ensure_started(self) -> None:
        if self.started:
            return
        try:
            tame_glibc()
            mlxlm.import_libraries()
            self._gauges.attach()
        except ImportError as error:
            raise EngineFailed(f"MLX cannot be imported: {error}", hint=INSTALL_HINT) from None
        self._gauges.obey(self._plan.limits)
        self.started = True
        self.report.tell(EngineStarted, self._gauges.backend.name, self._gauges.read(at_rest=True))
