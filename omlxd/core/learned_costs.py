"""Costs of a model learned from measured prefill chunks, for architectures whose formula is not known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
    """Costs that cover every sample (none is predicted below what was measured); None without a sample."""
    samples = [sample for sample in samples if sample.chunk_tokens > 0 and sample.context_tokens > 0]
    if not samples:
        return None
    return LearnedCosts(
        kv_token_bytes=max(sample.kv_bytes / sample.context_tokens for sample in samples),
        state_bytes=0,
        transient_token_bytes=max(sample.transient_bytes / sample.chunk_tokens for sample in samples),
        transient_pair_bytes=0.0,
    )
