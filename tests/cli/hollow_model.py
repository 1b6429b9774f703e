"""Model folders that take no disk: a header that is true, and weights that are a hole."""

from __future__ import annotations

import json
import struct
from pathlib import Path

MIB = 2**20
CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 260,
    "max_position_embeddings": 8192,
}


def hollow_model(folder: Path, size_mib: int) -> Path:
    """A model folder whose weight file is mostly a hole: whoever read its tensors would take long."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    tensor = {"dtype": "F32", "shape": [size_mib * MIB // 4], "data_offsets": [0, size_mib * MIB]}
    header = json.dumps({"model.embed_tokens.weight": tensor}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size_mib * MIB)
    return folder
