"""What the engine tells: events, numbered in the order in which things happened. See `engine.protocol`.

Imports neither MLX nor mlx-lm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omlxd.core.errors import OmlxError
from omlxd.core.memory import MemoryReading
from omlxd.core.states import FinishReason


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a finished load found out; bytes, tokens, seconds.

    `disk_bytes` is what the process has read from the disk meanwhile, None where that is not known.
    """

    weights_bytes: int
    context_length: int | None
    vocab_size: int
    load_s: float
    disk_bytes: int | None = None


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
    now; both 0 when the step measured nothing (short prompts that were read at once). `reused` of the `done`
    tokens were not run, but found in the prefix cache. `live_bytes` and `peak_bytes` are what all models held before
    the step, and at its peak.
    """

    request: str
    done: int
    total: int
    transient_bytes: int = 0
    kv_bytes: int = 0
    reused: int = 0
    live_bytes: int = 0
    peak_bytes: int = 0


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
    `logprobs` tells of each of them, when the order asks for it; `held_characters` of text have been made and not told,
    because they may become a stop sequence.
    """

    request: str
    text: str
    tokens: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    held_characters: int = 0


@dataclass(frozen=True, slots=True)
class Finished(EngineEvent):
    """The request ended well; its KV cache is free. Nothing follows for it.

    `stop` is the stop sequence that ended it, if one did; `model_kv_bytes` what the KV caches of its model's requests
    took together just before.
    """

    request: str
    reason: FinishReason
    stop: str | None = None
    model_kv_bytes: int = 0


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
    """MLX's buffer cache was given back.

    Because `active + cache` came near the hard limit or a plan asked for it (rung 1), or because nothing ran any more.
    """

    freed_bytes: int
    reading: MemoryReading


@dataclass(frozen=True, slots=True)
class OverLimit(EngineEvent):
    """At rest and above `pause_above_bytes`: the engine stands still until a plan's `seen_seq` reaches this event."""

    reading: MemoryReading


Post = Callable[[Sequence[EngineEvent]], None]
"""How events reach the loop; called on the engine's thread, must not block (`call_soon_threadsafe`)."""
