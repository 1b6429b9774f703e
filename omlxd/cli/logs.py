"""`omlxd logs`: the structured log, readable, filtered, and followed across rotations."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Final

import typer

from omlxd.cli import output
from omlxd.cli.invocation import home_of
from omlxd.cli.known_models import resolve_model
from omlxd.cli.log_filter import EventOption, Filter, LevelOption, ModelOption, make_filter
from omlxd.cli.log_lines import Line, Log
from omlxd.cli.options import Json
from omlxd.cli.sentences import write_event
from omlxd.core.errors import InvalidRequest, OmlxError
from omlxd.daemon.files import require_regular
from omlxd.daemon.home import Home

LINES: Final = 50


def logs(
    context: typer.Context,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with what is written.")] = False,
    lines: Annotated[
        int | None,
        typer.Option("-n", "--lines", min=0, metavar="N", help="The last N lines; 50, or with `--since` all."),
    ] = None,
    model: ModelOption = None,
    request: Annotated[str | None, typer.Option("--request", metavar="ID", help="Only what concerns it.")] = None,
    decision: Annotated[
        str | None, typer.Option("--decision", metavar="ID", help="Only this decision and what it caused.")
    ] = None,
    event: EventOption = None,
    level: LevelOption = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="WHEN", help="From `10m` ago, `20:15` or `2026-11-29T20:15` on.")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", metavar="WHEN", help="Up to then.")] = None,
    json: Json = False,
) -> None:
    """Show the daemon's log."""
    if follow and until is not None:
        raise InvalidRequest("`--follow` goes on, and `--until` ends", hint="leave one of them out")
    home = home_of(context)
    wanted = make_filter(
        model=None if model is None else resolve_model(home, model),
        request=request,
        decision=decision,
        events=event or (),
        level=level,
        since=since,
        until=until,
    )
    count = lines if lines is not None else None if since is not None else LINES
    log = _log(home, must_exist=not follow)
    shown = 0
    try:
        for line in _chosen(log, wanted, count, follow=follow):
            show(line, as_it_is=json)
            shown += 1
    finally:
        if log.damaged:
            output.note(f"left out {log.damaged} damaged {'line' if log.damaged == 1 else 'lines'}")
    if not shown and count != 0:
        output.note(f"nothing in the log matches{_next_step(wanted)}" if wanted != Filter() else "the log is empty")


def show(line: Line, *, as_it_is: bool) -> None:
    """Write one event: its line of JSON, or a sentence in the colour of its severity."""
    if as_it_is:
        sys.stdout.write(line.raw.decode("utf-8", "replace") + "\n")
    else:
        write_event(line.record)
    sys.stdout.flush()


def _next_step(wanted: Filter) -> str:
    """The id that was probably meant, or where ids are shown; empty when none was asked for."""
    if wanted.request is not None and wanted.request.isdecimal():
        return f"; did you mean `--request r{wanted.request}`?"
    if wanted.decision is not None and wanted.decision.isdecimal():
        return f"; did you mean `--decision d{wanted.decision}`?"
    if wanted.request is not None:
        return "; `omlxd logs --event request_started` shows the last requests"
    return "" if wanted.decision is None else "; `omlxd why -n 10` shows the last decisions"


def _log(home: Home, *, must_exist: bool) -> Log:
    require_regular(home.log)
    if must_exist and not home.log.exists():
        raise OmlxError(f"there is no log at `{home.log}`", hint="`omlxd start` begins one")
    return Log(home.log)


def _chosen(log: Log, wanted: Filter, count: int | None, *, follow: bool) -> Iterator[Line]:
    def last(newest_first: Iterator[Line]) -> list[Line]:
        return list(islice(wanted.newest_run(newest_first), count))[::-1]

    if not follow:
        yield from last(log.newest_first(wanted.wanted, since=wanted.since))
        return
    for line in log.last_and_new(last):
        if wanted.matches(line.record):
            yield line
