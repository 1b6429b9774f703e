"""The kinds of layers that architectures are made of: attention over all or a window, and state spaces.

The numbers of activations per token are fitted to what MLX's CPU backend holds at its peak: it allocates about a layer
ahead of what it computes, so they count nearly all arrays of a layer. tests/engine/test_estimates.py compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from omlxd.core.config_fields import count, number
from omlxd.core.layer_cost import CacheKind, Layer

Text = Mapping[str, Any]
FLOAT_BYTES: Final = 4


def layer_count(text: Text) -> int:
    """How many layers the config names."""
    return count(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers") or 32


def head_counts(text: Text) -> tuple[int, int, int]:
    """Query heads, key and value heads, and elements per head."""
    hidden = hidden_size(text)
    heads = count(text, "num_attention_heads", "n_head", "num_heads", "n_heads") or 32
    kv_heads = count(text, "num_key_value_heads", "n_kv_heads", "num_kv_heads") or heads
    return heads, kv_heads, count(text, "head_dim") or max(1, hidden // heads)


def hidden_size(text: Text) -> int:
    """Width of the residual stream."""
    return count(text, "hidden_size", "d_model", "n_embd", "dim") or 4096


def feed_forward(text: Text) -> int:
    """Elements per token inside the feed-forward part: its width, or that of the experts a token goes to."""
    chosen, expert = _experts(text)
    if not chosen:
        return expert
    shared = count(text, "shared_expert_intermediate_size", "shared_intermediate_size") or 0
    return (chosen + number(text, "n_shared_experts")) * expert + shared


def _experts(text: Text) -> tuple[int, int]:
    """How many experts a token goes to (0 without experts), and the width of one."""
    dense = count(text, "intermediate_size", "ffn_dim", "n_inner") or 4 * hidden_size(text)
    chosen = count(text, "num_experts_per_tok", "num_experts_per_token", "top_k_experts") or 0
    return chosen, (count(text, "moe_intermediate_size") or dense) if chosen else dense


def attention(text: Text, width: int, weights: Weights | None = None, *, scores: int = 1) -> Layer:
    heads, kv_heads, head_dim = head_counts(text)
    chosen, _ = _experts(text)
    weights = weights or (EXPERTS if chosen else DENSE)
    hidden = hidden_size(text)
    elements = weights.hidden * hidden + weights.query * heads * head_dim + weights.feed * feed_forward(text)
    elements += weights.chosen * chosen * hidden
    token_bytes = 2 * kv_heads * head_dim * width
    return Layer(
        CacheKind.FULL,
        token_bytes=token_bytes,
        score_bytes=scores * heads * width + 1,
        copy_bytes=round(weights.copy * token_bytes),
        work_bytes=round(elements * width * (1 + weights.half if width < FLOAT_BYTES else 1)),
    )


@dataclass(frozen=True, slots=True)
class Weights:
    """How often each width counts in the activations of one token at the peak.

    `copy` is the share of a layer's cache that is copied meanwhile, `half` what 4-byte intermediates of 2-byte
    activations add.
    """

    hidden: float
    query: float
    feed: float
    chosen: float = 0.0
    copy: float = 1.0
    half: float = 0.35


DENSE: Final = Weights(hidden=7.0, query=6.8, feed=2.1)
EXPERTS: Final = Weights(hidden=3.5, query=4.0, feed=2.5, chosen=3.1, copy=0.4)


def sliding(layer: Layer, window: int) -> Layer:
    return replace(layer, kind=CacheKind.SLIDING, window_tokens=window)


def state_space(text: Text, width: int, *, heads: int, head_dim: int, state: int, groups: int, kernel: int) -> Layer:
    """A mamba2 layer: its convolution's inputs and its state, and blocks of 256 tokens squared while it runs."""
    inner = heads * head_dim
    convolved = inner + 2 * groups * state
    elements = 7.3 * hidden_size(text) + 8.5 * (inner + convolved) + 0.9 * heads * state
    states = heads * head_dim * state
    return Layer(
        CacheKind.STATE,
        state_bytes=states * FLOAT_BYTES + max(0, kernel - 1) * convolved * width,
        chunk_bytes=convolved * width,
        square_bytes=round((5.5 * heads + 2.5) * FLOAT_BYTES),
        block_bytes=3 * inner * FLOAT_BYTES,
        fixed_bytes=5 * states * FLOAT_BYTES,
        work_bytes=round(elements * width),
    )
