"""Tables of models and requests, and the status page, drawn with Rich; names are text, never markup."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from omlxd.cli import output
from omlxd.cli.sentences import decision_sentence
from omlxd.cli.values import clock, one_line
from omlxd.core.units import format_bytes, format_duration

if TYPE_CHECKING:
    from omlxd.core.plan import Verdict, Wish
    from omlxd.daemon.manifest_file import ModelReport

WIDTH_ON_A_PIPE: Final = 200  # nothing is cut off for whoever reads it
NOTHING: Final = "-"
WORTH_TELLING_BYTES: Final = 16 * 1024 * 1024  # less that belongs to nobody is what any process has
STALLED_S: Final = 5.0  # a step takes up to a second on a slow machine, an import three
_STATE_STYLES: Final = {
    "loaded": "green",
    "loading": "yellow",
    "unloading": "yellow",
    "failed": "red",
    "ready": "green",
}
_STATE_WORDS: Final = {"starting": "starting (loading pinned models)"}
_LEVEL_STYLES: Final = {"ok": "green", "over": "yellow", "exhausted": "red"}


def console() -> Console:
    """Stdout with the width the user has: COLUMNS, the terminal's, or a wide one on a pipe."""
    columns = os.environ.get("COLUMNS", "")
    dumb_or_pipe = not output.is_terminal(sys.stdout)
    width = int(columns) if columns.isdigit() and int(columns) > 0 else WIDTH_ON_A_PIPE if dumb_or_pipe else None
    return Console(
        width=width,
        height=25 if width is not None else None,  # Rich takes 80 columns on a dumb terminal unless both are given
        highlight=False,
        markup=False,
        emoji=False,
        color_system="auto" if output.is_colourful(sys.stdout) else None,
        no_color=not output.is_colourful(sys.stdout),
    )


def draw(*parts: RenderableType) -> None:
    """Write to stdout."""
    target = console()
    with target.capture() as drawn:
        for part in parts:
            target.print(part)
    lines = (line.rstrip() for line in drawn.get().splitlines())  # a table fills its last column with blanks
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def status_page(status: Mapping[str, Any], width: int) -> RenderableType:
    """Header, memory bar, models, requests in flight and the last decisions, for this width in columns."""
    parts: list[RenderableType] = [_header(status), memory_lines(status, width)]
    if status["enforcer"]["level"] != "ok" and status["enforcer"].get("reason"):
        parts.append(Text(f"        {status['enforcer']['reason']}", style=_LEVEL_STYLES[status["enforcer"]["level"]]))
    parts.append(Text())
    if status["models"]:
        parts.append(models_table(status["models"]))
        parts += _prefix_caches(status["models"])
        parts += [
            Text(one_line(f"{model['name']}: {model['error']}"), style="red")
            for model in status["models"]
            if model["error"]
        ]
    else:
        parts.append(Text(f"no models in {status['manifest']}"))
    if status["requests"]:
        parts += [Text(), requests_table(status["requests"])]
    decisions = [_decision(record) for record in status["recent_decisions"][-5:]]
    if decisions:
        parts += [Text(), Text("last decisions", style="bold"), *decisions]
    return Group(*parts)


def models_table(models: Iterable[Mapping[str, Any]]) -> Table:
    """The models as `status` shows them."""
    table = _table("~MODEL", "STATE", ">MEMORY", ">KV", ">REQ", ">TOK/S", ">LAST", ">UNTIL", "FLAGS")
    for model in models:
        table.add_row(
            _word(model["name"]),
            _state(model),
            _size(model["weights_bytes"] if model["state"] not in ("unloaded", "failed") else None),
            _size(model["kv_bytes"] or None),
            _load(model),
            f"{model['tokens_per_s']:.1f}" if model["tokens_per_s"] is not None else NOTHING,
            _short(model["last_used_s"]),
            _short(model["ttl_left_s"]),
            _flags(model),
        )
    return table


def _prefix_caches(models: Iterable[Mapping[str, Any]]) -> list[RenderableType]:
    """What each model keeps of ended requests for later ones; a line of its own, since the table has no room for it."""
    kept = [
        f"{one_line(model['name'])} {format_bytes(held_bytes)}"
        for model in models
        if (held_bytes := model.get("prefix_cache_bytes"))
    ]
    return [Text(f"prefix caches: {', '.join(kept)}")] if kept else []


def manifest_table(models: Iterable[Mapping[str, Any]]) -> Table:
    """The models as `models` shows them: what they are, not what they do."""
    table = _table("~MODEL", "STATE", ">WEIGHTS", ">CONTEXT", "FLAGS", "~ALIASES", "~PATH")
    for model in models:
        context = model["context_length"]
        table.add_row(
            _word(model["name"]),
            _state(model),
            _size(model["weights_bytes"]),
            str(context) if context else NOTHING,
            _flags(model),
            _word(", ".join(model["aliases"]) or NOTHING),
            _word(model["path"]),
        )
    return table


