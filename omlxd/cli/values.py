"""Values of a log's line as readable text; the line may hold anything, so nothing here ever fails."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Final

from omlxd.core.units import format_bytes, format_duration

UNKNOWN: Final = "?"
_LONGEST_TEXT: Final = 500
_LARGEST: Final = 2.0**62
_SAID_OTHERWISE: Final = frozenset({"seq", "ts", "level", "event", "model", "decision"})


def one_line(value: Any) -> str:
    """A value on one line without control characters: a log may hold whatever a client sent as a name."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else _written(value)
    if len(text) > _LONGEST_TEXT:
        text = text[: _LONGEST_TEXT - 1] + "…"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def named(value: Any) -> str:
    """A name or a path in backticks."""
    return f"`{one_line(value) or UNKNOWN}`"


def number(value: Any) -> float | None:
    """A finite number that can be reckoned with, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if -_LARGEST < value < _LARGEST else None


def size(value: Any) -> str:
    """`4.82 MiB` of a number of bytes."""
    found = number(value)
    return UNKNOWN if found is None else format_bytes(int(found))


def duration(value: Any) -> str:
    """`350 ms` of a number of seconds."""
    found = number(value)
    return UNKNOWN if found is None else format_duration(float(found))


def bytes_of(record: Mapping[str, Any], key: str, *, zero: str = "0 B") -> str:
    """The size under this key; `zero` stands for none."""
    return zero if record.get(key) == 0 else size(record.get(key))


def seconds_of(record: Mapping[str, Any], key: str) -> str:
    """The duration under this key."""
    return duration(record.get(key))


def amount(value: Any, unit: str) -> str:
    """`1 token`, `24 tokens`."""
    found = number(value)
    if found is None:
        return f"{UNKNOWN} {unit}s"
    return f"1 {unit}" if found == 1 else f"{int(found)} {unit}s"


def clock(seconds: Any) -> str:
    """Local time of day of a Unix time stamp, to the millisecond; the width never changes."""
    moment = _local(seconds)
    if moment is None:
        return "--:--:--.---"
    return f"{time.strftime('%H:%M:%S', moment)}.{int(seconds % 1 * 1000):03d}"


def moment(seconds: Any, now: float) -> str:
    """When that was: `20:46:18`, with the date when it was not today."""
    found, today = _local(seconds), _local(now)
    if found is None:
        return UNKNOWN
    same_day = today is not None and found[:3] == today[:3]
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M:%S", found)


def ago(seconds: Any, now: float) -> str:
    """`3 min ago`, in one unit."""
    found = number(seconds)
    if found is None or now - found < 0.5:
        return "just now"
    return f"{' '.join(format_duration(float(round(now - found))).split()[:2])} ago"


def pairs(fields: Mapping[str, Any]) -> str:
    """`key=value` of what is not said otherwise, sizes and times readable."""
    left = {key: value for key, value in fields.items() if key not in _SAID_OTHERWISE and value is not None}
    return " ".join(_pairs(left))


def _pairs(fields: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in fields.items():
        if key == "error" and isinstance(value, Mapping) and value.get("message"):
            # The sentence has the numbers in words; hint and details are for `--json`.
            found.append(f"{prefix}{one_line(value['message'])} ({one_line(value.get('code', UNKNOWN))})")
        elif isinstance(value, Mapping) and prefix.count(".") < 3:
            found += _pairs({k: v for k, v in value.items() if v is not None}, f"{prefix}{one_line(key)}.")
        else:
            found.append("=".join(_readable(f"{prefix}{one_line(key)}", value)))
    return found


def _readable(key: str, value: Any) -> tuple[str, str]:
    if number(value) is not None and key.endswith("_bytes"):
        return key.removesuffix("_bytes"), size(value)
    if number(value) is not None and key.endswith("_s") and not key.endswith("_per_s"):
        return key.removesuffix("_s"), duration(value)
    if isinstance(value, float):
        return key, f"{value:.4g}"
    if isinstance(value, list | tuple):
        return key, ",".join(one_line(item) for item in value) or "-"
    text = one_line(value)
    return key, f'"{text}"' if " " in text else text


def _written(value: Any) -> str:
    try:
        return str(value)
    except (ValueError, RecursionError):  # a number of more digits than Python writes
        return UNKNOWN


def _local(seconds: Any) -> time.struct_time | None:
    found = number(seconds)
    try:
        return None if found is None else time.localtime(found)
    except (OverflowError, ValueError, OSError):
        return None
