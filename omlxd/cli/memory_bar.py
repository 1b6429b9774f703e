"""The memory bar and its history: what holds how much of the memory, on one scale with the limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from rich.text import Text

from omlxd.core.units import format_bytes

NEXT_TO_NOTHING: Final = 500  # parts of what is held
MARK_STYLE: Final = "bold"
EMPTY_STYLE: Final = "bright_black"


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the memory in use, in bytes, with its glyph in UTF-8 and in ASCII."""

    name: str
    size_bytes: int
    glyph: str
    ascii_glyph: str
    style: str

    def mark(self, *, utf8: bool) -> str:
        """Its glyph."""
        return self.glyph if utf8 else self.ascii_glyph


def compared_bytes(status: Mapping[str, Any]) -> int:
    """The bytes that the policy compares with the limits: `reference` takes live MLX arrays alone."""
    key = "active" if status["enforcer"]["policy"] == "reference" else "used"
    return int(status["memory"][key])


def memory_parts(status: Mapping[str, Any]) -> tuple[Part, ...]:
    """What is in use, by what it is for; together they are what the policy compares, and MLX's cache beside it.

    Weights of a model that is being loaded count as far as they have come. What no model and no promise explains is
    `unaccounted`; what is left then passes with the step that runs (activations, or gauges read a moment apart).
    """
    models, memory = status["models"], status["memory"]
    used = compared_bytes(status)
    weights = sum(_weights_in_memory(model) for model in models)
    kv = sum(model["kv_bytes"] for model in models)
    prefix, unaccounted = memory.get("prefix_cache", 0), memory["unaccounted"]
    sizes, left = [], used
    for size_bytes in (weights, kv, prefix, unaccounted):
        sizes.append(min(size_bytes, left))
        left -= sizes[-1]
    return (
        Part("weights", sizes[0], "█", "#", "green"),
        Part("KV", sizes[1], "▓", "=", "cyan"),
        Part("prefix caches", sizes[2], "▒", "+", "magenta"),
        Part("unaccounted", sizes[3], "▚", "?", "red"),
        Part("step", left, "▞", "*", "yellow"),
        Part("cache", memory["cache"], "░", "~", "bright_black"),
    )


def used_style(status: Mapping[str, Any]) -> str:
    """The colour of what is used: red above the soft limit, yellow near it."""
    used, soft = compared_bytes(status), status["memory"]["soft_limit"]
    return "red" if soft and used > soft else "yellow" if soft and used * 10 > soft * 9 else "green"


def memory_bar(status: Mapping[str, Any], parts: Iterable[Part], cells: int, *, utf8: bool) -> Text:
    """The parts, the soft limit and the hard one on one scale of so many cells.

    A hard limit far above the soft one would hide the rest, so the scale ends before it then.
    """
    memory, parts = status["memory"], tuple(parts)
    soft, hard = memory["soft_limit"], memory["hard_limit"]
    held = sum(part.size_bytes for part in parts)
    scale = min(hard, soft * 3 // 2) if soft and hard else soft or memory["system_total"]
    scale = max(scale, held, 1)
    ends = [(min(cells, -(-end * cells // scale)), part) for part, end in zip(parts, _sums(parts), strict=True)]
    soft_at = min(cells - 1, soft * cells // scale) if soft else -1
    hard_at = min(cells - 1, hard * cells // scale) if hard and hard <= scale and hard > soft else -1
    soft_mark, hard_mark, free = ("│", "┃", "·") if utf8 else ("|", "!", ".")
    drawn: list[tuple[str, str]] = []
    for cell in range(cells):
        part = next((part for end, part in ends if cell < end), None)
        if cell in (soft_at, hard_at):
            drawn.append((soft_mark if cell == soft_at else hard_mark, MARK_STYLE))
        else:
            drawn.append((free, EMPTY_STYLE) if part is None else (part.mark(utf8=utf8), part.style))
    return _joined(drawn)


def legend(parts: Iterable[Part], *, utf8: bool) -> list[Text]:
    """What the glyphs mean, with sizes; what is next to nothing is left out, but for the weights."""
    parts = tuple(parts)
    least = max(1, sum(part.size_bytes for part in parts) // NEXT_TO_NOTHING)
    return [
        Text.assemble((part.mark(utf8=utf8), part.style), f" {part.name} {format_bytes(part.size_bytes)}")
        for part in parts
        if part.size_bytes >= least or part.name == "weights"
    ]


def progress_bar(done: float, cells: int, *, utf8: bool) -> str:
    """A bar of so many cells for a part done, 0 to 1."""
    full, empty = ("█", "░") if utf8 else ("#", ".")
    filled = min(cells, max(0, int(done * cells)))
    return full * filled + empty * (cells - filled)


def sparkline(columns: Sequence[int | None], soft_bytes: int, *, utf8: bool) -> Text:
    """One cell for each figure in bytes, None for what nobody saw; the scale ends at the soft limit or the highest."""
    glyphs = "▁▂▃▄▅▆▇█" if utf8 else "_.-:=+*#"
    top = max(soft_bytes, max((figure for figure in columns if figure is not None), default=0), 1)
    drawn: list[tuple[str, str]] = []
    for figure in columns:
        if figure is None:
            drawn.append((" ", ""))
            continue
        glyph = glyphs[min(len(glyphs) - 1, figure * len(glyphs) // top)]
        over, near = soft_bytes and figure > soft_bytes, soft_bytes and figure * 10 > soft_bytes * 9
        drawn.append((glyph, "red" if over else "yellow" if near else "green"))
    return _joined(drawn)


def _joined(cells: Iterable[tuple[str, str]]) -> Text:
    """Glyphs with their styles as a text; equal neighbours become one piece."""
    pieces = groupby(cells, key=lambda cell: cell[1])
    return Text.assemble(*(("".join(glyph for glyph, _ in piece), style) for style, piece in pieces))


def _weights_in_memory(model: Mapping[str, Any]) -> int:
    if model["state"] in ("unloaded", "failed"):
        return 0
    weights_bytes = model["weights_bytes"] or 0
    return int(weights_bytes * (model["load_progress"] or 0)) if model["state"] == "loading" else weights_bytes


def _sums(parts: Sequence[Part]) -> list[int]:
    ends, end = [], 0
    for part in parts:
        end += part.size_bytes
        ends.append(end)
    return ends
