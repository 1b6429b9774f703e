"""The status as one page of text: header, memory, models, requests in flight and the last decisions."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from omlxd.cli import cells, output
from omlxd.cli.cells import LEVEL_STYLES, STATE_STYLES, plain
from omlxd.cli.limit import set_by
from omlxd.cli.memory_bar import compared_bytes, memory_bar, memory_parts, used_style
from omlxd.cli.render import plain_table
from omlxd.cli.sentences import decision_sentence
from omlxd.cli.values import clock, one_line
from omlxd.core.units import format_bytes, format_duration

WORTH_TELLING_BYTES: Final = 16 * 1024 * 1024  # less that belongs to nobody is what any process has
WIDE_COLUMNS: Final = 90
STALLED_S: Final = 5.0  # a step takes up to a second on a slow machine, an import three
_STATE_WORDS: Final = {"starting": "starting (loading models)"}


def status_page(status: Mapping[str, Any], width: int) -> RenderableType:
    """All of it, for this width in columns."""
    parts: list[RenderableType] = [header(status), memory_lines(status, width)]
    if trouble := status.get("log_trouble"):
        parts.append(Text(plain(f"log     {one_line(trouble)}"), style="red"))
    if status["enforcer"]["level"] != "ok" and status["enforcer"].get("reason"):
        parts.append(Text(f"        {status['enforcer']['reason']}", style=LEVEL_STYLES[status["enforcer"]["level"]]))
    parts.append(Text())
    if status["models"]:
        parts.append(models_table(status["models"]))
        parts += _prefix_caches(status["models"])
        parts += _notes(status["models"])
    else:
        parts.append(Text(f"no models in {status['manifest']}"))
    if status["requests"]:
        parts += [Text(), requests_table(status["requests"])]
        waiting = [request for request in status["requests"] if request.get("waits_for")]
        parts += [_note(request["id"], request["waits_for"], "yellow") for request in waiting]
    decisions = [_decision(record) for record in status["recent_decisions"][-5:]]
    if decisions:
        parts += [Text(), Text("last decisions", style="bold"), *decisions]
    return Group(*parts)


def models_table(models: Iterable[Mapping[str, Any]]) -> Table:
    """The models as `status` shows them."""
    table = plain_table("~MODEL", "STATE", ">MEMORY", ">KV", ">REQ", ">TOK/S", ">LAST", ">UNTIL", "FLAGS")
    for model in models:
        table.add_row(
            cells.word(model["name"]),
            cells.model_state(model),
            cells.weights(model),
            cells.size(model["kv_bytes"] or None),
            cells.load(model),
            cells.speed(model),
            cells.short_time(model["last_used_s"]),
            cells.short_time(model["ttl_left_s"]),
            cells.flags(model),
        )
    return table


def requests_table(requests: Iterable[Mapping[str, Any]]) -> Table:
    """The requests in flight."""
    table = plain_table("REQUEST", "~MODEL", "STATE", ">PROMPT", ">GENERATED", ">AGE")
    for request in requests:
        table.add_row(
            cells.word(request["id"]),
            cells.word(request["model"]),
            cells.request_state(request),
            cells.prompt(request),
            str(request["generated_tokens"]),
            format_duration(request["age_s"]),
        )
    return table


def header(status: Mapping[str, Any]) -> Text:
    """What runs here, since when, and whether it gets on."""
    state = status["state"]
    line = Text.assemble(
        (f"omlxd {status['version']} ", "bold"),
        (_STATE_WORDS.get(state, state), STATE_STYLES.get(state, "yellow")),
    )
    details = [f"pid {status['pid']}", f"up {format_duration(status['uptime_s'])}"]
    details += [f"mlx {status['backend']}"] if status.get("backend") else []
    line.append(plain("".join(f" · {detail}" for detail in details)))
    if (status.get("stalled_s") or 0) >= STALLED_S:
        line.append(plain(f" · no progress for {format_duration(status['stalled_s'])}"), style="red")
    if status.get("log_trouble"):
        line.append(plain(" · the log is not whole"), style="red")
    return line


def memory_lines(status: Mapping[str, Any], width: int) -> RenderableType:
    """The memory bar, the limits with what sets them, and where the API listens."""
    memory = status["memory"]
    soft, used = memory["soft_limit"], compared_bytes(status)
    words = f"{format_bytes(used)} of {format_bytes(soft)} ({100 * used // soft} %)" if soft else format_bytes(used)
    outside = memory["used"] - used
    extras = [f" · {format_bytes(outside)} more outside MLX"] if outside else []
    if memory.get("prefix_cache"):
        extras.append(f" · {format_bytes(memory['prefix_cache'])} of it prefix caches")
    extras.append(f" · peak {format_bytes(memory['peak'])}, cache {format_bytes(memory['cache'])}")
    first = Text("memory  ")
    room = max(10, min(60, width - len(first) - len(words) - 2))
    bar = memory_bar(status, memory_parts(status), room, utf8=output.is_utf8(sys.stdout))
    first.append_text(bar).append(" ").append(words, style=used_style(status))
    for extra in map(plain, extras):
        if len(first) + len(extra) <= width:
            first.append(extra)
    api = [Text(f"api     http://{status['api']}")] if status.get("api") else []
    return Group(first, limit_line(status, width), _owned(memory), *api)


def limit_line(status: Mapping[str, Any], width: int) -> Text:
    """The limits, what sets them, and what the enforcer says."""
    memory, enforcer = status["memory"], status["enforcer"]
    soft, hard = memory["soft_limit"], memory["hard_limit"]
    limits = f"limit   {format_bytes(soft)} ({set_by(memory)})" if soft else "limit   none"
    if hard:
        told = width >= WIDE_COLUMNS or not soft  # what binds alone says what it comes from
        limits += f" · hard {format_bytes(hard)}" + (f" ({memory['hard_binding']})" if told else "")
    line = Text(plain(f"{limits} · "))
    line.append(enforcer["level"], style=LEVEL_STYLES.get(enforcer["level"], "yellow"))
    decisions = "1 decision" if enforcer["decisions"] == 1 else f"{enforcer['decisions']} decisions"
    long, short = plain(f" · policy {enforcer['policy']}, {decisions}"), plain(f" · {decisions}")
    return line.append(long if len(line) + len(long) <= width else short)


def _owned(memory: Mapping[str, Any]) -> Text:
    """What the process uses, what models and requests have been promised, and what is used and belongs to nobody."""
    words = f"used    {format_bytes(memory['used'])} · committed {format_bytes(memory['committed'])}"
    unaccounted, soft = memory["unaccounted"], memory["soft_limit"]
    if unaccounted >= WORTH_TELLING_BYTES or unaccounted * 100 > soft > 0:
        words += f" · unaccounted {format_bytes(unaccounted)}"
    return Text(plain(words))


def _prefix_caches(models: Iterable[Mapping[str, Any]]) -> list[RenderableType]:
    """What each model keeps of ended requests for later ones; a line of its own, since the table has no room for it."""
    kept = [
        f"{one_line(model['name'])} {format_bytes(held_bytes)}"
        for model in models
        if (held_bytes := model.get("prefix_cache_bytes"))
    ]
    return [Text(f"prefix caches: {', '.join(kept)}")] if kept else []


def _notes(models: Iterable[Mapping[str, Any]]) -> list[RenderableType]:
    """What a load waits for, or why a model is not there."""
    waits = [_note(model["name"], model["waits_for"], "yellow") for model in models if model.get("waits_for")]
    return [*waits, *(_note(model["name"], model["error"], "red") for model in models if model["error"])]


def _note(name: str, text: str, style: str) -> Text:
    return Text(plain(one_line(f"{name}: {text}")), style=style)


def _decision(record: Mapping[str, Any]) -> Padding:
    when = clock(record["ts"]) if "ts" in record else record.get("decision", "")
    return Padding(Text(plain(f"{when} {decision_sentence(record)}".lstrip())), (0, 0, 0, 2))
