"""A fake engine: obeys the contract of `omlxd.engine.protocol` with invented models, memory and words.

It is driven in one of three ways:

- `manual`: the test calls `step()` or `run_until_idle()`;
- `loop`: it takes its steps on the event loop, one per turn, as long as there is work: deterministic, without threads;
- `thread`: on a thread of its own like the real one, `step_s` apart: for end-to-end tests of the server.

A request's answer is `tok0 tok1 tok2 ...`, of the token ids 0, 1, 2, ...; it ends after `answer_tokens` tokens with
`stop`, or at its `max_tokens` with `length`. A prompt has one token per word. A request that comes back after it was
parked has to bring the tokens it had made, and goes on behind them.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from omlxd.core.answer_form import AnswerForm
from omlxd.core.errors import DoesNotFit, EngineFailed, InvalidRequest, LoadCancelled, LoadFailed, OmlxError
from omlxd.core.histogram import Histogram
from omlxd.core.memory import MemoryReading
from omlxd.core.prefix_index import LEAST_TOKENS, PrefixIndex
from omlxd.core.reply import ANSWER, REASONING, TOOL_CALL, ReplyFormat, Transitions
from omlxd.core.states import FinishReason
from omlxd.engine.codec import TextCodec, ToolCallText
from omlxd.engine.events import (
    CacheDropped,
    EngineEvent,
    EngineStarted,
    Finished,
    Generated,
    LoadDone,
    LoadEnded,
    LoadProgress,
    ModelInfo,
    NeedsBlock,
    OverLimit,
    Post,
    Prefilled,
    RequestFailed,
    RequestGone,
    TokenLogprob,
    Unloaded,
)
from omlxd.engine.grammars import Constraint
from omlxd.engine.orders import MIB, GenerationOrder, LoadOrder, Plan
from omlxd.engine.protocol import Sampled

GIB = 1024 * MIB


@dataclass(frozen=True)
class FakeCodec:
    """One token per word; the id is the word's length."""

    vocab_size: int = 1000
    context_length: int | None = 4096
    transitions: Transitions = field(default_factory=dict)
    start: str = ANSWER

    @property
    def reasons(self) -> bool:
        return any(to == REASONING for edges in self.transitions.values() for _, to in edges)

    def token_bytes(self, token: int) -> bytes:
        return self.token_text(token).encode()

    def held_back(self, generated: Sequence[int], stop: Sequence[str]) -> str:
        return ""  # the fake engine tells everything at once

    def encode_text(self, text: str) -> list[int]:
        return [len(word) % self.vocab_size for word in text.split()]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | None = None,
    ) -> list[int]:
        if any(message["role"] == "nobody" for message in messages):
            raise InvalidRequest("the chat template refuses the role `nobody`")
        if tools and not any(to == TOOL_CALL for edges in self.transitions.values() for _, to in edges):
            raise InvalidRequest("this model's chat template knows no tools", details={"param": "tools"})
        spoken = [token for message in messages for token in (1, *self.encode_text(str(message["content"])))]
        return spoken + [2] * len(tools)

    def constrain(self, form: AnswerForm, prompt: Sequence[int], *, is_chat: bool) -> Constraint | None:
        if form.must_call:
            raise InvalidRequest("`tool_choice`: the fake forces nobody", details={"param": form.param})
        return None  # the fake engine says what it says

    def token_text(self, token: int) -> str:
        return f"tok{token} "

    def reply_format(self, prompt: Sequence[int], *, with_tools: bool) -> ReplyFormat:
        kept = {
            state: [e for e in edges if with_tools or e[1] != TOOL_CALL] for state, edges in self.transitions.items()
        }
        return ReplyFormat(self.start, {state: edges for state, edges in kept.items() if edges})

    def parse_tool_calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[ToolCallText]:
        try:
            call = json.loads(text)
            return [ToolCallText(call["name"], json.dumps(call["arguments"]))]
        except (ValueError, KeyError):
            return []


@dataclass
class _Running:
    order: GenerationOrder
    prefilled: int = 0
    generated: int = 0
    text: str = ""
    reused: int = 0

    def __post_init__(self) -> None:
        self.generated = len(self.order.generated)
        assert self.order.generated == tuple(range(self.generated)), "not the tokens that were generated"
        self.text = "".join(f"tok{token} " for token in self.order.generated)

    @property
    def total(self) -> int:
        return len(self.order.prompt) + len(self.order.generated)

    @property
    def tokens(self) -> int:
        return self.prefilled + self.generated - len(self.order.generated)


