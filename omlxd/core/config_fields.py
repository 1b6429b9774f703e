"""Reads fields of a parsed config.json, which may hold anything: a bad value is as good as none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def count(text: Mapping[str, Any], *keys: str) -> int | None:
    """The first positive whole number under one of the keys."""
    for key in keys:
        value = text.get(key)
        if type(value) is int and 0 < value < 2**31:
            return value
    return None


def number(text: Mapping[str, Any], key: str) -> int:
    """The positive whole number under the key, else 0."""
    return count(text, key) or 0


def texts(text: Mapping[str, Any], key: str, length: int, default: str = "full_attention") -> tuple[str, ...]:
    """The list of words under the key, cut or filled up to `length`."""
    value = text.get(key)
    words = [str(word) for word in value] if isinstance(value, list) else []
    return tuple((words + [default] * length)[:length])
