"""The shape of a model as far as its memory depends on it, parsed once from config.json: layers, heads, sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from omlxd.core.learned_costs import LearnedCosts

_DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "F32": 4, "BF16": 2, "F16": 2}


class CacheKind(StrEnum):
    """What a layer keeps of the tokens it has seen."""

    FULL = "full"
    SLIDING = "sliding"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's cache.

    Attributes:
        kind: keys and values of all tokens, of a window of them, or a state of constant size.
        token_bytes: keys and values of one token of one row.
        window_tokens: the window of a sliding layer.
        state_bytes: constant bytes of one row, beside what tokens take.
    """

    kind: CacheKind
    token_bytes: int = 0
    window_tokens: int = 0
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the predictions need of a config; counts, and bytes per activation element.

    Attributes:
        model_type: the architecture that the config names.
        known: whether this architecture's formulas were checked against measurement.
        layers: each layer's cache.
        heads: query heads; the largest of any layer.
        kv_heads: key and value heads; the largest of any layer.
        key_dim: elements of a key per head.
        value_dim: elements of a value per head.
        hidden: width of the residual stream.
        intermediate: width of the feed-forward layer as far as it is held per token.
        vocab: tokens of the vocabulary.
        element_bytes: bytes of one activation element.
        quantised: the weights are quantised.
        tied: the output layer is the embedding.
        context_tokens: what the config says is the longest context, or None.
        learned: measured costs that take precedence over the formulas.
    """

    model_type: str
    known: bool
    layers: tuple[LayerCache, ...]
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    hidden: int
    intermediate: int
    vocab: int
    element_bytes: int
    quantised: bool
    tied: bool
    context_tokens: int | None = None
    learned: LearnedCosts | None = None


def shape_of(config: Mapping[str, Any], element_bytes: int | None = None) -> ModelShape:
    """The shape that a parsed config.json describes; never raises, an unreadable field takes a cautious value.

    Args:
        config: parsed config.json; a multimodal model's `text_config` is looked into.
        element_bytes: bytes of one activation element when the weights' headers are known; else the config's dtype.
    """
    text = _text(config)
    hidden = _count(text, "hidden_size", "d_model", "n_embd", "dim") or 4096
    heads = _count(text, "num_attention_heads", "n_head", "num_heads", "n_heads") or 32
    kv_heads = _count(text, "num_key_value_heads", "n_kv_heads", "num_kv_heads") or heads
    head_dim = _count(text, "head_dim") or max(1, hidden // heads)
    width = element_bytes or _DTYPE_BYTES.get(str(text.get("torch_dtype") or text.get("dtype")), 2)
    count = _count(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers") or 32
    token_bytes = 2 * kv_heads * head_dim * width
    return ModelShape(
        model_type=str(config.get("model_type", "")),
        known=False,
        layers=(LayerCache(CacheKind.FULL, token_bytes),) * count,
        heads=heads,
        kv_heads=kv_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        hidden=hidden,
        intermediate=_count(text, "intermediate_size", "ffn_dim", "n_inner") or 4 * hidden,
        vocab=_count(text, "vocab_size") or 262_144,
        element_bytes=width,
        quantised=bool(config.get("quantization") or config.get("quantization_config")),
        tied=bool(text.get("tie_word_embeddings", False)),
        context_tokens=_count(text, "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"),
    )


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the language model: outer fields, overlaid by a nested `text_config`."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, Mapping) else config


def _count(text: Mapping[str, Any], *keys: str) -> int | None:
    """The first positive whole number under one of the keys."""
    for key in keys:
        value = text.get(key)
        if type(value) is int and 0 < value < 2**31:
            return value
    return None
