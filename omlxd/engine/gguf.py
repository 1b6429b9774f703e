"""From a llama GGUF file to the folder that mlx-lm loads: names, rotary order, tokenizer, configuration.

MLX reads Q4_0, Q4_1 and Q8_0 blocks as its own affine groups of 32, without loss.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from omlxd.core.errors import LoadFailed
from omlxd.engine.model_folders import no_arrays_left, write_json, write_tokenizer

GROUP_SIZE = 32
SPECIAL_TOKEN_TYPE = 3  # GGUF's "control" tokens
BLOCK_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
MODEL_PARTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

Tensors = dict[str, Any]


def convert_gguf(gguf: Path, folder: Path, *, keep_quantized: bool) -> None:
    """Write the model of `gguf` into `folder`, with bfloat16 activations.

    Args:
        gguf: a file of architecture llama with a byte-level BPE tokenizer.
        folder: an existing folder.
        keep_quantized: keep the file's quantised groups, with bfloat16 scales; else bfloat16 throughout.

    Raises:
        LoadFailed: damaged, of another architecture, or with tensors this does not know.
    """
    with no_arrays_left():
        try:
            _convert(gguf, folder, keep_quantized)
        except KeyError as error:
            raise _not_ours(gguf, f"it lacks `{error.args[0]}`") from error


def _convert(gguf: Path, folder: Path, keep_quantized: bool) -> None:
    import mlx.core as mx

    with mx.stream(mx.cpu):  # it is fast enough there, and the GPU may be busy or absent
        tensors, metadata = _read(gguf)
        tensors = _renamed(tensors, metadata, gguf)
        quantization = _quantization(tensors) if keep_quantized else None
        if not keep_quantized:
            tensors = _dequantized(tensors)
        tensors = {name: t if t.dtype == mx.uint32 else t.astype(mx.bfloat16) for name, t in tensors.items()}
        mx.eval(tensors)
    token_ids = _write_tokenizer(metadata, folder)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})
    config = _config(metadata) | token_ids | {"tie_word_embeddings": "lm_head.weight" not in tensors}
    write_json(folder / "config.json", config | ({"quantization": quantization} if quantization else {}))


def _read(gguf: Path) -> tuple[Tensors, dict[str, Any]]:
    import mlx.core as mx

    try:
        loaded: Any = mx.load(str(gguf), return_metadata=True)
    except RuntimeError as error:
        raise _not_ours(gguf, str(error)) from error
    tensors, metadata = cast(tuple[Tensors, dict[str, Any]], loaded)
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise _not_ours(gguf, f"its architecture is `{architecture}`, not `llama`")
    if metadata["tokenizer.ggml.model"] != "gpt2":
        raise _not_ours(gguf, f"its tokenizer is `{metadata['tokenizer.ggml.model']}`, not `gpt2` (byte-level BPE)")
    return tensors, metadata


def _not_ours(gguf: Path, why: str) -> LoadFailed:
    return LoadFailed(
        f"`{gguf.name}` cannot be converted: {why}",
        hint="use a model folder in mlx-lm's own format",
        details={"kind": "weights"},
    )


def _scalar(value: Any) -> Any:
    """GGUF numbers arrive as arrays with one element."""
    return value.item() if hasattr(value, "item") else value


def _llama(metadata: Mapping[str, Any], key: str) -> Any:
    return _scalar(metadata[f"llama.{key}"])


def _renamed(raw: Tensors, metadata: Mapping[str, Any], gguf: Path) -> Tensors:
    """The tensors under mlx-lm's names, with query and key rows in its rotary order."""
    heads = {
        "attn_q": _llama(metadata, "attention.head_count"),
        "attn_k": _llama(metadata, "attention.head_count_kv"),
    }
    tensors: Tensors = {}
    for name, tensor in raw.items():
        if name == "rope_freqs.weight":  # mlx-lm computes them
            continue
        stem, _, part = name.rpartition(".")
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if block and block[2] in BLOCK_PARTS:
            if block[2] in heads:
                tensor = _halves_apart(tensor, heads[block[2]])
            tensors[f"model.layers.{block[1]}.{BLOCK_PARTS[block[2]]}.{part}"] = tensor
        elif stem in MODEL_PARTS:
            tensors[f"{MODEL_PARTS[stem]}.{part}"] = tensor
        else:
            raise _not_ours(gguf, f"it has a tensor `{name}` that a llama has not")
    return tensors


