"""Events and decisions in words: one line each, sizes and times readable; used by `logs`, `status` and `demo`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from omlxd.core.events import EventName
from omlxd.core.units import format_bytes, format_duration

_ACTIONS: Final = {
    "unload": "unloaded",
    "cancel_load": "cancelled the load of",
    "abort_requests": "aborted the requests of",
    "abort_pinned": "aborted the requests of",
    "drop_cache": "dropped the buffer cache",
}
_SAID_OTHERWISE: Final = frozenset({"seq", "ts", "level", "event", "model", "decision"})
_SIZES: Final = ("_bytes",)
_LIMITS: Final = frozenset({"before_bytes", "max_memory_bytes", "soft_limit_bytes", "hard_limit_bytes"})
_LONGEST_TEXT: Final = 500


def event_line(record: Mapping[str, Any]) -> str:
    """`17:40:48 info    load_finished  small  weights=48.0 MiB load=350 ms`."""
    name = str(record.get("event", "?"))
    head = f"{clock(record.get('ts'))} {record.get('level', '?')!s:<7} {name:<16}"
    if name == EventName.DECISION.value:
        rest = decision_sentence(record)
    else:
        fields = {key: value for key, value in record.items() if key not in _SAID_OTHERWISE and value is not None}
        if name == EventName.LIMIT_CHANGED.value:
            none = {key: "no limit" for key, value in fields.items() if key in _LIMITS and value == 0}
            fields = {key.removesuffix("_bytes") if key in none else key: none.get(key, fields[key]) for key in fields}
        rest = " ".join([*filter(None, [one_line(record.get("model"))]), *_pairs(fields)])
    return f"{head} {rest}".rstrip()


def decision_sentence(record: Mapping[str, Any]) -> str:
    """What the enforcer did, why, and what it brought: `unloaded `small`: active memory 201 MiB is ... → 153 MiB`."""
    reason = one_line(record.get("reason")) or "no reason given"
    did = action_words(record)
    after_bytes = record.get("after_bytes")
    result = f" → {format_bytes(after_bytes)}" if isinstance(after_bytes, int) else ""
    return f"{did}: {reason}{result}" if did else f"nothing to do: {reason}{result}"


def action_words(record: Mapping[str, Any]) -> str | None:
    """`unloaded `small` (48.0 MiB)`, or None for a decision that found nothing to do."""
    action = record.get("action")
    if not action:
        return None
    words = _ACTIONS.get(str(action), str(action).replace("_", " "))
    model = record.get("victim") or record.get("model")
    if model:
        words += f" `{one_line(model)}`"
    freed_bytes = record.get("freed_bytes")
    return f"{words} ({format_bytes(freed_bytes)} freed)" if isinstance(freed_bytes, int) and freed_bytes > 0 else words


def clock(seconds: Any) -> str:
    """Local time of day of a Unix time stamp, to the millisecond; the width never changes."""
    if not isinstance(seconds, int | float):
        return "--:--:--.---"
    try:
        moment = time.localtime(seconds)
    except (OverflowError, ValueError, OSError):
        return "--:--:--.---"
    return f"{time.strftime('%H:%M:%S', moment)}.{int(seconds % 1 * 1000):03d}"


def one_line(value: Any) -> str:
    """A value on one line without control characters: a log may hold whatever a client sent as a name."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else str(value)
    if len(text) > _LONGEST_TEXT:
        text = text[: _LONGEST_TEXT - 1] + "…"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _pairs(fields: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in fields.items():
        if key == "error" and isinstance(value, Mapping) and value.get("message"):
            # The sentence has the numbers in words; hint and details are for `--json`.
            found.append(f"{prefix}{one_line(value['message'])} ({one_line(value.get('code', '?'))})")
        elif isinstance(value, Mapping):
            found += _pairs({k: v for k, v in value.items() if v is not None}, f"{prefix}{key}.")
        else:
            name, text = _readable(key, value)
            found.append(f"{prefix}{name}={text}")
    return found


def _readable(key: str, value: Any) -> tuple[str, str]:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and key.endswith(_SIZES):
        return key.removesuffix("_bytes"), format_bytes(int(value))
    if number and key.endswith("_s") and not key.endswith("_per_s"):
        return key.removesuffix("_s"), format_duration(float(value))
    if isinstance(value, float):
        return key, f"{value:.4g}"
    if isinstance(value, list | tuple):
        return key, ",".join(one_line(item) for item in value) or "-"
    text = one_line(value)
    return key, f'"{text}"' if " " in text else text
