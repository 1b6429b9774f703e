"""The screen drawn: its state as a page of so many columns and rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

from rich.console import RenderableType
from rich.layout import Layout
from rich.text import Text

from omlxd.cli import cells, output
from omlxd.cli.cells import LEVEL_STYLES, plain
from omlxd.cli.memory_bar import (
    compared_bytes,
    legend,
    memory_bar,
    memory_parts,
    progress_bar,
    sparkline,
    used_style,
)
from omlxd.cli.screen.feed import Status
from omlxd.cli.screen.history import KEPT_S
from omlxd.cli.screen.rows import Column, Note, Rows, shortened
from omlxd.cli.screen.state import ScreenState
from omlxd.cli.sentences import decision_sentence
from omlxd.cli.status_page import header, limit_line
from omlxd.cli.values import clock, one_line
from omlxd.cli.word_wrap import broken
from omlxd.core.units import format_bytes, format_duration, format_left

KEYS: Final = "q quit · {} select · p pin · l load · u unload · a abort"
LEAST_LINES: Final = 3  # a heading, a row, and how many there are more
SPACIOUS_ROWS: Final = 20  # from here on parts are set apart by blank lines
_ONE_DECISION: Final = 2  # with its heading
_LABEL: Final = 8
_NARROWEST: Final = 20
_MODEL_COLUMNS: Final = (
    Column("MODEL", gives_way=True),
    Column("STATE"),
    Column("MEMORY", 36, right=True),
    Column("KV", 66, right=True),
    Column("PREFIX", 120, right=True),
    Column("REQ", 56, right=True),
    Column("TOK/S", 66, right=True),
    Column("LAST", 84, right=True),
    Column("UNTIL", 100, right=True),
    Column("FLAGS", 46),
)
_REQUEST_COLUMNS: Final = (
    Column("REQUEST"),
    Column("MODEL", gives_way=True),
    Column("STATE"),
    Column("PROMPT", 60),
    Column("GENERATED", 70, right=True),
    Column("AGE", 46, right=True),
)

Region = tuple[RenderableType, int]


def page(state: ScreenState, columns: int, rows: int) -> RenderableType:
    """The page that fills such a terminal exactly."""
    regions: list[Region] = [(_header(state, columns), 1)]
    status = state.status
    if status is not None:
        apart = [(_blank(), 1)] if rows >= SPACIOUS_ROWS else []
        regions += _memory(state, status, columns, rows)
        blocks = [_models(state, status, columns), _requests(state, columns), _decisions(status, columns)]
        room = rows - 1 - sum(height for _, height in regions) - len(apart) * sum(block is not None for block in blocks)
        for block, height in zip(blocks, _heights(blocks, room), strict=True):
            if block is not None and height:
                regions += [*apart, (block, height)]
    left = rows - 1 - sum(height for _, height in regions)
    regions += [(_blank(), left)] if left > 0 else []
    layout = Layout()
    whole = [Layout(renderable, size=height) for renderable, height in regions]
    layout.split_column(*whole[: rows - 1], Layout(_footer(state), size=1))
    return layout


def _heights(blocks: Sequence[Rows | _Lines | None], room: int) -> list[int]:
    """Lines for models, requests and decisions: of what was decided the newest, and more where lines are left.

    Where all have their place with a line each, what is longer than that is told to its end, first ones first.
    """
    wanted = [0 if block is None else block.least_height for block in blocks]
    *first, decisions = wanted
    heights = shared_out([*first, min(decisions, _ONE_DECISION)], room)
    if heights[-1]:
        heights[-1] = min(decisions, heights[-1] + room - sum(heights))
    if heights == wanted:
        for at, block in enumerate(blocks):
            if block is not None:
                heights[at] = min(block.height, heights[at] + room - sum(heights))
    return heights


def shared_out(wanted: Sequence[int], room: int) -> list[int]:
    """Lines for each block: all it wants if there is room; else what others leave of equal shares, first ones first.

    A block of less than `LEAST_LINES` says nothing, so it is left out, last ones first.
    """
    given = [0] * len(wanted)
    order = [at for at, lines in enumerate(wanted) if lines]
    while order and room < sum(min(wanted[at], LEAST_LINES) for at in order):
        order.pop()
    for at in order:
        given[at] = min(wanted[at], LEAST_LINES)
    room -= sum(given)
    for place, at in enumerate(sorted(order, key=lambda at: (wanted[at], at))):
        more = min(wanted[at] - given[at], room // (len(order) - place))
        given[at] += more
        room -= more
    return given


def _header(state: ScreenState, columns: int) -> Text:
    if state.status is None or state.trouble:
        line = Text("omlxd ", style="bold")
        line.append(plain("reconnecting… "), style="yellow")
        return _cut(line.append(_words(f"{state.trouble} ({format_duration(float(int(state.away_s)))})")))
    line, api = header(state.status), state.status.get("api")
    address = plain(f" · http://{one_line(api)}") if api else ""
    return _cut(line.append(address if line.cell_len + len(address) <= columns else ""))


def _memory(state: ScreenState, status: Status, columns: int, rows: int) -> list[Region]:
    """What memory there is, how much of it is in use and for what, and how that came about."""
    utf8, memory, used = output.is_utf8(sys.stdout), status["memory"], compared_bytes(status)
    parts, soft = memory_parts(status), status["memory"]["soft_limit"]
    share = f" ({100 * used // soft} %)" if soft else ""
    words = f"{format_bytes(used)} of {format_bytes(soft)}{share}" if soft else format_bytes(used)
    label = _LABEL if columns >= 60 else 0
    bar = Text(_labelled("memory", label))
    bar.append_text(memory_bar(status, parts, max(8, columns - label - len(words) - 1), utf8=utf8))
    regions: list[Region] = [(_cut(bar.append(" ").append(words, style=used_style(status))), 1)]
    if rows >= 14:
        legends = Text("  ").join(legend(parts, utf8=utf8))
        regions.append((_cut(Text(" " * label).append_text(legends)), 1))
        peak = f" peak {format_bytes(memory['peak'])}"
        line = Text(_labelled(format_duration(KEPT_S), label))
        figures = state.history.columns(state.clock(), max(8, columns - label - len(peak)))
        regions.append((_cut(line.append_text(sparkline(figures, soft, utf8=utf8)).append(peak)), 1))
    regions.append((_cut(limit_line(status, columns)), 1))
    level = status["enforcer"]["level"]
    if level != "ok" and (reason := status["enforcer"].get("reason")):
        lines = _broken(_labelled("", label), reason, columns)
        style = LEVEL_STYLES.get(level, "yellow")
        regions += [(_cut(Text(line, style=style)), 1) for line in shortened(lines, 2 if rows >= SPACIOUS_ROWS else 1)]
    return regions


def _models(state: ScreenState, status: Status, columns: int) -> Rows | _Lines:
    models = state.models
    if not models:
        return _Lines(Text(_words(f"no models in {status['manifest']}")))
    names = [model["name"] for model in models]
    row = state.selected
    selected = names.index(row.name) if row is not None and row.kind == "model" and row.name in names else None
    notes = [_model_note(model, columns) for model in models]
    return Rows(_MODEL_COLUMNS, map(_model_cells, models), notes, selected)


def _model_cells(model: dict[str, Any]) -> list[str | Text]:
    return [
        cells.word(model["name"]),
        cells.model_state(model),
        cells.weights(model),
        cells.size(model["kv_bytes"] or None),
        cells.size(model["prefix_cache_bytes"] or None),
        cells.load(model),
        cells.speed(model),
        cells.short_time(model["last_used_s"]),
        cells.short_time(model["ttl_left_s"]),
        cells.flags(model),
    ]


def _model_note(model: dict[str, Any], columns: int) -> Note | None:
    """How far a load is, what it waits for, or why it failed."""
    if model["state"] == "loading" and model["load_progress"] is not None:
        bar = progress_bar(model["load_progress"], 20, utf8=output.is_utf8(sys.stdout))
        return _note(f"{bar} {load_words(model)}", "yellow", columns)
    if model.get("waits_for"):
        return _note(model["waits_for"], "yellow", columns)
    return _note(model["error"], "red", columns) if model["error"] else None


def load_words(model: dict[str, Any]) -> str:
    """`512 MiB of 1.20 GiB, 3 s left`."""
    total = model["weights_bytes"] or 0
    words = f"{format_bytes(int(total * model['load_progress']))} of {format_bytes(total)}"
    left_s = model.get("load_left_s")
    return words if left_s is None else f"{words}, {format_left(left_s)}"


def _requests(state: ScreenState, columns: int) -> Rows | None:
    requests = state.requests
    if not requests:
        return None
    ids = [request["id"] for request in requests]
    row = state.selected
    selected = ids.index(row.name) if row is not None and row.kind == "request" and row.name in ids else None
    waits = [request.get("waits_for") for request in requests]
    notes = [_note(words, "yellow", columns) if words else None for words in waits]
    return Rows(_REQUEST_COLUMNS, map(_request_cells, requests), notes, selected)


def _request_cells(request: dict[str, Any]) -> list[str | Text]:
    tokens, prefilled = request["prompt_tokens"], request["prefilled_tokens"]
    prompt = cells.prompt(request)
    if request["state"] == "prefill" and tokens:
        prompt = f"{progress_bar(prefilled / tokens, 10, utf8=output.is_utf8(sys.stdout))} {prompt}"
    return [
        cells.word(request["id"]),
        cells.word(request["model"]),
        cells.request_state(request),
        prompt,
        str(request["generated_tokens"]),
        format_duration(request["age_s"]),
    ]


class _Lines:
    """Texts of a line each, below a heading; where there is no room for all, the last ones are shown.

    Where there is more room than for one line of each, the last ones get as many as they are broken into.

    Args:
        heading: the first line.
        texts: each in its lines.
    """

    def __init__(self, heading: Text, texts: Sequence[Sequence[str]] = ()) -> None:
        self._heading, self._texts = heading, texts

    @property
    def height(self) -> int:
        return 1 + sum(map(len, self._texts))

    @property
    def least_height(self) -> int:
        return 1 + len(self._texts)

    def __rich_console__(self, console: Any, options: Any) -> Any:
        room = (options.height or self.height) - 1
        texts = self._texts[-room:] if room > 0 else ()
        spare, shown = room - len(texts), list[list[str]]()
        for text in reversed(texts):
            lines = shortened(text, 1 + spare)
            spare -= len(lines) - 1
            shown.insert(0, lines)
        for line in (self._heading, *(_cut(Text(line)) for lines in shown for line in lines)):
            yield _ended_with_dots(line, options.max_width)


def _decisions(status: Status, columns: int) -> _Lines | None:
    decisions = status["recent_decisions"][-8:]
    if not decisions:
        return None
    return _Lines(Text("last decisions", style="bold"), [_decision(record, columns) for record in decisions])


def _decision(record: dict[str, Any], columns: int) -> list[str]:
    when = clock(record["ts"])[:8] if "ts" in record else one_line(record.get("decision"))
    return _broken(f"  {when} ", decision_sentence(record), columns)


def _footer(state: ScreenState) -> Text:
    if state.question is not None:
        text = Text(_words(state.question.question), style="bold yellow")
        return _cut(text.append(" y = yes, any other key = no", style="not bold"))
    if message := state.message_now:
        return _cut(Text(plain(message)))
    arrows = "↑↓" if output.is_utf8(sys.stdout) else "arrows"
    return _cut(Text(plain(KEYS.format(arrows)), style="dim"))


def _note(text: str, style: str, columns: int) -> Note:
    return Note(_broken("    └ ", text, columns), style)


def _broken(head: str, text: str, columns: int) -> list[str]:
    """The text below its head, in as many lines as it takes."""
    head = plain(head)
    lines = broken(output.glued(_words(text)), max(_NARROWEST, columns - len(head)))
    return [(" " * len(head) if at else head) + output.unglued(line) for at, line in enumerate(lines)]


def _words(text: str) -> str:
    return plain(one_line(text))


def _blank() -> Text:
    return Text(" ")  # an empty one counts as nothing to draw


def _labelled(label: str, width: int) -> str:
    return f"{label:<{width}}" if width else ""


def _ended_with_dots(line: Text, width: int) -> Text:
    """The line, for a terminal without `…` cut here, so that it is seen to go on."""
    if output.is_utf8(sys.stdout) or line.cell_len <= width or width <= 3:
        return line
    line = line.copy()
    line.truncate(width - 3)
    return line.append("...")


def _cut(text: Text) -> Text:
    """One line, whatever the width is."""
    text.no_wrap, text.overflow = True, "ellipsis" if output.is_utf8(sys.stdout) else "crop"
    return text
