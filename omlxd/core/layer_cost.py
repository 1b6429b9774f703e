"""What one layer of a model keeps of the tokens it has seen, and what it holds in passing while it runs a chunk."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

STEP_TOKENS: Final = 256
"""mlx-lm's caches grow by this many tokens at a time."""


class CacheKind(StrEnum):
    """What a layer keeps of the tokens it has seen."""

    FULL = "full"
    SLIDING = "sliding"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer; all bytes are of one row (one request).

    What it keeps:

    Attributes:
        kind: keys and values of all tokens, of a window of them, or only a state of constant size.
        token_bytes: keys and values of one token.
        window_tokens: the window of a sliding layer.
        state_bytes: constant bytes, beside what tokens take.
        chunk_bytes: per token of the last prefill chunk, which a view into its activations keeps until the next step.
        whole_bytes: per token of a prompt that was one chunk of full cache steps: its values stay a view of the fused
            projection.

    What it holds in passing:

        score_bytes: per chunk token and token it attends to, where the backend's attention is not fused.
        pair_bytes: the same, where no backend's attention is fused.
        square_bytes: per pair of tokens of a block, the first 256 of a chunk (state-space models).
        block_bytes: per token of such a block.
        scan_bytes: per chunk token, where the backend has no kernel for the recurrence and keeps each token's state.
        fixed_bytes: whatever the chunk.
        copy_bytes: per token kept, while the cache is copied into a larger one.
        context_bytes: per token of the context (compressed keys and values, expanded).
        work_bytes: per chunk token: all other activations of about one layer.
    """

    kind: CacheKind
    token_bytes: int = 0
    window_tokens: int = 0
    state_bytes: int = 0
    chunk_bytes: int = 0
    whole_bytes: int = 0
    score_bytes: int = 0
    pair_bytes: int = 0
    square_bytes: int = 0
    block_bytes: int = 0
    scan_bytes: int = 0
    fixed_bytes: int = 0
    copy_bytes: int = 0
    context_bytes: int = 0
    work_bytes: int = 0


def ceil_step(tokens: int) -> int:
    """`tokens` rounded up to what a cache allocates."""
    return -(-tokens // STEP_TOKENS) * STEP_TOKENS
