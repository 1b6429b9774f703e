"""Events and decisions in words: one line each, sizes and times readable."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

from omlxd.cli import output
from omlxd.cli.event_sentences import SENTENCES
from omlxd.cli.values import clock, named, number, one_line, pairs, size
from omlxd.core.events import EventName

_ACTIONS: Final = {
    "unload": "unloaded",
    "cancel_load": "cancelled the load of",
    "abort_requests": "aborted the requests of",
    "abort_pinned": "aborted the requests of",
    "drop_cache": "dropped the buffer cache",
    "trim_prefix_caches": "trimmed the prefix caches",
    "park": "parked a request of",
    "cut_short": "cut short an answer of",
}
_SENTENCE_COLUMN: Final = 38


def event_line(record: Mapping[str, Any]) -> str:
    """`17:40:48.250 info    load_finished    loaded `small` (48.0 MiB) in 350 ms`."""
    level, name = one_line(record.get("level")) or "?", one_line(record.get("event")) or "?"
    return f"{clock(record.get('ts'))} {level:<7} {name:<16} {event_sentence(record)}".rstrip()


def write_event(record: Mapping[str, Any]) -> None:
    """Write its line to stdout: in the colour of its severity, and on a terminal broken between words."""
    line = output.wrapped(output.ornamented(event_line(record), sys.stdout), sys.stdout, hang=_SENTENCE_COLUMN)
    sys.stdout.write(output.painted_by_level(line, record.get("level"), sys.stdout) + "\n")


def event_sentence(record: Mapping[str, Any]) -> str:
    """What happened, without its time and name."""
    name = record.get("event")
    if name == EventName.DECISION:
        decision = one_line(record.get("decision"))
        return f"{decision}: {decision_sentence(record)}" if decision else decision_sentence(record)
    sentence = SENTENCES.get(name) if isinstance(name, str) else None
    if sentence is not None:
        return sentence(record)
    return " ".join(filter(None, [one_line(record.get("model")), pairs(record)]))


def decision_sentence(record: Mapping[str, Any]) -> str:
    """What was done, why, and what it brought: `unloaded `small`: active memory 201 MiB is ... → 153 MiB`."""
    reason = one_line(record.get("reason")) or "no reason given"
    did = action_words(record)
    after_bytes = number(record.get("after_bytes"))
    result = f" → {size(after_bytes)}" if after_bytes is not None else ""
    return f"{did}: {reason}{result}" if did else f"nothing to do: {reason}{result}"


def action_words(record: Mapping[str, Any]) -> str | None:
    """`unloaded `small` (48.0 MiB freed)`, or None for a decision that found nothing to do."""
    words = deed(record)
    freed_bytes = number(record.get("freed_bytes"))
    if words is None or freed_bytes is None or freed_bytes <= 0:
        return words
    return f"{words} ({size(freed_bytes)} freed)"


def deed(record: Mapping[str, Any]) -> str | None:
    """`unloaded `small``; None for a decision that found nothing to do."""
    action = one_line(record.get("action"))
    if not action:
        return None
    words = _ACTIONS.get(action, action.replace("_", " "))
    model = record.get("victim") or record.get("model")
    requests = record.get("requests")
    if action == "park" and isinstance(requests, list) and len(requests) == 1:
        words = f"parked {one_line(requests[0])} of"
    return f"{words} {named(model)}" if model else words
