"""The layers of each architecture that mlx-lm runs: what each caches, and what it holds while it runs a chunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from omlxd.core.config_fields import count, number, texts
from omlxd.core.layer_cost import CacheKind, Layer
from omlxd.core.layer_kinds import (
    DENSE,
    FLOAT_BYTES,
    Text,
    Weights,
    attention,
    feed_forward,
    head_counts,
    hidden_size,
    layer_count,
    sliding,
    state_space,
)

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
    layer = attention(text, width)
    cautious = replace(layer, pair_bytes=3 * layer.score_bytes, score_bytes=0, work_bytes=2 * layer.work_bytes)
    return (cautious,) * layer_count(text)


def _plain(text: Text, width: int) -> tuple[Layer, ...]:
    layer = attention(text, width)
    window = count(text, "sliding_window")
    return tuple(
        sliding(layer, window) if kind == "sliding_attention" and window else layer
        for kind in texts(text, "layer_types", layer_count(text))
    )


def _full(text: Text, width: int) -> tuple[Layer, ...]:
    return (attention(text, width),) * layer_count(text)


def _phi3(text: Text, width: int) -> tuple[Layer, ...]:
    heads, kv_heads, head_dim = head_counts(text)
    layer = replace(attention(text, width), whole_bytes=(heads + kv_heads) * head_dim * width)
    return (layer,) * layer_count(text)


def _gemma2(text: Text, width: int) -> tuple[Layer, ...]:
    layer = attention(
        text, width, Weights(hidden=7.0, query=6.8, feed=2.6, copy=0.7, half=0.55)
    )  # capped scores: never fused
    return (replace(layer, pair_bytes=layer.score_bytes, score_bytes=0),) * layer_count(text)


def _gemma3(text: Text, width: int) -> tuple[Layer, ...]:
    layer = attention(text, width, replace(DENSE, hidden=9.0, half=0.4))
    window = number(text, "sliding_window")
    pattern = max(1, number(text, "sliding_window_pattern"))
    return tuple(
        layer if position % pattern == pattern - 1 else sliding(layer, window) for position in range(layer_count(text))
    )


_GPT_OSS: Final = Weights(hidden=2.2, query=3.7, feed=4.1, chosen=3.1, copy=0.5)


def _gpt_oss(text: Text, width: int) -> tuple[Layer, ...]:
    layer, window = attention(text, width, _GPT_OSS, scores=3), number(text, "sliding_window")
    kinds = texts(text, "layer_types", layer_count(text)) if text.get("layer_types") else None
    return tuple(
        layer if (kinds[position] == "full_attention" if kinds else position % 2) else sliding(layer, window)
        for position in range(layer_count(text))
    )


def _deepseek_v2(text: Text, width: int) -> tuple[Layer, ...]:
    heads = head_counts(text)[0]
    key_dim = number(text, "qk_nope_head_dim") + number(text, "qk_rope_head_dim")
    value_dim = number(text, "v_head_dim")
    token_bytes = heads * (key_dim + value_dim) * width
    layer = replace(
        attention({**text, "head_dim": key_dim}, width, Weights(hidden=3.5, query=1.2, feed=2.5, chosen=3.1)),
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
        attention({**text, "head_dim": nope + rope}, width, Weights(hidden=3.1, query=2.6, feed=2.5, chosen=3.1)),
        token_bytes=(latent + rope) * width,
        copy_bytes=0,
        score_bytes=0,
        pair_bytes=2 * heads * width + 1,
        context_bytes=heads * (nope + value_dim) * width,
    )
    return (layer,) * layer_count(text)


def _mamba2(text: Text, width: int) -> tuple[Layer, ...]:
    layer = state_space(
        text,
        width,
        heads=number(text, "num_heads"),
        head_dim=number(text, "head_dim"),
        state=number(text, "state_size"),
        groups=number(text, "n_groups"),
        kernel=number(text, "conv_kernel"),
    )
    return (layer,) * layer_count(text)


def _hybrid_mamba2(text: Text, width: int) -> Layer:
    """The Mamba-2 layer of a hybrid, whose config names its numbers beside those of the attention."""
    return state_space(
        text,
        width,
        heads=number(text, "mamba_n_heads"),
        head_dim=number(text, "mamba_d_head"),
        state=number(text, "mamba_d_state"),
        groups=number(text, "mamba_n_groups"),
        kernel=number(text, "mamba_d_conv"),
    )


def _falcon_h1(text: Text, width: int) -> tuple[Layer, ...]:
    full = attention(text, width)
    space = _hybrid_mamba2(text, width)
    both = replace(
        full,
        state_bytes=space.state_bytes,
        chunk_bytes=space.chunk_bytes,
        square_bytes=space.square_bytes,
        block_bytes=space.block_bytes,
        fixed_bytes=space.fixed_bytes,
        work_bytes=full.work_bytes + space.work_bytes // 5,  # the two run beside each other
    )
    return (both,) * layer_count(text)


def _granite_hybrid(text: Text, width: int) -> tuple[Layer, ...]:
    full = attention(text, width)
    if "mamba" not in (kinds := texts(text, "layer_types", layer_count(text))):
        return (full,) * layer_count(text)
    space = _hybrid_mamba2(text, width)
    return tuple(space if kind == "mamba" else full for kind in kinds)


def _lfm2(text: Text, width: int) -> tuple[Layer, ...]:
    hidden, kept = hidden_size(text), max(0, number(text, "conv_L_cache") - 1)
    feed = count(text, "block_ff_dim", "intermediate_size") or 4 * hidden
    if text.get("block_auto_adjust_ff_dim"):
        multiple = max(1, number(text, "block_multiple_of"))
        feed = 2 * feed // 3
        multiplier = text.get("block_ffn_dim_multiplier")
        feed = int(multiplier * feed) if isinstance(multiplier, int | float) and 0 < multiplier < 100 else feed
        feed = -(-feed // multiple) * multiple
    full = attention({**text, "intermediate_size": feed}, width, Weights(hidden=10.5, query=6.8, feed=2.1, half=0.9))
    convolution = Layer(
        CacheKind.STATE,
        state_bytes=kept * hidden * width,
        chunk_bytes=hidden * width,
        work_bytes=full.work_bytes,
    )
    positions = text.get("full_attn_idxs")
    if isinstance(positions, list):
        return tuple(full if position in positions else convolution for position in range(layer_count(text)))
    kinds = texts(text, "layer_types", layer_count(text))
    return tuple(full if kind == "full_attention" else convolution for kind in kinds)


def _qwen3_next(text: Text, width: int) -> tuple[Layer, ...]:
    full = attention(text, width)
    key_heads, value_heads = number(text, "linear_num_key_heads"), number(text, "linear_num_value_heads")
    key_dim, value_dim = number(text, "linear_key_head_dim"), number(text, "linear_value_head_dim")
    convolved = 2 * key_heads * key_dim + value_heads * value_dim
    states = value_heads * value_dim * key_dim
    linear = Layer(
        CacheKind.STATE,
        state_bytes=states * FLOAT_BYTES + max(0, number(text, "linear_conv_kernel_dim") - 1) * convolved * width,
        scan_bytes=states * FLOAT_BYTES,
        work_bytes=round((4.7 * convolved + 5.0 * hidden_size(text) + 0.8 * feed_forward(text)) * width),
    )
    every = max(1, count(text, "full_attention_interval") or 4)
    return tuple(linear if (position + 1) % every else full for position in range(layer_count(text)))


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
