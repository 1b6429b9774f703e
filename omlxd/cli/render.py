"""Drawing to stdout with Rich, and the tables of the manifest; names are text, never markup."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from omlxd.cli import cells, output
from omlxd.cli.cells import NOTHING

if TYPE_CHECKING:
    from omlxd.core.plan import Verdict, Wish
    from omlxd.daemon.model_check import ModelReport

WIDTH_ON_A_PIPE: Final = 200  # nothing is cut off for whoever reads it


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


def screen_console() -> Console:
    """Stdout as a full screen; without colours it still has bold and reversed text."""
    no_color = not output.is_colourful(sys.stdout)
    return Console(highlight=False, markup=False, emoji=False, force_terminal=True, no_color=no_color)


def draw(*parts: RenderableType) -> None:
    """Write to stdout."""
    target = console()
    with target.capture() as drawn:
        for part in parts:
            target.print(part)
    lines = (line.rstrip() for line in drawn.get().splitlines())  # a table fills its last column with blanks
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def manifest_table(models: Iterable[Mapping[str, Any]]) -> Table:
    """The models as `models` shows them: what they are, not what they do."""
    table = plain_table("~MODEL", "STATE", ">WEIGHTS", ">CONTEXT", "FLAGS", "~ALIASES", "~PATH")
    for model in models:
        context = model["context_length"]
        table.add_row(
            cells.word(model["name"]),
            cells.model_state(model),
            cells.size(model["weights_bytes"]),
            str(context) if context else NOTHING,
            cells.flags(model),
            cells.word(", ".join(model["aliases"]) or NOTHING),
            cells.word(model["path"]),
        )
    return table


def check_table(reports: Iterable[tuple[ModelReport, bool]]) -> Table:
    """What `check` found out about each model's files; the flag is its `pin`."""
    table = plain_table("~MODEL", "VERDICT", ">WEIGHTS", "TYPE", ">CONTEXT", "FLAGS", "~PATH")
    for report, pinned in reports:
        table.add_row(
            cells.word(report.name),
            Text("problem", style="red") if report.problems else Text("ok", style="green"),
            cells.size(report.weights_bytes),
            cells.word(report.model_type or NOTHING),
            str(report.context_length) if report.context_length else NOTHING,
            "pinned" if pinned else NOTHING,
            cells.word(report.path or NOTHING),
        )
    return table


def plan_table(rows: Iterable[tuple[Wish, Verdict]], together: Verdict | None, *, narrow: bool = False) -> Table:
    """What `plan` predicts for each model by itself, and for all of them at the same time; `narrow` without details."""
    sizes = (">STAYS", ">PEAK") if narrow else (">WEIGHTS", ">KV", ">GROWTH", ">TRANSIENT")
    unloads = () if narrow else ("~UNLOADS",)
    table = plain_table("~MODEL", "FITS", *sizes, ">CONTEXT", ">MAX CTX", ">REQ", ">MAX REQ", "BINDS", *unloads)

    def add(name: str, verdict: Verdict, *asked_and_most: str) -> None:
        evict = () if narrow else (cells.word(", ".join(verdict.evict) or NOTHING),)
        binding = cells.word(verdict.set_by)
        table.add_row(cells.word(name), *_plan_sizes(verdict, narrow), *asked_and_most, binding, *evict)

    for wish, verdict in rows:
        context = str(wish.context_tokens), str(verdict.max_context_tokens)
        add(wish.name, verdict, *context, str(wish.rows), str(verdict.max_concurrency))
    if together is not None:
        add("together", together, *[NOTHING] * 4)
    return table


def has_room_for(table: Table) -> bool:
    """Whether the user's terminal has the columns for all of the table, nothing shortened."""
    target = console()
    unbounded = target.options.update(max_width=WIDTH_ON_A_PIPE * 2)
    return Measurement.get(target, unbounded, table).maximum <= target.width


def _plan_sizes(verdict: Verdict, narrow: bool) -> tuple[str | Text, ...]:
    need = verdict.need
    fits = Text("yes", style="green") if verdict.fits else Text("no", style="red")
    if narrow:
        return fits, cells.size(need.stays_bytes), cells.size(need.peak_bytes)
    return fits, *map(cells.size, (need.weights_bytes, need.kv_bytes, need.growth_bytes, need.transient_bytes))


def plain_table(*columns: str) -> Table:
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
