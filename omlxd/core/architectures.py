"""The layers of each architecture that mlx-lm runs: what each caches, and what it holds while it runs a chunk.

The numbers of activations per token are fitted to what MLX's CPU backend holds at its peak: it allocates about a layer
ahead of what it computes, so they count nearly all arrays of a layer. tests/engine/test_estimates.py compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from omlxd.core.config_fields import count, number, texts
from omlxd.core.layer_cost import CacheKind, Layer

Text = Mapping[str, Any]
FLOAT_BYTES: Final = 4

_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gemma3": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "gemma3_text": {
        "hidden_size": 1152,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "intermediate_size": 6912,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262_144,
    },
    "gpt_oss": {"head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "sliding_window": 128},
}
"""What mlx-lm takes when config.json leaves a field out, where that is not said by other fields."""

_SAME_AS: Final = {
    "mistral": "llama",
    "iquestcoder": "llama",
    "xverse": "llama",
    "gemma3": "gemma3_text",
    "kimi_k2": "deepseek_v3",
    "joyai_llm_flash": "deepseek_v3",
}
_HEADS_OF_HIDDEN: Final = frozenset({"qwen2", "qwen2_moe", "phi3", "mixtral", "granitemoehybrid", "lfm2"})
"""Architectures that divide the hidden size by the heads, whatever `head_dim` says."""


def layers_of(model_type: str, text: Text, width: int) -> tuple[Layer, ...] | None:
    """Each layer of an architecture whose formulas were checked, or None for any other.

    Args:
        model_type: as config.json names it.
        text: the language model's part of the config, defaults filled in.
        width: bytes of one activation element.
    """
    family = _FAMILIES.get(_SAME_AS.get(model_type, model_type))
    return None if family is None else family(text, width)


def with_defaults(model_type: str, text: Text) -> Text:
    """The config with what mlx-lm assumes where it says nothing."""
    known = _SAME_AS.get(model_type, model_type)
    given = {key: value for key, value in text.items() if value is not None}
    if known in _HEADS_OF_HIDDEN:
        given.pop("head_dim", None)
    return {**_DEFAULTS.get(known, {}), **_DEFAULTS.get(model_type, {}), **given}


def generic_layers(text: Text, width: int) -> tuple[Layer, ...]:
    """Layers of an architecture that is not known: full attention everywhere, and more in passing than most hold."""
    layer = _attention(text, width)
    cautious = replace(layer, pair_bytes=3 * layer.score_bytes, score_bytes=0, work_bytes=2 * layer.work_bytes)
    return (cautious,) * layer_count(text)


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


def _attention(text: Text, width: int, weights: Weights | None = None, *, scores: int = 1) -> Layer:
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


def _sliding(layer: Layer, window: int) -> Layer:
    return replace(layer, kind=CacheKind.SLIDING, window_tokens=window)


def _plain(text: Text, width: int) -> tuple[Layer, ...]:
    layer = _attention(text, width)
    window = count(text, "sliding_window")
    return tuple(
        _sliding(layer, window) if kind == "sliding_attention" and window else layer
        for kind in texts(text, "layer_types", layer_count(text))
    )


def _full(text: Text, width: int) -> tuple[Layer, ...]:
    return (_attention(text, width),) * layer_count(text)


def _phi3(text: Text, width: int) -> tuple[Layer, ...]:
    heads, kv_heads, head_dim = head_counts(text)
    layer = replace(_attention(text, width), whole_bytes=(heads + kv_heads) * head_dim * width)
    return (layer,) * layer_count(text)


def _gemma2(text: Text, width: int) -> tuple[Layer, ...]:
    layer = _attention(
        text, width, Weights(hidden=7.0, query=6.8, feed=2.6, copy=0.7, half=0.55)
    )  # capped scores: never fused
    return (replace(layer, pair_bytes=layer.score_bytes, score_bytes=0),) * layer_count(text)


def _gemma3(text: Text, width: int) -> tuple[Layer, ...]:
    layer = _attention(text, width, replace(DENSE, hidden=9.0, half=0.4))
    window = number(text, "sliding_window")
    pattern = max(1, number(text, "sliding_window_pattern"))
    return tuple(
        layer if position % pattern == pattern - 1 else _sliding(layer, window) for position in range(layer_count(text))
    )


_GPT_OSS: Final = Weights(hidden=2.2, query=3.7, feed=4.1, chosen=3.1, copy=0.5)


def _gpt_oss(text: Text, width: int) -> tuple[Layer, ...]:
    layer, window = _attention(text, width, _GPT_OSS, scores=3), number(text, "sliding_window")
    kinds = texts(text, "layer_types", layer_count(text)) if text.get("layer_types") else None
    return tuple(
        layer if (kinds[position] == "full_attention" if kinds else position % 2) else _sliding(layer, window)
        for position in range(layer_count(text))
    )


def _deepseek_v2(text: Text, width: int) -> tuple[Layer, ...]:
    heads = head_counts(text)[0]
    key_dim = number(text, "qk_nope_head_dim") + number(text, "qk_rope_head_dim")
    value_dim = number(text, "v_head_dim")
    token_bytes = heads * (key_dim + value_dim) * width
    layer = replace(
        _attention({**text, "head_dim": key_dim}, width, Weights(hidden=3.5, query=1.2, feed=2.5, chosen=3.1)),
        token_bytes=token_bytes,
        copy_bytes=token_bytes,
        whole_bytes=heads * number(text, "qk_nope_head_dim") * width,
    )
    return (layer,) * layer_count(text)


def _deepseek_v3(text: Text, width: int) -> tuple[Layer, ...]:
    heads = head_counts(text)[0]
    latent, rope = number(text, "kv_lora_rank"), number(text, "qk_rope_head_dim")
    nope, value_dim = number(text, "qk_nope_head_dim"), number(text, "v_head_dim")
    layer = replace(
        _attention({**text, "head_dim": nope + rope}, width, Weights(hidden=3.1, query=2.6, feed=2.5, chosen=3.1)),
        token_bytes=(latent + rope) * width,
        copy_bytes=0,
        score_bytes=0,
        pair_bytes=2 * heads * width + 1,
        context_bytes=heads * (nope + value_dim) * width,
    )
    return (layer,) * layer_count(text)


def _state_space(text: Text, width: int, *, heads: int, head_dim: int, state: int, groups: int, kernel: int) -> Layer:
    """A mamba2 layer: its convolution's inputs and its state, and blocks of 256 tokens squared while it runs."""
    inner = heads * head_dim
    convolved = inner + 2 * groups * state
    elements = 7.3 * hidden_size(text) + 8.5 * (inner + convolved) + 0.9 * heads * state
    states = heads * head_dim * state
    return Layer(
        CacheKind.STATE,
        state_bytes=states * FLOAT_BYTES + (kernel - 1) * convolved * width,
        chunk_bytes=convolved * width,
        square_bytes=round((5.5 * heads + 2.5) * FLOAT_BYTES),
        block_bytes=3 * inner * FLOAT_BYTES,
        fixed_bytes=5 * states * FLOAT_BYTES,
        work_bytes=round(elements * width),
    )


