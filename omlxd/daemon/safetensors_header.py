"""Reads and checks the header of one safetensors file: 8 bytes of length (little-endian), JSON, then the tensors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final, NoReturn

from omlxd.core.errors import LoadFailed
from omlxd.core.estimate import METADATA_KEY
from omlxd.core.units import format_bytes
from omlxd.core.wording import shown

MAX_HEADER_BYTES: Final = 100_000_000  # the format's own limit
_BITS: Final = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


def read_header(path: Path) -> dict[str, Any]:
    """The parsed header of a safetensors file, every tensor checked against the file's size.

    Raises:
        LoadFailed: kind `truncated_shard` when bytes are missing at the end, else `bad_header`.
        OSError: the file cannot be opened or read.
    """
    with path.open("rb") as file:
        file_bytes = file.seek(0, 2)
        file.seek(0)
        if file_bytes < 8:
            _truncated(path, f"is {file_bytes} bytes long, too short for a safetensors file")
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 2 <= header_bytes <= MAX_HEADER_BYTES:
            _bad(path, f"says that its header has {header_bytes} bytes")
        if header_bytes > file_bytes - 8:
            _truncated(path, f"ends inside its header ({file_bytes - 8} of {header_bytes} bytes)")
        written = file.read(header_bytes)
    try:
        header = json.loads(written)
    except (ValueError, RecursionError):
        _bad(path, "has a header that is not JSON")
    if not isinstance(header, dict):
        _bad(path, "has a header that is not a table of tensors")
    tensors = {name: tensor for name, tensor in header.items() if name != METADATA_KEY}
    ends = [_end_of(path, name, tensor) for name, tensor in tensors.items()]
    missing_bytes = max(ends, default=0) - (file_bytes - 8 - header_bytes)
    if missing_bytes > 0:
        _truncated(path, f"is cut off: {format_bytes(missing_bytes)} are missing at its end")
    return tensors


def _end_of(path: Path, name: str, tensor: Any) -> int:
    """Where the tensor's bytes end; refuses an entry that does not add up."""
    match tensor:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]}:
            sizes = [begin, end, *shape]
        case _:
            _bad(path, f"has a tensor without dtype, shape and offsets: `{shown(name)}`")
    if not all(type(size) is int and 0 <= size < 2**63 for size in sizes) or begin > end:
        _bad(path, f"has a tensor with an impossible shape or place: `{shown(name)}`")
    # A dtype that is not known here is left to MLX to judge.
    if dtype in _BITS and math.prod(shape) * _BITS[dtype] != (end - begin) * 8:
        _bad(path, f"has a tensor whose shape and bytes do not agree: `{shown(name)}`")
    return int(end)


def _truncated(path: Path, what: str) -> NoReturn:
    raise LoadFailed(
        f"`{shown(path.name)}` {what}",
        hint="the download or copy stopped early; fetch the file again",
        details={"kind": "truncated_shard", "file": shown(str(path))},
    )


def _bad(path: Path, what: str) -> NoReturn:
    raise LoadFailed(
        f"`{shown(path.name)}` {what}",
        hint="the file is damaged or is not safetensors; fetch it again",
        details={"kind": "bad_header", "file": shown(str(path))},
    )