@dataclass
class _Loaded:
    weights_bytes: int
    seq: int
    codec: FakeCodec
    requests: dict[str, _Running] = field(default_factory=dict)


@dataclass
class _Loading:
    order: LoadOrder
    done_bytes: int = 0


class FakeEngine:
    """Implements `protocol.Engine` without MLX.

    Args:
        drive: who takes the steps, see above.
        step_s: seconds between two steps (`loop` and `thread`).
        kv_bytes_per_token: what a token of a running request costs.
        slice_bytes: how much of a load one step brings.
        answer_tokens: how long an answer is unless `max_tokens` is smaller; None for as long as it may be.
        context_length, vocab_size: of every model.
        device_cap: what the device is said to allow.

    Attributes (a test may change them at any time):
        step_s: as given.
        cache_bytes: freed buffers that are kept.
        leak_bytes: active memory that belongs to nobody.
        overhead_bytes: memory of the process that MLX does not see.
        system_available_bytes: what the system is said to have.
        measured_weights: by model: what its load brings, whatever the order said.
        chunk_token_bytes: what a token of a prefill chunk holds in passing.
        measures_prefill: whether prefill steps tell what they took.
        load_errors: by model: what its load ends with after its first slice.
        step_errors: by model: what its next step raises; ends its requests.
        stalled_for_s: since when the running step takes no end, as `stalled_s` tells it.
        hold_rests: a step is stuck: readings at rest are not answered.
        peak: the highest active memory so far.
        plans: every plan that was applied.
        script: the texts of the tokens of the next answers, instead of `tok0 tok1 ...`.
        transitions, reply_start: how the models loaded from now on mark the parts of their replies.
    """

    def __init__(
        self,
        drive: Literal["manual", "loop", "thread"] = "manual",
        *,
        step_s: float = 0.0,
        kv_bytes_per_token: int = 1024,
        slice_bytes: int = 64 * MIB,
        answer_tokens: int | None = 8,
        context_length: int | None = 4096,
        vocab_size: int = 1000,
        device_cap: tuple[int, str] | None = None,
    ) -> None:
        self.cache_bytes = 0
        self.leak_bytes = 0
        self.overhead_bytes = 0
        self.system_available_bytes = 32 * GIB
        self.measured_weights: dict[str, int] = {}
        self.chunk_token_bytes = 0
        self.measures_prefill = False
        self.load_errors: dict[str, Exception] = {}
        self.step_errors: dict[str, Exception] = {}
        self.stalled_for_s = 0.0
        self.hold_rests = False
        self.peak = 0
        self.plans: list[Plan] = []
        self.script: tuple[str, ...] = ()
        self._step_times = Histogram((1.0,))
        self.transitions: Transitions = {}
        self.reply_start = ANSWER
        self.closed = False
        self._drive, self.step_s = drive, step_s
        self._kv_bytes_per_token, self._slice_bytes = kv_bytes_per_token, slice_bytes
        self._answer_tokens = answer_tokens
        self._codec, self._device_cap = FakeCodec(vocab_size, context_length), device_cap
        self._codecs: dict[str, FakeCodec] = {}
        self._wake = threading.Condition(threading.RLock())
        self._plan, self._seen = Plan(), Plan()
        self._models: dict[str, _Loaded] = {}
        self._load: _Loading | None = None
        self._last_order = 0
        self._ended: set[str] = set()
        self._prefixes = PrefixIndex[None]()
        self._asked_blocks: dict[str, int] = {}
        self._dropped = 0
        self._paused_seq: int | None = None
        self._rests: list[Future[MemoryReading]] = []
        self._events: list[EngineEvent] = []
        self._seq = 0
        self._started = False
        self._post: Post | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False

    # --- the protocol

    def start(self, post: Post) -> None:
        assert self._post is None, "start comes once"
        self._post = post
        if self._drive == "loop":
            self._loop = asyncio.get_running_loop()
        elif self._drive == "thread":
            self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
            self._thread.start()

    def apply(self, plan: Plan) -> None:
        with self._wake:
            assert plan.seen_seq <= self._seq, "a plan cannot have seen what was not sent"
            self._plan = plan
            self.plans.append(plan)
            self._wake.notify()
        self._schedule()

    def read(self) -> MemoryReading:
        with self._wake:
            return self._reading(at_rest=not self._has_work())

    def rest(self) -> Future[MemoryReading]:
        asked: Future[MemoryReading] = Future()
        with self._wake:
            if self.closed or (self._drive == "manual" and not self.hold_rests):  # the test stands between two steps
                if not self.closed:
                    self._follow()
                asked.set_result(self._reading())
                self._flush()
                return asked
            self._rests.append(asked)
            self._wake.notify()
        self._schedule()
        return asked

    def kv_bytes(self) -> Mapping[str, int]:
        with self._wake:
            return {name: self._kv(model) for name, model in self._models.items()}

    def prefix_bytes(self) -> Mapping[str, int]:
        with self._wake:
            return self._prefixes.by_model()

    def peak_bytes(self) -> int:
        return self.peak

    def sampled(self) -> Sampled:
        return Sampled()

    def step_times(self) -> Histogram:
        return self._step_times

    def codec(self, model: str) -> TextCodec | None:
        return self._codecs.get(model)

    def forget_codec(self, model: str) -> None:
        self._codecs.pop(model, None)

    def read_codec(self, order: LoadOrder) -> TextCodec:
        codec = FakeCodec(self._codec.vocab_size, order.max_context or self._codec.context_length, self.transitions)
        return self._codecs.setdefault(order.model, codec)

    def device_cap(self) -> tuple[int, str] | None:
        return self._device_cap

    def stalled_s(self) -> float:
        return self.stalled_for_s

    def stack(self) -> Sequence[str]:
        return ("fakes/engine.py:1 step",) if self.stalled_for_s else ()

    def close(self, timeout_s: float = 10.0) -> bool:
        with self._wake:
            if not self.closed:
                self.closed = True
                self._tear_down()
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    # --- for tests

    @property
    def loaded(self) -> set[str]:
        """The models in memory."""
        with self._wake:
            return set(self._models)

    @property
    def active_bytes(self) -> int:
        """Weights, what a load has brought so far, KV caches, kept prefixes and the leak."""
        return self._reading().active_bytes

    def step(self) -> bool:
        """Follow the newest plan and take one step; False when there was nothing to do."""
        with self._wake:
            if self.closed:
                return False
            sent = self._seq
            self._follow()
            self._answer_rests()
            worked = self._paused_seq is None and self._work()
            self._flush()
            return worked or self._seq > sent

    def run_until_idle(self, at_most: int = 100_000) -> None:
        """Take steps until there is nothing to do."""
        for _ in range(at_most):
            if not self.step():
                return
        raise AssertionError(f"still busy after {at_most} steps")

    # --- the work

    def _run(self) -> None:
        while not self.closed:
            if not self.step():
                with self._wake:
                    self._wake.wait_for(self._called)
            elif self.step_s:
                threading.Event().wait(self.step_s)

    def _called(self) -> bool:
        return self.closed or self._plan is not self._seen or (bool(self._rests) and not self.hold_rests)

    def _schedule(self, later: bool = False) -> None:
        if self._loop is None or self._scheduled or self.closed or self._loop.is_closed():
            return
        self._scheduled = True
        if later and self.step_s:
            self._loop.call_later(self.step_s, self._turn)
        else:
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        if self.step():
            self._schedule(later=True)

    def _has_work(self) -> bool:
        return self._load is not None or any(model.requests for model in self._models.values())

    def _follow(self) -> None:
        """Close the difference to the newest plan, also while paused."""
        if self._plan.granted_tokens != self._seen.granted_tokens:
            self._asked_blocks.clear()
        plan = self._seen = self._plan
        self._prefixes.shrink(plan.prefix_cache_bytes)
        if plan.cache_drops > self._dropped:
            self._dropped = plan.cache_drops
            self._drop_cache()
        self._ended &= plan.requests.keys()
        for model in self._models.values():
            for request in [request for request in model.requests if request not in plan.requests]:
                del model.requests[request]
                self._send(RequestGone, request)
        if self._load is not None and (plan.load is None or plan.load.id != self._load.order.id):
            self._end_load(LoadCancelled(f"the load of `{self._load.order.model}` was cancelled"))
        for name in [name for name in self._models if name not in plan.resident]:
            if plan.seen_seq >= self._models[name].seq:
                self._unload(name)
        if plan.load is not None and plan.load.id > self._last_order and self._load is None:
            self._last_order = plan.load.id
            self._load = _Loading(plan.load)
        self._start_requests(plan)
        if self._paused_seq is not None and plan.seen_seq >= self._paused_seq:
            self._paused_seq = None

    def _start_requests(self, plan: Plan) -> None:
        for request, order in plan.requests.items():
            model = self._models.get(order.model)
            if request in self._ended or (model is not None and request in model.requests):
                continue
            assert order.prompt, "the pool checks that a prompt is not empty"
            if model is None:
                self._ended.add(request)
                self._send(RequestFailed, request, EngineFailed(f"`{order.model}` is not loaded any more"))
            else:
                model.requests[request] = _Running(order)

    def _unload(self, name: str) -> None:
        for request in self._models.pop(name).requests:
            self._ended.add(request)
            self._send(RequestGone, request)
        self._prefixes.drop(name)
        self._send(Unloaded, name, self._reading())

    def _work(self) -> bool:
        """One step of everything: a slice of the load, and a chunk or a token of each request."""
        if not self._has_work():
            return False
        self._step_times.add(self.step_s)
        if not self._started:
            self._started = True
            self._send(EngineStarted, "fake", self._reading())
        moved = self._load is not None
        if self._load is not None:
            self._load_slice(self._load)
        for name, model in self._models.items():
            if (error := self.step_errors.pop(name, None)) is not None and model.requests:
                self._fail_all(model, error)
            granted = self._is_granted(name, model)
            for running in list(model.requests.values())[: self._plan.max_batch]:
                if granted or running.prefilled < running.total:
                    self._run_request(model, running)
                    moved = True
        self._keep_under_hard()
        self.peak = max(self.peak, self._reading().active_bytes)
        pause_bytes, active_bytes = self._plan.limits.pause_above_bytes, self._reading().active_bytes
        if pause_bytes and active_bytes > pause_bytes and self._paused_seq is None:
            self._send(OverLimit, self._reading())
            self._paused_seq = self._seq
        return moved

    def _is_granted(self, name: str, model: _Loaded) -> bool:
        """Whether the next token of its longest request is within what was reserved; asks once when it is not."""
        decoding = [each for each in model.requests.values() if each.prefilled == each.total]
        length = max((running.tokens for running in decoding), default=0)
        granted = self._plan.granted_tokens.get(name)
        if granted is None or length < granted:
            return True
        if self._asked_blocks.get(name) != length:
            self._asked_blocks[name] = length
            self._send(NeedsBlock, name, length)
        return False

    def _load_slice(self, load: _Loading) -> None:
        order, hard_bytes = load.order, self._plan.limits.hard_bytes
        total_bytes = self.measured_weights.get(order.model, order.weights_bytes)
        slice_bytes = min(self._slice_bytes, total_bytes - load.done_bytes)
        if hard_bytes and self._reading().active_bytes + slice_bytes > hard_bytes:
            self._end_load(DoesNotFit(f"`{order.model}` would pass the hard limit"))
            return
        codec = self._codecs[order.model] = FakeCodec(
            self._codec.vocab_size,
            order.max_context or self._codec.context_length,
            self.transitions,
            self.reply_start,
        )
        load.done_bytes += slice_bytes
        self.peak = max(self.peak, self._reading().active_bytes)
        self._send(LoadProgress, order.id, order.model, load.done_bytes, total_bytes)
        if (error := self.load_errors.get(order.model)) is not None:
            self._end_load(error if isinstance(error, OmlxError) else LoadFailed(str(error)))
        elif load.done_bytes >= total_bytes:
            self._load = None
            self._models[order.model] = _Loaded(total_bytes, self._seq + 1, codec)
            info = ModelInfo(total_bytes, codec.context_length, codec.vocab_size, 0.25)
            self._send(LoadDone, order.id, order.model, info, self._reading())

    def _run_request(self, model: _Loaded, running: _Running) -> None:
        order, total = running.order, running.total
        if not running.prefilled and order.cache_prompt:
            running.prefilled = running.reused = self._reusable((*order.prompt, *order.generated), order.model)
        if running.prefilled < total:
            chunk = order.prefill_chunk_tokens or self._plan.prefill_chunk_tokens
            before, running.prefilled = running.prefilled, min(total, running.prefilled + chunk)
            transient_bytes = (running.prefilled - before) * self.chunk_token_bytes
            self.peak = max(self.peak, self._reading().active_bytes + transient_bytes)
            kv_bytes = running.tokens * self._kv_bytes_per_token
            measured = (transient_bytes, kv_bytes) if self.measures_prefill else (0, 0)
            live_bytes = self._reading().active_bytes
            memory = (live_bytes, live_bytes + transient_bytes)
            self._send(Prefilled, order.request, running.prefilled, total, *measured, running.reused, *memory)
            return
        number, script = running.generated, self.script
        word = script[number % len(script)] if script else f"tok{number} "
        running.generated += 1
        whole = running.text + word
        cut = min((at for stop in order.stop if (at := (running.text + word).find(stop)) >= 0), default=None)
        if cut is not None:
            word = (running.text + word)[len(running.text) : max(cut, len(running.text))]
        running.text += word
        logprobs: tuple[TokenLogprob, ...] = ()
        if (wanted := order.top_logprobs) is not None:
            logprobs = (TokenLogprob(number, -0.5, tuple((number + n, -0.5 - n) for n in range(wanted))),)
        self._send(Generated, order.request, word, 1, (number,), logprobs)
        last = None if order.ignore_eos else len(script) if script else self._answer_tokens
        if cut is not None or (last is not None and running.generated >= last):
            stop = next((stop for stop in order.stop if cut is not None and stop in whole), None)
            self._finish(model, order.request, FinishReason.STOP, stop)
        elif running.generated >= order.max_tokens:
            self._finish(model, order.request, FinishReason.LENGTH)

    def _reusable(self, tokens: tuple[int, ...], model: str) -> int:
        """How many of the tokens an earlier request has left; its last one is always run."""
        found = self._prefixes.find(model, tokens[:-1])
        if found is None or found[1] < LEAST_TOKENS:
            return 0
        self._prefixes.touch(found[0])
        return found[1]

    def _finish(self, model: _Loaded, request: str, reason: FinishReason, stop: str | None = None) -> None:
        order, generated = model.requests[request].order, model.requests[request].generated
        kv_bytes = sum(each.tokens for each in model.requests.values()) * self._kv_bytes_per_token
        del model.requests[request]
        if order.cache_prompt and (length := len(order.prompt) + generated) >= LEAST_TOKENS:
            kept, nbytes = (*order.prompt, *range(generated)), length * self._kv_bytes_per_token
            self._prefixes.add(order.model, kept, nbytes, True, lambda: None, self._plan.prefix_cache_bytes)
        self._ended.add(request)
        self._send(Finished, request, reason, stop, kv_bytes)

    def _fail_all(self, model: _Loaded, error: Exception) -> None:
        for request in list(model.requests):
            del model.requests[request]
            self._ended.add(request)
            self._send(RequestFailed, request, error if isinstance(error, OmlxError) else EngineFailed(str(error)))

    def _end_load(self, error: OmlxError) -> None:
        assert self._load is not None
        order, self._load = self._load.order, None
        self._send(LoadEnded, order.id, order.model, error, self._reading())

    def _keep_under_hard(self) -> None:
        hard_bytes = self._plan.limits.hard_bytes
        if hard_bytes and self.cache_bytes and self._reading().active_bytes + self.cache_bytes > hard_bytes:
            self._drop_cache()

    def _drop_cache(self) -> None:
        freed_bytes, self.cache_bytes = self.cache_bytes, 0
        if freed_bytes:
            self._send(CacheDropped, freed_bytes, self._reading())

    def _tear_down(self) -> None:
        closing = EngineFailed("the engine is closed")
        for model in self._models.values():
            self._fail_all(model, closing)
        self._models.clear()
        self._prefixes.shrink(0)
        if self._load is not None:
            self._end_load(closing)
        self.hold_rests = False
        self._answer_rests()
        self._flush()

    # --- memory and events

    def _kv(self, model: _Loaded) -> int:
        return sum(running.tokens for running in model.requests.values()) * self._kv_bytes_per_token

    def _reading(self, at_rest: bool = True) -> MemoryReading:
        active_bytes = self.leak_bytes + (self._load.done_bytes if self._load is not None else 0)
        active_bytes += sum(model.weights_bytes + self._kv(model) for model in self._models.values())
        active_bytes += self._prefixes.nbytes
        return MemoryReading(
            active_bytes=active_bytes,
            cache_bytes=self.cache_bytes,
            footprint_bytes=active_bytes + self.cache_bytes + 50 * MIB,
            base_bytes=50 * MIB,
            overhead_bytes=self.overhead_bytes,
            system_total_bytes=64 * GIB,
            system_available_bytes=self.system_available_bytes,
            at_rest=at_rest,
        )

    def _answer_rests(self) -> None:
        if self.hold_rests:
            return
        asked, self._rests = self._rests, []
        for future in asked:
            if future.set_running_or_notify_cancel():
                future.set_result(self._reading())

    def _send(self, kind: type[EngineEvent], *fields: object) -> None:
        self._seq += 1
        self._events.append(kind(self._seq, *fields))

    def _flush(self) -> None:
        if self._events and self._post is not None:
            events, self._events = self._events, []
            self._post(tuple(events))