def check_table(reports: Iterable[tuple[ModelReport, bool]]) -> Table:
    """What `check` found out about each model's files; the flag is its `pin`."""
    table = _table("~MODEL", "VERDICT", ">WEIGHTS", "TYPE", ">CONTEXT", "FLAGS", "~PATH")
    for report, pinned in reports:
        table.add_row(
            _word(report.name),
            Text("problem", style="red") if report.problems else Text("ok", style="green"),
            _size(report.weights_bytes),
            _word(report.model_type or NOTHING),
            str(report.context_length) if report.context_length else NOTHING,
            "pinned" if pinned else NOTHING,
            _word(report.path or NOTHING),
        )
    return table


def plan_table(rows: Iterable[tuple[Wish, Verdict]], together: Verdict | None) -> Table:
    """What `plan` predicts for each model by itself, and for all of them at the same time."""
    table = _table(
        "~MODEL",
        "FITS",
        ">WEIGHTS",
        ">KV",
        ">GROWTH",
        ">TRANSIENT",
        ">CONTEXT",
        ">MOST",
        ">REQ",
        ">MOST",
        "BINDS",
        "~UNLOADS",
    )
    for wish, verdict in rows:
        table.add_row(
            _word(wish.name),
            *_plan_sizes(verdict),
            str(wish.context_tokens),
            str(verdict.max_context_tokens),
            str(wish.rows),
            str(verdict.max_concurrency),
            _word(verdict.binding),
            _word(", ".join(verdict.evict) or NOTHING),
        )
    if together is not None:
        blanks = [NOTHING] * 4
        evict = _word(", ".join(together.evict) or NOTHING)
        table.add_row(_word("together"), *_plan_sizes(together), *blanks, _word(together.binding), evict)
    return table


def _plan_sizes(verdict: Verdict) -> tuple[str | Text, ...]:
    need = verdict.need
    fits = Text("yes", style="green") if verdict.fits else Text("no", style="red")
    return fits, *map(_size, (need.weights_bytes, need.kv_bytes, need.growth_bytes, need.transient_bytes))


def requests_table(requests: Iterable[Mapping[str, Any]]) -> Table:
    """The requests in flight."""
    table = _table("REQUEST", "~MODEL", "STATE", ">PROMPT", ">GENERATED", ">AGE")
    for request in requests:
        prompt, prefilled = request["prompt_tokens"], request["prefilled_tokens"]
        table.add_row(
            _word(request["id"]),
            _word(request["model"]),
            _request_state(request),
            f"{prefilled}/{prompt}" if prefilled < prompt else str(prompt),
            str(request["generated_tokens"]),
            format_duration(request["age_s"]),
        )
    return table


def _header(status: Mapping[str, Any]) -> Text:
    state = status["state"]
    line = Text.assemble(
        (f"omlxd {status['version']} ", "bold"),
        (_STATE_WORDS.get(state, state), _STATE_STYLES.get(state, "yellow")),
    )
    details = [f"pid {status['pid']}", f"up {format_duration(status['uptime_s'])}"]
    details += [f"mlx {status['backend']}"] if status.get("backend") else []
    line.append(_plain("".join(f" · {detail}" for detail in details)))
    if (status.get("stalled_s") or 0) >= STALLED_S:
        line.append(_plain(f" · no progress for {format_duration(status['stalled_s'])}"), style="red")
    return line


def memory_lines(status: Mapping[str, Any], width: int) -> RenderableType:
    """The memory bar, the limits with what sets them, and where the API listens."""
    memory, enforcer = status["memory"], status["enforcer"]
    soft, hard, used = memory["soft_limit"], memory["hard_limit"], _compared(status)
    level = Text(enforcer["level"], style=_LEVEL_STYLES.get(enforcer["level"], "yellow"))
    decisions = "1 decision" if enforcer["decisions"] == 1 else f"{enforcer['decisions']} decisions"
    if soft:
        share = f" ({100 * used // soft} %)"
        words = f"{format_bytes(used)} of {format_bytes(soft)}{share}"
        limits = f"limit   {format_bytes(soft)} ({memory['binding']})"
        limits += f" · hard {format_bytes(hard)}" if hard else ""
    else:
        words, limits = f"{format_bytes(used)}", "limit   none"
    second = Text(_plain(f"{limits} · ")).append_text(level)
    long, short = _plain(f" · policy {enforcer['policy']}, {decisions}"), _plain(f" · {decisions}")
    second.append(long if len(second) + len(long) <= width else short)
    outside = memory["used"] - used
    extras = [f" · {format_bytes(outside)} more outside MLX"] if outside else []
    if memory.get("prefix_cache"):
        extras.append(f" · {format_bytes(memory['prefix_cache'])} of it prefix caches")
    extras.append(f" · peak {format_bytes(memory['peak'])}, cache {format_bytes(memory['cache'])}")
    first = Text("memory  ")
    bar = _bar(memory, used, max(10, min(60, width - len(first) - len(words) - 2)))
    first.append_text(bar).append(f" {words}")
    for extra in map(_plain, extras):
        if len(first) + len(extra) <= width:
            first.append(extra)
    api = [Text(f"api     http://{status['api']}")] if status.get("api") else []
    return Group(first, second, _owned(memory), *api)


