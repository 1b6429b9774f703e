"""Predicted bytes of a request: its KV cache, and what one prefill chunk or decode step holds in passing.

Pure arithmetic on a `ModelShape`; each formula is compared with what MLX measures in tests/engine/test_estimates.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from omlxd.core.model_shape import CacheKind, LayerCache, ModelShape

STEP_TOKENS: Final = 256
"""mlx-lm's caches grow by this many tokens at a time."""


def kv_bytes(shape: ModelShape, tokens: int, rows: int = 1, chunk: int = 0) -> int:
    """KV cache bytes of `rows` requests in one batch, the longest of which has `tokens`.

    A decode batch holds up to 255 tokens more than its longest row, so a reservation that is to last while it grows
    asks for `tokens + STEP_TOKENS`.

    Args:
        shape: the model.
        tokens: length of the longest row; shorter ones are padded to it.
        rows: requests in the batch.
        chunk: tokens of the last prefill chunk, when the cache has just been prefilled: a sliding window then keeps
            `window - 1 + chunk` until the next decode step.
    """
    if tokens <= 0 or rows <= 0:
        return 0
    if (learned := shape.learned) is not None:
        return rows * round(learned.state_bytes + learned.kv_token_bytes * ceil_step(tokens))
    return rows * sum(_row_bytes(layer, tokens, chunk) for layer in shape.layers)


def layer_kv_bytes(shape: ModelShape, tokens: int, rows: int = 1) -> int:
    """KV bytes of the largest single layer: what joining, growing or leaving a batch copies at a time (× 1.3)."""
    if tokens <= 0 or rows <= 0 or not shape.layers:
        return 0
    if shape.learned is not None:
        return 2 * kv_bytes(shape, tokens, rows) // len(shape.layers)
    return rows * max(_row_bytes(layer, tokens, 0) for layer in shape.layers)


def prefill_transient_bytes(shape: ModelShape, chunk: int, context: int, backend: str = "cpu") -> int:
    """What one prefill chunk holds at its peak beyond the cache it leaves behind.

    Only the CPU figures were verified; those of Metal and CUDA follow from where their attention kernels are fused.

    Args:
        shape: the model.
        chunk: tokens of the chunk.
        context: tokens in the cache after the chunk.
        backend: `cpu`, `metal` or `cuda`.
    """
    if chunk <= 0:
        return 0
    if (learned := shape.learned) is not None:
        return round(chunk * (learned.transient_token_bytes + learned.transient_pair_bytes * context))
    cost = BACKENDS.get(backend, BACKENDS["cpu"])
    width = shape.element_bytes
    fused = shape.key_dim in cost.fused_head_dims and (width == 2 or not cost.fused_half_only)
    scores = 0 if fused else chunk * context * (shape.heads * width + 1)
    copied = layer_kv_bytes(shape, context)
    return scores + copied + round(cost.activations * chunk * shape.hidden * width)


def decode_transient_bytes(shape: ModelShape, rows: int, context: int, backend: str = "cpu") -> int:
    """What one decode step holds at its peak beyond what it leaves behind: logits, scores, and one layer's copy.

    Every 256 steps each layer's cache is copied into a larger one; that copy is counted always.
    """
    if rows <= 0:
        return 0
    logits = 4 * rows * shape.vocab * 4
    scores = 2 * rows * shape.heads * max(0, context) * 4
    return logits + scores + layer_kv_bytes(shape, context + STEP_TOKENS, rows) * 13 // 10


@dataclass(frozen=True, slots=True)
class BackendCost:
    """How a backend computes: where attention is fused, and activations held per token in units of the width."""

    fused_head_dims: frozenset[int]
    fused_half_only: bool
    activations: float


BACKENDS: Final = {
    "cpu": BackendCost(frozenset(), False, 20.0),
    "metal": BackendCost(frozenset({64, 80, 96, 128}), False, 20.0),
    "cuda": BackendCost(frozenset(range(1, 129)), True, 20.0),
}


def ceil_step(tokens: int) -> int:
    """`tokens` rounded up to what a cache allocates."""
    return -(-tokens // STEP_TOKENS) * STEP_TOKENS


def _row_bytes(layer: LayerCache, tokens: int, chunk: int) -> int:
    if layer.kind is CacheKind.STATE:
        return layer.state_bytes
    held = ceil_step(tokens)
    if layer.kind is CacheKind.SLIDING:
        held = min(tokens, layer.window_tokens - 1 + chunk) if chunk else min(held, layer.window_tokens)
    return layer.state_bytes + held * layer.token_bytes
