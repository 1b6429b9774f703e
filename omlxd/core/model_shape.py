"""The shape of a model as far as its memory depends on it, parsed once from config.json: layers, heads, sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from omlxd.core.architectures import generic_layers, layers_of, with_defaults
from omlxd.core.config_fields import count
from omlxd.core.layer_cost import Layer
from omlxd.core.layer_kinds import feed_forward, head_counts, hidden_size
from omlxd.core.learned_costs import LearnedCosts

_DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the predictions need of a config; counts, and bytes per activation element.

    Attributes:
        model_type: the architecture that the config names.
        known: whether this architecture's formulas were checked against measurement.
        layers: what each layer keeps and holds.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: elements per head.
        hidden: width of the residual stream.
        intermediate: elements per token inside the feed-forward part.
        vocab: tokens of the vocabulary.
        element_bytes: bytes of one activation element.
        quantised: the weights are quantised.
        tied: the output layer is the embedding.
        context_tokens: what the config says is the longest context, or None.
        learned: measured costs that take precedence over the formulas.
    """

    model_type: str
    known: bool
    layers: tuple[Layer, ...]
    heads: int
    kv_heads: int
    head_dim: int
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
    model_type = str(config.get("model_type", ""))
    text = with_defaults(model_type, _text(config))
    width = element_bytes or _DTYPE_BYTES.get(str(text.get("torch_dtype") or text.get("dtype")), 2)
    known = layers_of(model_type, text, width)
    heads, kv_heads, head_dim = head_counts(text)
    return ModelShape(
        model_type=model_type,
        known=known is not None,
        layers=generic_layers(text, width) if known is None else known,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden_size(text),
        intermediate=feed_forward(text),
        vocab=count(text, "vocab_size") or 262_144,
        element_bytes=width,
        quantised=bool(config.get("quantization") or config.get("quantization_config")),
        tied=bool(text.get("tie_word_embeddings", False)),
        context_tokens=count(text, "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"),
    )


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the language model: the outer fields, overlaid by a nested `text_config`."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, Mapping) else config
