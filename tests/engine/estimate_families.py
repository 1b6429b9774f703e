"""Tiny models of each family, as config dicts that mlx-lm's own classes are built from: wide enough to be measured."""

from __future__ import annotations

from typing import Any

_BASE: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 256,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": []}
_MOE |= {"moe_intermediate_size": 128, "norm_topk_prob": True}
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "attention_bias": False,
}
_YARN = {"type": "yarn", "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0, "original_max_position_embeddings": 4096}
_MULTIPLIERS = ("attention_in", "attention_out", "embedding", "key", "lm_head", "ssm_in", "ssm_out")


def _config(model_type: str, **fields: Any) -> dict[str, Any]:
    return {**_BASE, "model_type": model_type, **fields}


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _config("llama"),
    "llama, many heads": _config("llama", num_attention_heads=8, intermediate_size=128),
    "mistral": _config("mistral", intermediate_size=640, sliding_window=128),
    "qwen2": _config("qwen2"),
    "qwen3": _config("qwen3", num_attention_heads=8),
    "qwen3_moe": _config("qwen3_moe", **_MOE),
    "gemma2": _config("gemma2", attn_logit_softcapping=50.0, final_logit_softcapping=30.0, query_pre_attn_scalar=32),
    "gemma3_text": _config(
        "gemma3_text",
        num_hidden_layers=6,
        sliding_window=256,
        sliding_window_pattern=3,
        query_pre_attn_scalar=32,
        rope_local_base_freq=10000.0,
    ),
    "phi3": _config("phi3"),
    "mixtral": _config("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v2": _config("deepseek_v2", **_DEEPSEEK, rope_scaling=_YARN, topk_method="greedy"),
    "deepseek_v3": _config(
        "deepseek_v3",
        **_DEEPSEEK,
        rope_scaling=None,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
    ),
    "gpt_oss": _config(
        "gpt_oss",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=128,
        rope_scaling=None,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "lfm2": _config(
        "lfm2",
        num_hidden_layers=6,
        norm_eps=1e-5,
        conv_bias=False,
        conv_L_cache=3,
        block_dim=128,
        block_ff_dim=256,
        block_multiple_of=64,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
        full_attn_idxs=[1, 4],
    ),
    "mamba2": _config(
        "mamba2",
        num_heads=8,
        state_size=32,
        conv_kernel=4,
        n_groups=1,
        use_bias=False,
        use_conv_bias=True,
        time_step_limit=[0.001, 100.0],
        time_step_rank="auto",
        layer_norm_epsilon=1e-5,
        chunk_size=256,
        expand=2,
    ),
    "falcon_h1": _config(
        "falcon_h1",
        mamba_chunk_size=256,
        mamba_d_conv=4,
        mamba_d_head=32,
        mamba_d_ssm=256,
        mamba_d_state=32,
        mamba_n_groups=1,
        mamba_n_heads=8,
        mlp_multipliers=[1.0, 1.0],
        ssm_multipliers=[1.0] * 5,
        **{f"{name}_multiplier": 1.0 for name in _MULTIPLIERS},
    ),
    "granitemoehybrid": _config(
        "granitemoehybrid",
        num_hidden_layers=6,
        layer_types=["mamba", "attention", "mamba"] * 2,
        attention_bias=False,
        embedding_multiplier=1.0,
        attention_multiplier=0.1,
        logits_scaling=1.0,
        residual_multiplier=1.0,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=128,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_proj_bias=False,
        mamba_d_state=32,
        mamba_d_conv=4,
        mamba_n_groups=1,
        mamba_conv_bias=True,
    ),
    "qwen3_next": _config(
        "qwen3_next",
        **_MOE,
        full_attention_interval=2,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        shared_expert_intermediate_size=128,
        partial_rotary_factor=0.25,
    ),
}

CANNOT_SHARE = {"gemma2"}
"""mlx-lm cannot run several requests through them at once."""


def build(config: dict[str, Any], dtype: str) -> Any:
    """A model with random weights; on the MLX thread."""
    import mlx.core as mx
    import mlx.nn as nn

    from omlxd.engine import mlxlm

    mlxlm.import_libraries()
    from mlx_lm.utils import _get_classes

    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    model.set_dtype(getattr(mx, dtype))
    if "quantization" in config:
        nn.quantize(model, 64, 4, class_predicate=_divides)
    mx.eval(mlxlm.every_array(model))
    return model


def _divides(_: str, module: Any) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 64 == 0
