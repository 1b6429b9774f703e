"""Costs of a model learned from measured prefill chunks, for architectures whose formula is not known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from omlxd.core.layer_cost import ceil_step


@dataclass(frozen=True, slots=True)
class ChunkSample:
    """One measured prefill chunk of one request.

    Attributes:
        chunk_tokens: tokens of the chunk.
        context_tokens: tokens in the cache after it.
        kv_bytes: bytes of the request's caches after it.
        transient_bytes: what the step held at its peak beyond what it left behind.
    """

    chunk_tokens: int
    context_tokens: int
    kv_bytes: int
    transient_bytes: int


@dataclass(frozen=True, slots=True)
class LearnedCosts:
    """What was measured of a model; bytes.

    Attributes:
        kv_token_bytes: KV bytes per token of one row.
        state_bytes: KV bytes of one row that do not depend on its length.
        transient_token_bytes: transient per token of a chunk.
        transient_pair_bytes: transient per token of a chunk and token of its context.
    """

    kv_token_bytes: float
    state_bytes: int
    transient_token_bytes: float
    transient_pair_bytes: float


def learn(samples: Sequence[ChunkSample]) -> LearnedCosts | None:
    """Costs that cover every sample, so that none is predicted below what was measured; None without a sample.

    What grows with the context is told from what does not by a straight line through the samples. While all have the
    same context nothing can be told apart: then half of a transient is taken to grow with it, and all of the KV.
    """
    samples = [sample for sample in samples if sample.chunk_tokens > 0 and sample.context_tokens > 0]
    if not samples:
        return None
    held = [(ceil_step(sample.context_tokens), sample.kv_bytes) for sample in samples]
    kv_token_bytes = _slope(held, default=min(kept / tokens for tokens, kept in held))
    per_token = [(sample.context_tokens, sample.transient_bytes / sample.chunk_tokens) for sample in samples]
    pair_bytes = _slope(per_token, default=min(passed / tokens for tokens, passed in per_token) / 2)
    return LearnedCosts(
        kv_token_bytes=kv_token_bytes,
        state_bytes=max(0, *(math.ceil(kept - kv_token_bytes * tokens) for tokens, kept in held)),
        transient_token_bytes=max(0.0, *(passed - pair_bytes * tokens for tokens, passed in per_token)),
        transient_pair_bytes=pair_bytes,
    )


def _slope(points: Sequence[tuple[int, float]], default: float) -> float:
    """The slope, 0 or more, of the line nearest to the points; the default when they stand above each other."""
    middle_x = sum(x for x, _ in points) / len(points)
    middle_y = sum(y for _, y in points) / len(points)
    spread = sum((x - middle_x) ** 2 for x, _ in points)
    if spread == 0:
        return default
    return max(0.0, sum((x - middle_x) * (y - middle_y) for x, y in points) / spread)
