"""What a model will need, from its config and its safetensors headers alone: no tensor is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

METADATA_KEY: Final = "__metadata__"


def weights_bytes(headers: Iterable[Mapping[str, Any]]) -> int:
    """Bytes that the weights take in memory: the sum of all tensors' bytes.

    A name that occurs in two files is one tensor: the later file wins, as when the files are loaded.

    Args:
        headers: each file's parsed header, `{"name": {"data_offsets": [begin, end], ...}}`.

    Source: measured, `active memory after a load = this sum + 8` on fp32, bf16, 4 and 8 bit, MoE, mamba2, sharded.
    """
    sizes: dict[str, int] = {}
    for header in headers:
        for name, tensor in header.items():
            if name != METADATA_KEY:
                begin, end = tensor["data_offsets"]
                sizes[name] = end - begin
    return sum(sizes.values())


_FLOAT_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}
_FLOW: Final = ("embed", "wte", "word_embeddings", "input_layernorm", "attention_norm", "ln_1")


def activation_bytes(headers: Iterable[Mapping[str, Any]]) -> int | None:
    """Bytes of one activation element: the widest floating type of the embedding and of the layers' first norm.

    The config's `torch_dtype` says how the model was trained, not how these weights are stored; a model computes in
    what its embedding (quantised: its scales) and norms promote to. None when no such tensor is there.
    """
    flowing, others = set[int](), set[int]()
    for header in headers:
        for name, tensor in header.items():
            width = _FLOAT_BYTES.get(str(tensor.get("dtype"))) if name != METADATA_KEY else None
            if width is not None:
                (flowing if any(part in name for part in _FLOW) else others).add(width)
    return max(flowing or others, default=None)
