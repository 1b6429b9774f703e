"""What a model of many shards will take: its headers read and its requests priced, without a tensor."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from omlxd.core.kv_estimate import kv_bytes, prefill_transient_bytes
from omlxd.core.model_shape import shape_of
from omlxd.daemon.model_files import read_model_folder
from tests.bench.report import Row, Target, alone
from tests.bench.scratch import Scratch

SHARDS, LAYERS, TARGET = 100, 100, Target(50.0)
_CONFIG = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28_672,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
}
_PARTS = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
_KINDS = (("weight", "U32", 4), ("scales", "BF16", 2), ("biases", "BF16", 2))


def run(scratch: Scratch) -> Iterator[Row]:
    """The whole estimate as `plan` and admission make it, and the pricing of one more request."""
    folder = _sharded(scratch.root / "shards")
    whole_ms, priced_ms = [], []
    for _ in range(scratch.rounds(20)):
        began_s = time.perf_counter()
        files = read_model_folder(folder)
        shape = shape_of(files.config, files.element_bytes)
        priced_s = time.perf_counter()
        kv_bytes(shape, 100_000, rows=4), prefill_transient_bytes(shape, 256, 100_000)
        ended_s = time.perf_counter()
        whole_ms.append(1000 * (ended_s - began_s))
        priced_ms.append(1000 * (ended_s - priced_s))
    yield alone(f"estimate, {SHARDS} shards, {files.tensors} tensors", "ms", whole_ms, TARGET)
    yield alone("price of one request", "ms", priced_ms)


def _sharded(folder: Path) -> Path:
    """A 4-bit model with one layer a shard; the tensors are holes in the files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    for shard in range(SHARDS):
        header, end = {}, 0
        for part in _PARTS:
            for kind, dtype, width in _KINDS:
                begin, end = end, end + 8192 * 1024 * width
                name = f"model.layers.{shard}.{part}_proj.{kind}"
                header[name] = {"dtype": dtype, "shape": [8192, 1024], "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        with (folder / f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
    return folder
