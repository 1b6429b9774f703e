"""The seam between the pool (event loop) and whatever runs models (one thread): a plan down, events up.

The loop never tells the engine what to *do*; it replaces the `Plan`, which says what should *be*: which models
are resident, which one is loading, which requests run, under which limits. Between any two steps the engine
compares the newest plan with what it has and closes the difference, so an order can be repeated but never lost,
and an abort is delivered once however often it is asked for:

- a request that is in the plan and unknown starts; one that is running and no longer in the plan ends, its KV cache
  is freed, and `RequestGone` says so; one that ended by itself is not started again while the plan still names it;
- a model that is loaded and not in `Plan.resident` ends its requests, is unloaded, and `Unloaded` says when its memory
  is back; naming a model that is not loaded in `resident` means nothing: only a `LoadOrder` loads;
- a load whose order is no longer in the plan stops at its next slice, gives its memory back, and ends in
  `LoadEnded(error=LoadCancelled)`; a load that completes stays resident even if the plan does not name it *yet*
  (the loop learns of it only with `LoadDone`): it is unloaded only once a plan made after `LoadDone` leaves it out
  (`Plan.seen_seq`).

What may not be assumed: that events arrive one by one (they come in batches, in order), that a plan is ever seen (a
newer one may replace it first), or that the engine is at rest when `read` is called.

This module imports neither MLX nor mlx-lm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from omlxd.core.answer_form import AnswerForm
from omlxd.core.errors import OmlxError
from omlxd.core.histogram import Histogram
from omlxd.core.memory import MemoryReading
from omlxd.core.reply import ReplyFormat
from omlxd.core.states import FinishReason

if TYPE_CHECKING:
    from omlxd.engine.grammars import Constraint

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits as the engine obeys them between steps (R5), in bytes; 0 means no limit.

    Attributes:
        soft_bytes: the soft limit; reported with readings.
        hard_bytes: `active + cache` may not pass it: MLX's cache is dropped for it, a load stops before it.
        pause_above_bytes: a reading at rest above this stops the engine until a plan acknowledges it; normally the
            soft limit, higher when the enforcer has found that nothing more can be done (R9).
        prefill_memory_guard: refuse a prefill that would pass the hard limit (R11).
    """

    soft_bytes: int = 0
    hard_bytes: int = 0
    pause_above_bytes: int = 0
    prefill_memory_guard: bool = True


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Load the model folder at `path` as `model`; `id` is unique for the life of the engine."""

    id: int
    model: str
    path: str
    weights_bytes: int = 0
    max_context: int | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen; temperature 0 is greedy. The seed and the position fix the random numbers.

    Attributes:
        top_k: only this many of the likeliest tokens; 0 for all.
        min_p: only tokens at least this probable, as a share of the likeliest one's probability.
        presence_penalty, frequency_penalty: taken off the logits of tokens that were generated before, once and for
            each time.
        repetition_penalty: divides the positive and multiplies the negative logits of tokens that were in the prompt
            or generated; 1 changes nothing.
        logit_bias: (token id, what is added to its logit); ids are within the vocabulary.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def shapes_logits(self) -> bool:
        """Whether the logits change before the choice."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(penalties or self.logit_bias)


@dataclass(frozen=True, slots=True)
class GenerationOrder:
    """One request, tokenized: ids are within the vocabulary and the prompt is not empty (the pool checks).

    Attributes:
        generated: tokens of the answer that an earlier stay of this request made before it was parked: they are run
            again behind the prompt, count for `max_tokens`, the random numbers and the stop sequences, and none of
            their text is told again.
        shared_tokens: so many tokens at the start of the prompt are likely to begin other prompts too (the system
            segment); 0 when nothing is known.
        top_logprobs: tell with each token its log probability and those of this many likeliest tokens; None tells none.
        prefill_chunk_tokens: what was reserved for one prefill step of this prompt; None takes the plan's.
        constraint: the grammar that the answer follows, from the model's own codec; it ends the answer when nothing
            more may come.
    """

    request: str
    model: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    prefill_chunk_tokens: int | None = None
    generated: tuple[int, ...] = ()
    shared_tokens: int = 0
    top_logprobs: int | None = None
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What should be.

    Attributes:
        seen_seq: the highest event number the loop had seen when it made the plan.
        granted_tokens: by model, how long (prompt and generated tokens of its longest request) its decoding requests
            may grow; a model whose next step would pass it stands still and says so once (`NeedsBlock`) until a plan
            grants more. A model that is not named is not bounded.
        cache_drops: how often MLX's buffer cache was to be given back so far; when it has grown, the engine collects
            garbage and gives it back before its next step, also when it is idle.
        transient_bytes: the most that one step may hold in passing; MLX's buffer cache leaves so much of the hard limit
            free before each step. 0 when nothing was promised.
        prefix_cache_bytes: what the prefix caches of all models may hold together; trimmed to it, least recently used
            first, before the plan's new requests take a step. 0 keeps none.
    """

    resident: frozenset[str] = frozenset()
    load: LoadOrder | None = None
    requests: Mapping[str, GenerationOrder] = field(default_factory=dict)
    limits: EngineLimits = EngineLimits()
    prefill_chunk_tokens: int = 256
    max_batch: int = 32
    seen_seq: int = 0
    granted_tokens: Mapping[str, int] = field(default_factory=dict)
    cache_drops: int = 0
    transient_bytes: int = 0
    prefix_cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a finished load found out; bytes, tokens, seconds."""

    weights_bytes: int
    context_length: int | None
    vocab_size: int
    load_s: float


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """Base of all that an engine reports; `seq` counts up by one per event over the engine's life."""

    seq: int


