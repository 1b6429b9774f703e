"""What a tiny model consists of: configuration and tensor shapes per kind, fitted to a size; no MLX, no I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from omlxd.core.errors import InvalidRequest

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
HEAD_DIM = 64
EXPERTS = 8
SSM_STATE = 64
SSM_CONV = 4

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Storage:
    """How weights are stored: their dtype, or `bits` wide groups whose scales have that dtype."""

    dtype: str
    bits: int | None
    group_size: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise InvalidRequest(f"no dtype `{self.dtype}`", hint=f"one of: {', '.join(DTYPE_BYTES)}")

    def is_quantized(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether this tensor is stored quantised: matrices whose rows divide into groups, never convolutions."""
        matrix = len(shape) > 1 and name.endswith(".weight") and "conv1d" not in name
        return self.bits is not None and matrix and shape[-1] % self.group_size == 0

    def tensor_bytes(self, name: str, shape: tuple[int, ...]) -> int:
        """Bytes of one tensor in the file, scales and biases of its groups included."""
        numbers = math.prod(shape)
        if self.bits is not None and self.is_quantized(name, shape):
            return numbers * self.bits // 8 + 2 * numbers // self.group_size * DTYPE_BYTES[self.dtype]
        return numbers * DTYPE_BYTES[self.dtype]

    def total_bytes(self, shapes: Shapes) -> int:
        """Bytes of all tensors."""
        return sum(self.tensor_bytes(name, shape) for name, shape in shapes.items())


@dataclass(frozen=True)
class Layout:
    """One tiny model before it has numbers: the `config.json` that mlx-lm reads, and every tensor's shape."""

    config: Mapping[str, Any]
    shapes: Shapes


@dataclass(frozen=True)
class _Size:
    """The four numbers that decide a model's size; `inner` is the width inside a block (MLP, expert, state space)."""

    layers: int
    hidden: int
    inner: int
    vocab: int

    @property
    def heads(self) -> int:
        return self.hidden // HEAD_DIM

    @property
    def kv_heads(self) -> int:
        """Grouped heads where the number allows it, as models of today have them."""
        return next(self.heads // share for share in (3, 2, 1) if self.heads % share == 0)


def fit_layout(
    kind: str, *, size_bytes: int, layers: int | None, vocab: int, context: int, window: int, storage: Storage
) -> Layout:
    """The layout of `kind` whose weights take as nearly `size_bytes` as its widths allow.

    Args:
        kind: a key of `KINDS`.
        size_bytes: sum of the tensors' bytes in the files.
        layers: number of blocks; by default more for a bigger model.
        vocab: number of token ids.
        context: `max_position_embeddings`, in tokens.
        window: sliding window of gemma3_text, in tokens.
        storage: dtype and quantisation of the weights.

    Raises:
        InvalidRequest: no such kind, or even the narrowest such model is far bigger.
    """
    if kind not in KINDS:
        raise InvalidRequest(f"no tiny model of kind `{kind}`", hint=f"one of: {', '.join(KINDS)}")
    if layers is None:
        layers = next(count for count, below in ((2, 4e6), (4, 3e7), (8, 3e8), (16, math.inf)) if size_bytes < below)
    size = _fit(KINDS[kind], size_bytes, layers, vocab, storage)
    config = _config(kind, size, context=context, window=window)
    return Layout(config=config, shapes=KINDS[kind].shapes(size))


def _fit(kind: _Kind, size_bytes: int, layers: int, vocab: int, storage: Storage) -> _Size:
    """Choose the hidden width whose customary proportions come nearest, then mend the rest with the inner width.

    mamba2's inner width stays twice the hidden one: transformers refuses another when it reads the tokenizer.
    """
    step = max(kind.inner_step, storage.group_size if storage.bits else 0)

    def bytes_of(hidden: int, inner: int) -> int:
        return storage.total_bytes(kind.shapes(_Size(layers, hidden, inner, vocab)))

    def customary(hidden: int) -> int:
        return max(step, round(hidden * kind.inner_ratio / step) * step)

    hidden = HEAD_DIM
    while bytes_of(hidden + HEAD_DIM, customary(hidden + HEAD_DIM)) <= size_bytes:
        hidden += HEAD_DIM  # the widest that is not too big, so that the inner width has something to add
    if kind.inner_fixed:
        return _Size(layers, hidden, customary(hidden), vocab)
    smallest = bytes_of(hidden, step)
    steps = 1 + round((size_bytes - smallest) / (bytes_of(hidden, 2 * step) - smallest))
    if smallest > 1.1 * size_bytes:
        raise InvalidRequest(
            f"a model with {layers} layers and {vocab} token ids takes at least {smallest} bytes, not {size_bytes}",
            hint="ask for more bytes, fewer layers, or fewer token ids",
            details={"smallest_bytes": smallest},
        )
    return _Size(layers, hidden, max(1, steps) * step, vocab)


def _config(kind: str, size: _Size, *, context: int, window: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": kind,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "intermediate_size": size.inner,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "vocab_size": size.vocab,
        "rope_theta": 10000.0,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
    }
    if kind == "gemma3_text":
        config |= {
            "sliding_window": window,
            "sliding_window_pattern": min(6, size.layers),  # at least one layer with full attention
            "query_pre_attn_scalar": HEAD_DIM,
            "rope_local_base_freq": 10000.0,
        }
    elif kind == "qwen3_moe":
        config |= {
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": size.inner,
            "norm_topk_prob": True,
        }
    elif kind == "mamba2":
        config |= {
            "num_heads": size.inner // HEAD_DIM,
            "state_size": SSM_STATE,
            "conv_kernel": SSM_CONV,
            "n_groups": 1,
            "use_bias": False,
            "use_conv_bias": True,
            "time_step_limit": [0.001, 100.0],
            "time_step_rank": "auto",
            "layer_norm_epsilon": 1e-5,
            "chunk_size": 256,
        }
    return config


def _transformer(
    size: _Size, *, qkv_bias: bool = False, qk_norm: bool = False, four_norms: bool = False, experts: bool = False
) -> Shapes:
    """Tensors of a llama-like model, named and shaped as mlx-lm's modules have them."""
    hidden, inner, kv = size.hidden, size.inner, size.kv_heads * HEAD_DIM
    block: Shapes = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, hidden),
        "post_attention_layernorm.weight": (hidden,),
    }
    if qkv_bias:
        block |= {f"self_attn.{part}_proj.bias": (rows,) for part, rows in (("q", hidden), ("k", kv), ("v", kv))}
    if qk_norm:
        block |= {f"self_attn.{part}_norm.weight": (HEAD_DIM,) for part in "qk"}
    if four_norms:
        block |= {f"{place}_feedforward_layernorm.weight": (hidden,) for place in ("pre", "post")}
    stack, mlp = ((EXPERTS,), "mlp.switch_mlp") if experts else ((), "mlp")
    if experts:
        block["mlp.gate.weight"] = (EXPERTS, hidden)
    block |= {f"{mlp}.{part}_proj.weight": (*stack, inner, hidden) for part in ("gate", "up")}
    block[f"{mlp}.down_proj.weight"] = (*stack, hidden, inner)
    return {
        "model.embed_tokens.weight": (size.vocab, hidden),
        **_blocks("model.layers", size.layers, block),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (size.vocab, hidden),
    }


