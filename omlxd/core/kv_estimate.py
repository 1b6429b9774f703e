"""Predicted bytes of a request: its KV cache, and what one prefill chunk or decode step holds in passing.

Pure arithmetic on a `ModelShape`; each formula is compared with what MLX measures in tests/engine/test_estimates.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from omlxd.core.layer_cost import STEP_TOKENS as STEP_TOKENS
from omlxd.core.layer_cost import CacheKind, Layer, ceil_step
from omlxd.core.model_shape import ModelShape


def kv_bytes(shape: ModelShape, tokens: int, rows: int = 1, chunk: int = 0) -> int:
    """KV cache bytes of `rows` requests in one batch, the longest of which has `tokens`.

    A cache may end up to 255 tokens behind its longest row, so a reservation that is to last while it grows
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
    context = max(chunk, context)
    if (learned := shape.learned) is not None:
        return round(chunk * (learned.transient_token_bytes + learned.transient_pair_bytes * context))
    costs = BACKENDS.get(backend, BACKENDS["cpu"])
    # Of the last layer only its keys and values are computed: nothing asks for the rest.
    layers = set(shape.layers[:-1] or shape.layers)
    return max((_layer_transient_bytes(shape, layer, chunk, context, costs) for layer in layers), default=0)


def group_transient_bytes(shape: ModelShape, tokens: int, backend: str = "cpu") -> int:
    """What one step holds in passing that reads several prompts from their beginnings, however many and long they are.

    Args:
        shape: the model.
        tokens: of all prompts together, each padded to the longest.
        backend: `cpu`, `metal` or `cuda`.
    """
    if (learned := shape.learned) is not None:
        return round(tokens * (learned.transient_token_bytes + learned.transient_pair_bytes * tokens / 2))
    costs, layers = BACKENDS.get(backend, BACKENDS["cpu"]), set(shape.layers[:-1] or shape.layers)
    largest_bytes = max(
        (
            _layer_transient_bytes(shape, layer, tokens // rows, tokens // rows, costs, rows)
            for layer in layers
            for rows in GROUPS
            if rows <= tokens
        ),
        default=0,
    )
    return largest_bytes * UNEVEN_PERCENT // 100


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
class Backend:
    """What a backend computes without holding what lies between.

    Attributes:
        fused_head_dims: elements per head for which attention is one kernel, so that no scores are held.
        half_only: only with 2-byte activations.
        masked: also with an array mask, as a sliding window has.
        scans: recurrences are one kernel, so that no token's state is held.
    """

    fused_head_dims: frozenset[int] = frozenset()
    half_only: bool = False
    masked: bool = False
    scans: bool = False

    def fuses(self, shape: ModelShape, layer: Layer) -> bool:
        """Whether this layer's attention is one kernel here."""
        return (
            shape.head_dim in self.fused_head_dims
            and (shape.element_bytes == 2 or not self.half_only)
            and (layer.kind is not CacheKind.SLIDING or self.masked)
        )


GROUPS: Final = (2, 8, 32)
"""Of how many prompts a step is looked at: few long ones hold the most scores, many short ones the most caches."""

UNEVEN_PERCENT: Final = 112
"""Prompts of different lengths hold up to a tenth more: they are masked row by row, and moved within their caches."""

COPYING_PERCENT: Final = 90
"""Of a layer's activations, what is there at the same time as the whole copy of its cache: decides in small chunks."""

BACKENDS: Final = {
    "cpu": Backend(),
    "metal": Backend(frozenset({64, 80, 96, 128}), masked=True, scans=True),
    "cuda": Backend(frozenset(range(1, 129)), half_only=True),
}


def _row_bytes(layer: Layer, tokens: int, chunk: int) -> int:
    """What one layer keeps of one row."""
    kept = layer.state_bytes + min(chunk, tokens) * layer.chunk_bytes
    if _is_whole(tokens, chunk):
        kept += tokens * layer.whole_bytes
    return kept + _held_tokens(layer, tokens, chunk) * layer.token_bytes


def _is_whole(tokens: int, chunk: int) -> bool:
    """Whether the prompt filled its first allocation at once: then nothing is copied, and views stay views."""
    return chunk >= tokens and tokens % STEP_TOKENS == 0


def _held_tokens(layer: Layer, tokens: int, chunk: int) -> int:
    if layer.kind is CacheKind.STATE:
        return 0
    if layer.kind is CacheKind.FULL:
        return ceil_step(tokens)
    if chunk:
        return min(tokens, layer.window_tokens - 1 + chunk)
    return min(ceil_step(tokens), layer.window_tokens)


def _layer_transient_bytes(
    shape: ModelShape, layer: Layer, chunk: int, context: int, backend: Backend, rows: int = 1
) -> int:
    """What a layer holds in a step of `chunk` tokens of each of `rows` prompts."""
    attended = context
    if layer.kind is CacheKind.SLIDING:
        attended = min(context, layer.window_tokens - 1 + chunk)
    pair_bytes = layer.pair_bytes + (0 if backend.fuses(shape, layer) else layer.score_bytes)
    token_bytes = layer.work_bytes + (0 if backend.scans else layer.scan_bytes)
    copied = layer.whole_bytes == 0 or not _is_whole(context, chunk)
    block = min(chunk, STEP_TOKENS)
    passing = (
        layer.fixed_bytes
        + rows * chunk * (attended * pair_bytes + token_bytes)
        + rows * block * (block * layer.square_bytes + layer.block_bytes)
        + rows * attended * layer.context_bytes
    )
    if not copied or not layer.copy_bytes:
        return passing
    held = rows * _held_tokens(layer, context, chunk)
    return max(passing + held * layer.copy_bytes, passing * COPYING_PERCENT // 100 + held * layer.token_bytes)
