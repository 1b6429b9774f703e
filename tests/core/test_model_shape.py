"""Shapes and predictions from configs as they are in the wild: nested, sparse, unknown, or nonsense."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.core.estimate import activation_bytes
from omlxd.core.kv_estimate import decode_transient_bytes, kv_bytes, layer_kv_bytes, prefill_transient_bytes
from omlxd.core.layer_cost import CacheKind
from omlxd.core.model_shape import shape_of

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
}
KNOWN = ["llama", "qwen3_moe", "gemma3", "gemma2", "phi3", "gpt_oss", "deepseek_v2", "deepseek_v3"]
KNOWN += ["mamba2", "falcon_h1", "granitemoehybrid", "lfm2", "qwen3_next"]
FIELDS = ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "layer_types"]
FIELDS += ["sliding_window", "sliding_window_pattern", "num_experts_per_tok", "block_auto_adjust_ff_dim", "num_heads"]
FIELDS += ["block_ffn_dim_multiplier", "full_attn_idxs", "full_attention_interval", "torch_dtype", "text_config"]
JUNK = st.none() | st.booleans() | st.integers(-5, 300) | st.floats() | st.text(max_size=4)
JUNK |= st.lists(st.sampled_from(["mamba", "sliding_attention"]) | st.integers(0, 3), max_size=3)


def test_a_llama_of_8b_takes_128_kib_of_kv_a_token() -> None:
    shape = shape_of(LLAMA_8B)
    assert shape.known
    assert kv_bytes(shape, 1024) == 1024 * 128 * 1024
    assert kv_bytes(shape, 1025, rows=3) == 3 * 1280 * 128 * 1024
    assert layer_kv_bytes(shape, 1024) == 1024 * 4 * 1024


def test_a_sliding_window_stops_growing_and_is_longer_after_a_chunk() -> None:
    text = {"num_hidden_layers": 12, "sliding_window": 1024, "head_dim": 128, "hidden_size": 2560}
    shape = shape_of({"model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16"})
    kinds = [layer.kind for layer in shape.layers]
    assert (len(kinds), kinds.count(CacheKind.FULL)) == (12, 2)  # nested text_config, mlx-lm's default pattern of 6
    token_bytes = shape.layers[0].token_bytes
    grown = kv_bytes(shape, 8192) - kv_bytes(shape, 4096)
    assert grown == 2 * 4096 * token_bytes
    assert kv_bytes(shape, 4096, chunk=256) - kv_bytes(shape, 4096) == 10 * 255 * token_bytes


def test_compressed_attention_keeps_the_latent_only() -> None:
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert kv_bytes(shape_of(config), 256) == 256 * 61 * 576 * 2


def test_a_state_does_not_grow() -> None:
    config = {"model_type": "mamba2", "num_hidden_layers": 2, "num_heads": 8, "head_dim": 64, "state_size": 64}
    shape = shape_of({**config, "n_groups": 1, "conv_kernel": 4}, element_bytes=4)
    assert kv_bytes(shape, 100_000) == kv_bytes(shape, 1) == 2 * (8 * 64 * 64 * 4 + 3 * 640 * 4)


@pytest.mark.parametrize(("backend", "head_dim", "width"), [("metal", 128, 4), ("metal", 64, 2), ("cuda", 128, 2)])
def test_where_attention_is_fused_no_scores_are_held(backend: str, head_dim: int, width: int) -> None:
    shape = shape_of({**LLAMA_8B, "head_dim": head_dim}, element_bytes=width)
    held = prefill_transient_bytes(shape, 256, 8192, "cpu") - prefill_transient_bytes(shape, 256, 8192, backend)
    assert held >= 256 * 8192 * 32 * width


@pytest.mark.parametrize(("backend", "head_dim", "width"), [("metal", 256, 2), ("cuda", 128, 4), ("cuda", 256, 2)])
def test_elsewhere_they_are(backend: str, head_dim: int, width: int) -> None:
    shape = shape_of({**LLAMA_8B, "head_dim": head_dim}, element_bytes=width)
    assert prefill_transient_bytes(shape, 256, 8192, backend) == prefill_transient_bytes(shape, 256, 8192, "cpu")


def test_an_unknown_architecture_is_priced_above_a_known_one() -> None:
    known, unknown = shape_of(LLAMA_8B), shape_of({**LLAMA_8B, "model_type": "llama99"})
    assert (known.known, unknown.known) == (True, False)
    assert kv_bytes(unknown, 5000) >= kv_bytes(known, 5000)
    assert prefill_transient_bytes(unknown, 256, 5000) > prefill_transient_bytes(known, 256, 5000)


@given(st.sampled_from([*KNOWN, "new", ""]), st.dictionaries(st.sampled_from(FIELDS), JUNK, max_size=8))
def test_nonsense_in_a_config_never_raises_and_never_costs_less_than_nothing(
    model_type: str, fields: dict[str, Any]
) -> None:
    shape = shape_of({"model_type": model_type, **fields})
    assert kv_bytes(shape, 1000, rows=2, chunk=100) >= 0
    assert prefill_transient_bytes(shape, 256, 1000) >= 0
    assert decode_transient_bytes(shape, 2, 1000) >= 0


@given(st.sampled_from(KNOWN), st.integers(1, 50_000), st.integers(0, 5_000), st.integers(1, 8))
def test_more_tokens_or_rows_never_take_less(model_type: str, tokens: int, more: int, rows: int) -> None:
    shape = shape_of({**LLAMA_8B, "model_type": model_type})
    assert kv_bytes(shape, tokens + more, rows) >= kv_bytes(shape, tokens, rows)
    assert kv_bytes(shape, tokens, rows + 1) >= kv_bytes(shape, tokens, rows)
    assert prefill_transient_bytes(shape, 64, tokens + more) >= prefill_transient_bytes(shape, 64, tokens)


def test_activations_are_as_wide_as_embedding_and_norms_promote_to() -> None:
    def header(**dtypes: str) -> dict[str, Any]:
        return {name.replace("__", "."): {"dtype": dtype} for name, dtype in dtypes.items()}

    assert activation_bytes([header(model__embed_tokens__weight="BF16", layers__0__A_log="F32")]) == 2
    assert activation_bytes([header(embed_tokens__weight="BF16", layers__0__input_layernorm__weight="F32")]) == 4
    assert activation_bytes([header(embed_tokens__weight="U32"), header(embed_tokens__scales="F16")]) == 2
    assert activation_bytes([{"__metadata__": {"dtype": "F32"}}]) is None