def _mamba2(size: _Size) -> Shapes:
    """Tensors of mamba2; its inner width is heads × head dim."""
    hidden, inner, heads = size.hidden, size.inner, size.inner // HEAD_DIM
    conv = inner + 2 * SSM_STATE
    block: Shapes = {
        "norm.weight": (hidden,),
        "mixer.in_proj.weight": (inner + conv + heads, hidden),
        "mixer.conv1d.weight": (conv, SSM_CONV, 1),
        "mixer.conv1d.bias": (conv,),
        "mixer.dt_bias": (heads,),
        "mixer.A_log": (heads,),
        "mixer.D": (heads,),
        "mixer.norm.weight": (inner,),
        "mixer.out_proj.weight": (hidden, inner),
    }
    return {
        "backbone.embeddings.weight": (size.vocab, hidden),
        **_blocks("backbone.layers", size.layers, block),
        "backbone.norm_f.weight": (hidden,),
        "lm_head.weight": (size.vocab, hidden),
    }


def _blocks(prefix: str, layers: int, block: Shapes) -> Shapes:
    return {f"{prefix}.{layer}.{name}": shape for layer in range(layers) for name, shape in block.items()}


@dataclass(frozen=True)
class _Kind:
    """A model type: its tensors, and how its inner width relates to the hidden one and may vary."""

    shapes: Callable[[_Size], Shapes]
    inner_ratio: float = 8 / 3
    inner_step: int = 32
    inner_fixed: bool = False


KINDS: Mapping[str, _Kind] = {
    "llama": _Kind(_transformer),
    "qwen2": _Kind(lambda size: _transformer(size, qkv_bias=True)),
    "qwen3": _Kind(lambda size: _transformer(size, qk_norm=True)),
    "gemma3_text": _Kind(lambda size: _transformer(size, qk_norm=True, four_norms=True)),
    "qwen3_moe": _Kind(lambda size: _transformer(size, qk_norm=True, experts=True), inner_ratio=1 / 3, inner_step=16),
    "mamba2": _Kind(_mamba2, inner_ratio=2, inner_step=HEAD_DIM, inner_fixed=True),
}
