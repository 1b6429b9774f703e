from __future__ import annotations

import json
from pathlib import Path

import pytest

from omlxd.core.errors import LoadFailed
from omlxd.engine.gguf import BLOCK_PARTS, MODEL_PARTS, convert_gguf

pytestmark = pytest.mark.mlx


def as_llama_cpp_writes_it(folder: Path, gguf: Path, more_tensors: dict | None = None) -> dict:
    """Write the model in `folder` as a GGUF file with llama.cpp's names and row order; returns its own tensors."""
    import mlx.core as mx

    config = json.loads((folder / "config.json").read_text())
    ours = mx.load(str(folder / "model.safetensors"))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    names = {f"model.layers.{{}}.{ours}": f"blk.{{}}.{theirs}" for theirs, ours in BLOCK_PARTS.items()}
    tensors = {f"{theirs}.weight": ours[f"{own}.weight"] for theirs, own in MODEL_PARTS.items()}
    for layer in range(config["num_hidden_layers"]):
        for own, theirs in names.items():
            rows = ours[f"{own.format(layer)}.weight"]
            part = theirs.rpartition(".")[2]
            if part in heads:  # each head's two rotary halves, row by row in turn
                half = rows.shape[0] // heads[part] // 2
                rows = rows.reshape(heads[part], 2, half, -1).swapaxes(1, 2).reshape(rows.shape)
            tensors[f"{theirs.format(layer)}.weight"] = rows
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    special = dict.fromkeys(("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"), 3)
    metadata = {
        "general.architecture": "llama",
        "llama.embedding_length": mx.array(config["hidden_size"], mx.uint32),
        "llama.block_count": mx.array(config["num_hidden_layers"], mx.uint32),
        "llama.feed_forward_length": mx.array(config["intermediate_size"], mx.uint32),
        "llama.attention.head_count": mx.array(config["num_attention_heads"], mx.uint32),
        "llama.attention.head_count_kv": mx.array(config["num_key_value_heads"], mx.uint32),
        "llama.attention.layer_norm_rms_epsilon": mx.array(config["rms_norm_eps"], mx.float32),
        "llama.vocab_size": mx.array(config["vocab_size"], mx.uint32),
        "llama.rope.freq_base": mx.array(config["rope_theta"], mx.float32),
        "llama.context_length": mx.array(config["max_position_embeddings"], mx.uint32),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": list(vocabulary),
        "tokenizer.ggml.token_type": mx.array([special.get(token, 1) for token in vocabulary], mx.int32),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": mx.array(1, mx.uint32),
        "tokenizer.ggml.eos_token_id": mx.array(2, mx.uint32),
        "tokenizer.ggml.unknown_token_id": mx.array(3, mx.uint32),
        "tokenizer.ggml.padding_token_id": mx.array(0, mx.uint32),
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }
    tensors = {name: tensor.astype(mx.float32) for name, tensor in (tensors | (more_tensors or {})).items()}
    mx.save_gguf(str(gguf), tensors, metadata)
    return ours


def test_a_model_comes_back_with_its_names_row_order_and_configuration(tmp_path, tiny_model):
    import mlx.core as mx

    folder = tiny_model(size_bytes=3_000_000, layers=2, vocab=300)
    ours = as_llama_cpp_writes_it(folder, tmp_path / "tiny.gguf")
    (tmp_path / "model").mkdir()
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "model", keep_quantized=False)
    theirs = mx.load(str(tmp_path / "model" / "model.safetensors"))
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        assert mx.array_equal(theirs[name], tensor.astype(mx.bfloat16)), name
    before, after = (json.loads((place / "config.json").read_text()) for place in (folder, tmp_path / "model"))
    same = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    same += ("vocab_size", "rope_theta", "max_position_embeddings", "eos_token_id", "tie_word_embeddings")
    assert {key: after[key] for key in same} == {key: before[key] for key in same}


def test_it_generates_what_the_original_generates(tmp_path, tiny_model):
    from mlx_lm import generate, load

    original = tiny_model(size_bytes=3_000_000, layers=2, vocab=300, dtype="bfloat16")
    as_llama_cpp_writes_it(original, tmp_path / "tiny.gguf")
    (tmp_path / "model").mkdir()
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "model", keep_quantized=False)
    texts = [
        generate(*load(str(folder)), "Once upon a time", max_tokens=30) for folder in (original, tmp_path / "model")
    ]
    assert texts[0] == texts[1]


def test_a_tensor_that_a_llama_has_not_is_refused_by_name(tmp_path, tiny_model):
    import mlx.core as mx

    extra = {"blk.0.ffn_gate_inp.weight": mx.zeros((8, 8))}
    as_llama_cpp_writes_it(tiny_model(), tmp_path / "moe.gguf", extra)
    with pytest.raises(LoadFailed, match=r"blk\.0\.ffn_gate_inp\.weight"):
        convert_gguf(tmp_path / "moe.gguf", tmp_path, keep_quantized=False)
