"""What the engine is told: the plan, which says what should be. See `engine.protocol`.

Imports neither MLX nor mlx-lm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
        ignore_eos: the model's end-of-text tokens do not end the answer.
        cache_prompt: whether it may begin with what the prefix cache has, and leave something there.
        arrival: the place of the request among all, in the order they were asked; tokenizing, waiting and parking end
            in another order.
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
    ignore_eos: bool = False
    cache_prompt: bool = True
    arrival: int = 0


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
        promised_bytes: weights and KV caches that were promised, allocated or not; the same counts for them. 0 when
            nothing was promised.
        group_tokens: by model, how many tokens, padding included, one step may read of several short prompts at once;
            of a model that is not named each prompt is read alone.
        coming: by model, how many short prompts are being tokenized: they will be here in moments, if nothing happens.
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
    promised_bytes: int = 0
    group_tokens: Mapping[str, int] = field(default_factory=dict)
    coming: Mapping[str, int] = field(default_factory=dict)
    prefix_cache_bytes: int = 0