def _owned(memory: Mapping[str, Any]) -> Text:
    """What the process uses, what models and requests have been promised, and what is used and belongs to nobody."""
    words = f"used    {format_bytes(memory['used'])} · committed {format_bytes(memory['committed'])}"
    unaccounted, soft = memory["unaccounted"], memory["soft_limit"]
    if unaccounted >= WORTH_TELLING_BYTES or unaccounted * 100 > soft > 0:
        words += f" · unaccounted {format_bytes(unaccounted)}"
    return Text(_plain(words))


def _compared(status: Mapping[str, Any]) -> int:
    """The bytes that the policy compares with the limits: `reference` takes live MLX arrays alone."""
    key = "active" if status["enforcer"]["policy"] == "reference" else "used"
    return int(status["memory"][key])


def _bar(memory: Mapping[str, Any], used: int, cells: int) -> Text:
    """Used, soft and hard on one scale; a far-away hard limit would hide the rest, so the scale ends before it."""
    soft, hard = memory["soft_limit"], memory["hard_limit"]
    scale = min(hard, soft * 3 // 2) if soft and hard else soft or memory["system_total"]
    scale = max(scale, used, 1)
    utf8 = output.is_utf8(sys.stdout)
    full, empty, mark = ("█", "░", "│") if utf8 else ("#", ".", "|")
    filled = min(cells, -(-used * cells // scale))
    soft_at = min(cells - 1, soft * cells // scale) if soft else -1
    style = "red" if soft and used > soft else "yellow" if soft and used * 10 > soft * 9 else "green"
    bar = Text()
    for cell in range(cells):
        if cell == soft_at:
            bar.append(mark, style="bold")
        elif cell < filled:
            bar.append(full, style=style)
        else:
            bar.append(empty, style="bright_black")
    return bar


def _decision(record: Mapping[str, Any]) -> Padding:
    when = clock(record["ts"]) if "ts" in record else record.get("decision", "")
    return Padding(Text(_plain(f"{when} {decision_sentence(record)}".lstrip())), (0, 0, 0, 2))


def _table(*columns: str) -> Table:
    """Plain columns, two spaces apart; `>` puts values to the right, `~` columns give way when it is narrow."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    overflow: Literal["ellipsis", "crop"] = "ellipsis" if output.is_utf8(sys.stdout) else "crop"
    for column in columns:
        gives_way = column.startswith("~")
        table.add_column(
            Text(column.lstrip(">~")),
            justify="right" if column.startswith(">") else "left",
            no_wrap=not gives_way,
            overflow=overflow,
            min_width=8 if gives_way else None,
        )
    return table


def _state(model: Mapping[str, Any]) -> Text:
    state, progress = model["state"], model["load_progress"]
    text = f"{state} {100 * progress:.0f}%" if state == "loading" and progress is not None else state
    return Text(text, style=_STATE_STYLES.get(state, ""))


def _load(model: Mapping[str, Any]) -> str:
    """Running requests, and `+` those that wait or are parked."""
    waiting = model["waiting"] + model["parked"]
    return f"{model['running']}+{waiting}" if waiting else str(model["running"] or NOTHING)


def _request_state(request: Mapping[str, Any]) -> str:
    """Its state, and how often it was parked on the way there."""
    state, parks = str(request["state"]), request.get("parks", 0)
    if state == "parked":
        return f"{state} {parks}x" if parks > 1 else state
    return f"{state}, parked {parks}x" if parks else state


def _flags(model: Mapping[str, Any]) -> str:
    return "removed" if model.get("removed") else "pinned" if model["pinned"] else NOTHING


def _size(size_bytes: int | None) -> str:
    return format_bytes(size_bytes) if size_bytes is not None else NOTHING


def _short(duration_s: float | None) -> str:
    """A duration in its largest unit, whole seconds at least: a column has no room for two, nor for the hurry."""
    return " ".join(format_duration(float(int(duration_s))).split()[:2]) if duration_s is not None else NOTHING


def _word(text: str) -> Text:
    """A name or a path as it is: no markup, and nothing that moves the cursor."""
    return Text(one_line(text))


def _plain(text: str) -> str:
    return output.ornamented(text, sys.stdout)