def _halves_apart(rows: Any, heads: int) -> Any:
    """Undo llama.cpp's interleaving of the two rotary halves of each head's rows (quantised rows move as well)."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _quantized_modules(tensors: Tensors) -> dict[str, int]:
    """Module name to bits, of all that came quantised: a group of 32 numbers takes one word of 32 bits per bit."""
    stems = [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]
    return {stem: tensors[f"{stem}.weight"].shape[-1] // tensors[f"{stem}.scales"].shape[-1] for stem in stems}


def _quantization(tensors: Tensors) -> dict[str, Any] | None:
    """The `quantization` entry of `config.json`; modules of another width than the most common get their own."""
    modules = _quantized_modules(tensors)
    if not modules:
        return None
    common = max(set(modules.values()), key=list(modules.values()).count)
    others = {
        stem: {"group_size": GROUP_SIZE, "bits": bits} for stem, bits in sorted(modules.items()) if bits != common
    }
    return {"group_size": GROUP_SIZE, "bits": common, **others}


def _dequantized(tensors: Tensors) -> Tensors:
    import mlx.core as mx

    modules = _quantized_modules(tensors)
    plain = {name: t for name, t in tensors.items() if name.rpartition(".")[0] not in modules}
    for stem, bits in modules.items():
        packed, scales, biases = (tensors[f"{stem}.{part}"] for part in ("weight", "scales", "biases"))
        # float16 scales on the CPU are far slower, and round twice
        full = mx.dequantize(
            packed, scales.astype(mx.float32), biases.astype(mx.float32), group_size=GROUP_SIZE, bits=bits
        )
        plain[f"{stem}.weight"] = full.astype(mx.bfloat16)
        mx.eval(plain[f"{stem}.weight"])  # one float32 matrix at a time in memory
    return plain


def _write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> dict[str, int]:
    """Rebuild the fast tokenizer from the GGUF's vocabulary and merges; returns the ids that `config.json` names."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"].tolist()
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == SPECIAL_TOKEN_TYPE]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    ids = {role: _scalar(metadata[f"tokenizer.ggml.{role}_token_id"]) for role in ("bos", "eos", "unknown", "padding")}
    write_tokenizer(
        folder,
        tokenizer,
        special={
            "bos_token": tokens[ids["bos"]],
            "eos_token": tokens[ids["eos"]],
            "unk_token": tokens[ids["unknown"]],
            "pad_token": tokens[ids["padding"]],
        },
        chat_template=metadata["tokenizer.chat_template"],
        context=_llama(metadata, "context_length"),
    )
    return {"bos_token_id": ids["bos"], "eos_token_id": ids["eos"]}


def _config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": _llama(metadata, "embedding_length"),
        "num_hidden_layers": _llama(metadata, "block_count"),
        "intermediate_size": _llama(metadata, "feed_forward_length"),
        "num_attention_heads": _llama(metadata, "attention.head_count"),
        "num_key_value_heads": _llama(metadata, "attention.head_count_kv"),
        "rms_norm_eps": _llama(metadata, "attention.layer_norm_rms_epsilon"),
        "vocab_size": _llama(metadata, "vocab_size"),
        "rope_theta": _llama(metadata, "rope.freq_base"),
        "max_position_embeddings": _llama(metadata, "context_length"),
        "torch_dtype": "bfloat16",
    }
