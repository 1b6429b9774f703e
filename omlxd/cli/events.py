"""`omlxd events`: what happens, as it happens, across restarts of the daemon."""

from __future__ import annotations

import json as json_module
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer

from omlxd.cli import output
from omlxd.cli.client import Client
from omlxd.cli.invocation import client_of, home_of
from omlxd.cli.known_models import resolve_model
from omlxd.cli.log_filter import EventOption, Filter, LevelOption, ModelOption, make_filter
from omlxd.cli.options import Json
from omlxd.cli.sentences import write_event
from omlxd.core.errors import DaemonNotRunning, Unreachable
from omlxd.core.events import StreamMark

LINES: Final = 10
LONGEST_SILENCE_S: Final = 45.0  # three heartbeats
TRY_AGAIN_S: Final = 0.25

Record = Mapping[str, Any]


def events(
    context: typer.Context,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, metavar="N", help="Begin with the last N.")] = LINES,
    model: ModelOption = None,
    event: EventOption = None,
    level: LevelOption = None,
    json: Json = False,
) -> None:
    """Show what happens, until interrupted."""
    name = None if model is None else resolve_model(home_of(context), model)
    wanted = make_filter(model=name, events=event or (), level=level)
    for record in _Follower(client_of(context), wanted, lines).records():
        if json:
            sys.stdout.write(json_module.dumps(record, ensure_ascii=not output.is_utf8(sys.stdout)) + "\n")
        elif record.get("event") == StreamMark.GAP:
            _note_gap(record)
        else:
            write_event(record)
        sys.stdout.flush()


def _note_gap(record: Record) -> None:
    if record.get("missed"):
        output.note(f"missed {record['missed']} events: they came faster than they were read")


class _Follower:
    """Reads the daemon's stream, and goes on where it broke off when the daemon is there again.

    Args:
        client: of the daemon.
        wanted: which events are shown.
        first: how many of those that happened before are shown.
    """

    def __init__(self, client: Client, wanted: Filter, first: int) -> None:
        self._client, self._wanted = client, wanted
        self._seq = 0
        self._run: str | None = None
        self._before: deque[Record] = deque(maxlen=first)
        self._before_seq = 0  # up to here it had happened when the stream began

    def records(self) -> Iterator[Record]:
        """The wanted events, and a `gap` where some were lost; raises why the first connection fails."""
        away = False
        while True:
            try:
                for record in self._client.ndjson("GET", self._path(), timeout_s=LONGEST_SILENCE_S):
                    if away:
                        away = False
                        output.note("connected again")
                    yield from self._taken(record)
            except (DaemonNotRunning, Unreachable):
                if self._run is None:
                    raise
            if not away:
                away = True
                output.note("the daemon has gone; reconnecting")
            time.sleep(TRY_AGAIN_S)

    def _path(self) -> str:
        of_run = "" if self._run is None else f"&run={quote(self._run, safe='')}"
        return f"/v1/control/events?follow=true&since={self._seq}{of_run}"

    def _taken(self, record: Record) -> Iterator[Record]:
        seq = record.get("seq")
        if record.get("event") == StreamMark.HEARTBEAT:
            if self._run is None and isinstance(seq, int):
                self._before_seq = seq
            self._run = str(record.get("run"))
            return
        if isinstance(seq, int):
            self._seq = seq
        if record.get("event") == StreamMark.GAP:
            yield record
        elif self._seq > self._before_seq:
            yield from self._flushed()
            if self._wanted.matches(record):
                yield record
        elif self._wanted.matches(record):
            self._before.append(record)
        if self._seq == self._before_seq:
            yield from self._flushed()

    def _flushed(self) -> Iterator[Record]:
        """What had happened before, once; numbers that a later run uses again are new ones."""
        self._before_seq = 0
        while self._before:
            yield self._before.popleft()
