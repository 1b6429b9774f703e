"""What stands in the cells of tables about models and requests: words, sizes and their colours, for Rich to lay out."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

from rich.text import Text

from omlxd.cli import output
from omlxd.cli.values import one_line
from omlxd.core.units import format_bytes, format_duration

NOTHING: Final = "-"
STATE_STYLES: Final = {
    "loaded": "green",
    "loading": "yellow",
    "unloading": "yellow",
    "failed": "red",
    "ready": "green",
}
LEVEL_STYLES: Final = {"ok": "green", "over": "yellow", "exhausted": "red"}


def word(text: str) -> Text:
    """A name or a path as it is: no markup, and nothing that moves the cursor."""
    return Text(plain(one_line(text)))


def plain(text: str) -> str:
    """The text as stdout can show it: without UTF-8 there are no ornaments, and `?` stands for foreign letters."""
    shown = output.ornamented(text, sys.stdout)
    return shown if output.is_utf8(sys.stdout) else shown.encode("ascii", "replace").decode()


def model_state(model: Mapping[str, Any]) -> Text:
    """`loaded`, `loading 42%`, or nothing where no daemon knows it."""
    state, progress = model["state"] or NOTHING, model["load_progress"]
    text = f"{state} {100 * progress:.0f}%" if state == "loading" and progress is not None else state
    return Text(text, style=STATE_STYLES.get(state, ""))


def weights(model: Mapping[str, Any]) -> str:
    """What its weights take in memory, or will take when they are there."""
    return size(model["weights_bytes"] if model["state"] not in ("unloaded", "failed") else None)


def load(model: Mapping[str, Any]) -> str:
    """Running requests, and `+` those that wait or are parked."""
    waiting = model["waiting"] + model["parked"]
    return f"{model['running']}+{waiting}" if waiting else str(model["running"] or NOTHING)


def speed(model: Mapping[str, Any]) -> str:
    """Tokens per second of all its requests together."""
    return f"{model['tokens_per_s']:.1f}" if model["tokens_per_s"] is not None else NOTHING


def flags(model: Mapping[str, Any]) -> str:
    """`pinned`, `removed` (from the manifest, and still finishing its requests), or nothing."""
    return "removed" if model.get("removed") else "pinned" if model["pinned"] else NOTHING


def request_state(request: Mapping[str, Any]) -> str:
    """Its state, and how often it was parked on the way there."""
    state, parks = str(request["state"]), request.get("parks", 0)
    if state == "parked":
        return f"{state} {parks}x" if parks > 1 else state
    return f"{state}, parked {parks}x" if parks else state


def prompt(request: Mapping[str, Any]) -> str:
    """Tokens of the prompt, and while it is being run how many of them have been."""
    tokens, prefilled = request["prompt_tokens"], request["prefilled_tokens"]
    return f"{prefilled}/{tokens}" if prefilled < tokens else str(tokens)


def size(size_bytes: int | None) -> str:
    """`48.0 MiB`, or nothing."""
    return format_bytes(size_bytes) if size_bytes is not None else NOTHING


def short_time(duration_s: float | None) -> str:
    """A duration in its largest unit, whole seconds at least: a column has no room for two, nor for the hurry."""
    return " ".join(format_duration(float(int(duration_s))).split()[:2]) if duration_s is not None else NOTHING