@dataclass(frozen=True, slots=True)
class EngineStarted(EngineEvent):
    """The thread has imported its libraries and measured the base footprint."""

    backend: str
    reading: MemoryReading


@dataclass(frozen=True, slots=True)
class LoadProgress(EngineEvent):
    """A slice of the weights is in memory."""

    order: int
    model: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class LoadDone(EngineEvent):
    """The model is resident and runs requests from now on."""

    order: int
    model: str
    info: ModelInfo
    reading: MemoryReading


@dataclass(frozen=True, slots=True)
class LoadEnded(EngineEvent):
    """The load failed or was cancelled, and its memory is back; sent once per order."""

    order: int
    model: str
    error: OmlxError
    reading: MemoryReading


@dataclass(frozen=True, slots=True)
class Unloaded(EngineEvent):
    """The model is gone; `reading` (at rest) shows what is left."""

    model: str
    reading: MemoryReading


@dataclass(frozen=True, slots=True)
class Prefilled(EngineEvent):
    """`done` of the request's `total` tokens have been run: its prompt, and what an earlier stay has generated.

    `transient_bytes` is what the step held at its peak beyond what it left behind, `kv_bytes` the request's KV cache
    now; both 0 when the step measured nothing (short prompts that went bare into the batch). `reused` of the `done`
    tokens were not run, but found in the prefix cache.
    """

    request: str
    done: int
    total: int
    transient_bytes: int = 0
    kv_bytes: int = 0
    reused: int = 0


@dataclass(frozen=True, slots=True)
class NeedsBlock(EngineEvent):
    """The model's decoding requests stand still: the next step would pass its granted tokens; others go on."""

    model: str
    length_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely a token was, before penalties and bias: its natural log probability, and (id, log probability) of the
    likeliest ones, likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Generated(EngineEvent):
    """New text of a request; `tokens` counts the tokens behind it (text may lag: multi-byte characters, stops).

    `token_ids` are those tokens; a later order may bring them back as `GenerationOrder.generated`;
    `logprobs` tells of each of them, when the order asks for it.
    """

    request: str
    text: str
    tokens: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished(EngineEvent):
    """The request ended well; its KV cache is free. Nothing follows for it.

    `stop` is the stop sequence that ended it, if one did.
    """

    request: str
    reason: FinishReason
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class StepFailed(EngineEvent):
    """A step raised: of which model, what it did, what was raised (for the log), and where, outermost first.

    Those whose step it was end in events of their own; everybody else goes on.
    """

    model: str | None
    step: str
    error: str
    stack: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RequestFailed(EngineEvent):
    """The request ended with an error of its own or of its model's batch. Nothing follows for it."""

    request: str
    error: OmlxError


@dataclass(frozen=True, slots=True)
class RequestGone(EngineEvent):
    """The request was taken out because the plan left it out; its KV cache is free. Nothing follows for it."""

    request: str


@dataclass(frozen=True, slots=True)
class CacheDropped(EngineEvent):
    """MLX's buffer cache was given back because `active + cache` came near the hard limit (rung 1)."""

    freed_bytes: int
    reading: MemoryReading


@dataclass(frozen=True, slots=True)
class OverLimit(EngineEvent):
    """At rest and above `pause_above_bytes`: the engine stands still until a plan's `seen_seq` reaches this event."""

    reading: MemoryReading


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the sampler has seen since the start, inside steps too.

    Attributes:
        samples: how often it looked.
        over_hard_samples: how often `active + cache` lay above the hard limit then.
        over_hard_bytes: by how much, at worst.
    """

    samples: int = 0
    over_hard_samples: int = 0
    over_hard_bytes: int = 0


Post = Callable[[Sequence[EngineEvent]], None]
"""How events reach the loop; called on the engine's thread, must not block (`call_soon_threadsafe`)."""