def _mamba2(text: Text, width: int) -> tuple[Layer, ...]:
    layer = _state_space(
        text,
        width,
        heads=number(text, "num_heads"),
        head_dim=number(text, "head_dim"),
        state=number(text, "state_size"),
        groups=number(text, "n_groups"),
        kernel=number(text, "conv_kernel"),
    )
    return (layer,) * layer_count(text)


def _falcon_h1(text: Text, width: int) -> tuple[Layer, ...]:
    attention = _attention(text, width)
    space = _state_space(
        text,
        width,
        heads=number(text, "mamba_n_heads"),
        head_dim=number(text, "mamba_d_head"),
        state=number(text, "mamba_d_state"),
        groups=number(text, "mamba_n_groups"),
        kernel=number(text, "mamba_d_conv"),
    )
    both = replace(
        attention,
        state_bytes=space.state_bytes,
        chunk_bytes=space.chunk_bytes,
        square_bytes=space.square_bytes,
        block_bytes=space.block_bytes,
        fixed_bytes=space.fixed_bytes,
        work_bytes=attention.work_bytes + space.work_bytes // 5,  # the two run beside each other
    )
    return (both,) * layer_count(text)


def _granite_hybrid(text: Text, width: int) -> tuple[Layer, ...]:
    attention = _attention(text, width)
    if "mamba" not in (kinds := texts(text, "layer_types", layer_count(text))):
        return (attention,) * layer_count(text)
    space = _state_space(
        text,
        width,
        heads=number(text, "mamba_n_heads"),
        head_dim=number(text, "mamba_d_head"),
        state=number(text, "mamba_d_state"),
        groups=number(text, "mamba_n_groups"),
        kernel=number(text, "mamba_d_conv"),
    )
    return tuple(space if kind == "mamba" else attention for kind in kinds)


def _lfm2(text: Text, width: int) -> tuple[Layer, ...]:
    hidden, kept = hidden_size(text), number(text, "conv_L_cache") - 1
    feed = count(text, "block_ff_dim", "intermediate_size") or 4 * hidden
    if text.get("block_auto_adjust_ff_dim"):
        multiple = max(1, number(text, "block_multiple_of"))
        feed = 2 * feed // 3
        multiplier = text.get("block_ffn_dim_multiplier")
        feed = int(multiplier * feed) if isinstance(multiplier, int | float) else feed
        feed = -(-feed // multiple) * multiple
    attention = _attention(
        {**text, "intermediate_size": feed}, width, Weights(hidden=10.5, query=6.8, feed=2.1, half=0.9)
    )
    convolution = Layer(
        CacheKind.STATE,
        state_bytes=kept * hidden * width,
        chunk_bytes=hidden * width,
        work_bytes=attention.work_bytes,
    )
    full = text.get("full_attn_idxs")
    if isinstance(full, list):
        return tuple(attention if position in full else convolution for position in range(layer_count(text)))
    kinds = texts(text, "layer_types", layer_count(text))
    return tuple(attention if kind == "full_attention" else convolution for kind in kinds)


def _qwen3_next(text: Text, width: int) -> tuple[Layer, ...]:
    attention = _attention(text, width)
    key_heads, value_heads = number(text, "linear_num_key_heads"), number(text, "linear_num_value_heads")
    key_dim, value_dim = number(text, "linear_key_head_dim"), number(text, "linear_value_head_dim")
    convolved = 2 * key_heads * key_dim + value_heads * value_dim
    states = value_heads * value_dim * key_dim
    linear = Layer(
        CacheKind.STATE,
        state_bytes=states * FLOAT_BYTES + (number(text, "linear_conv_kernel_dim") - 1) * convolved * width,
        scan_bytes=states * FLOAT_BYTES,
        work_bytes=round((4.7 * convolved + 5.0 * hidden_size(text) + 0.8 * feed_forward(text)) * width),
    )
    every = max(1, count(text, "full_attention_interval") or 4)
    return tuple(linear if (position + 1) % every else attention for position in range(layer_count(text)))


_FAMILIES: Final[Mapping[str, Callable[[Text, int], tuple[Layer, ...]]]] = {
    "llama": _plain,
    "qwen2": _full,
    "qwen3": _full,
    "qwen3_moe": _full,
    "mixtral": _full,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "mamba2": _mamba2,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granite_hybrid,
    "lfm2": _lfm2,
    "qwen3_next": _qwen3_next,
}
