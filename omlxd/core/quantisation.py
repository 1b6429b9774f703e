"""How a model's weights are stored, in a word, from its config.json; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_UNKNOWN: Final = "?"
_DTYPES: Final = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


def quantisation(config: Mapping[str, Any], element_bytes: int | None) -> str:
    """`4-bit`, `4-bit mixed`, `fp8`, `bf16`, ...; `?` when neither says.

    Args:
        config: the parsed config.json, which may hold anything.
        element_bytes: bytes of one unquantised element of the weights, or None.
    """
    for key in ("quantization", "quantization_config"):
        table = config.get(key)
        if isinstance(table, dict):
            return _quantised(table)
    written = config.get("torch_dtype") or config.get("dtype")
    if element_bytes == 2:
        return "fp16" if written == "float16" else "bf16"
    if element_bytes is None and isinstance(written, str):
        return _DTYPES.get(written, _UNKNOWN)
    return {4: "fp32", 1: "fp8"}.get(element_bytes or 0, _UNKNOWN)


def _quantised(table: Mapping[str, Any]) -> str:
    bits = table.get("bits")
    if type(bits) is not int:
        method = table.get("quant_method")
        return method[:12] if isinstance(method, str) and method.isprintable() and method else _UNKNOWN
    # Layers with bits of their own stand beside the common ones, under their names.
    others = {each.get("bits") for each in table.values() if isinstance(each, dict)} | {bits}
    return f"{bits}-bit" if len(others - {None}) == 1 else f"{bits}-bit mixed"