@dataclass(frozen=True, slots=True)
class ToolCallText:
    """A call of a tool as the model wrote it: the tool's name, and its arguments as a JSON object in a text."""

    name: str
    arguments: str


class TextCodec(Protocol):
    """A model's tokenizer and chat template; stays after the model is unloaded. Safe to use from any thread."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int | None:
        """Tokens the model was made for, or less where the manifest says so; None when unknown."""
        ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | None = None,
    ) -> list[int]:
        """Prompt tokens of a conversation, with the tools on offer; `thinking` asks templates that know it (None: the
        template's way). Raises InvalidRequest when the template refuses it or knows no tools.
        """
        ...

    def encode_text(self, text: str) -> list[int]:
        """Prompt tokens of plain text, with the special tokens the tokenizer adds."""
        ...

    def held_back(self, generated: Sequence[int], stop: Sequence[str]) -> str:
        """What streaming has not told yet of the text of these tokens: a word's or character's begin, half a stop."""
        ...

    def token_text(self, token: int) -> str:
        """One token as text; half a character is U+FFFD."""
        ...

    def reply_format(self, prompt: Sequence[int], *, with_tools: bool) -> ReplyFormat:
        """How the model marks the parts of its reply to this prompt."""
        ...

    def constrain(self, form: AnswerForm, prompt: Sequence[int], *, is_chat: bool) -> Constraint | None:
        """What holds the answer to this prompt to a form; takes a second the first time, so call it in a thread.

        None when all that is asked for is one call at most, of a model whose calls no grammar can hold: who hears the
        answer has to leave the others out.

        Raises InvalidRequest, with the field in `details["param"]`, when this model cannot be held to it.
        """
        ...

    def parse_tool_calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[ToolCallText]:
        """The calls in the text between a tool call's markers; empty when the text is none. May take a while."""
        ...


class Engine(Protocol):
    """Runs models on one thread of its own, from the newest plan.

    `start` comes first and once; nothing heavy is imported before the first plan that loads something. `apply`, `read`,
    `rest` and `codec` may be called from the loop's thread at any time between `start` and `close`.
    """

    def start(self, post: Post) -> None:
        """Start the thread; `post` receives its events."""
        ...

    def apply(self, plan: Plan) -> None:
        """Replace the plan and wake the engine; never blocks."""
        ...

    def read(self) -> MemoryReading:
        """A reading now, cheap (microseconds), perhaps in the middle of a step (`at_rest` tells)."""
        ...

    def rest(self) -> Future[MemoryReading]:
        """A reading between two steps with nothing in flight; it waits for the step that runs.

        It is answered after the plan that was newest when it was asked for has been followed, and what following it
        caused is posted before the answer to the next `rest`: two in a row tell that a plan has had its effects.
        """
        ...

    def kv_bytes(self) -> Mapping[str, int]:
        """KV cache bytes of each resident model, as of the last step."""
        ...

    def prefix_bytes(self) -> Mapping[str, int]:
        """Bytes in the prefix cache of each resident model that keeps one, as of the last step."""
        ...

    def peak_bytes(self) -> int:
        """The highest `active` that the 100 Hz sampler saw."""
        ...

    def sampled(self) -> Sampled:
        """What was seen of `active + cache` while there was work."""
        ...

    def step_times(self) -> Histogram:
        """How long steps took, in seconds; it goes on counting."""
        ...

    def codec(self, model: str) -> TextCodec | None:
        """The tokenizer of a model, else None: from its first load's first `LoadProgress`, or `read_codec`, on."""
        ...

    def read_codec(self, order: LoadOrder) -> TextCodec:
        """Read the tokenizer of a model folder without the model; blocks, for up to seconds, so call it in a thread.

        Raises LoadFailed.
        """
        ...

    def forget_codec(self, model: str) -> None:
        """Drop the tokenizer that is kept for a model which is not loaded: its next load is of another folder."""
        ...

    def device_cap(self) -> tuple[int, str] | None:
        """Bytes the device allows and what says so (`metal`, `cuda`), None when nothing does (CPU)."""
        ...

    def stalled_s(self) -> float:
        """Seconds since the last finished step while there is work; 0.0 when idle."""
        ...

    def stack(self) -> Sequence[str]:
        """Where the engine's thread is right now, innermost last: `file:line function`; empty when it does not run."""
        ...

    def close(self, timeout_s: float = 10.0) -> bool:
        """End all work, give the memory back and end the thread; True when it ended in time. Idempotent."""
        ...
