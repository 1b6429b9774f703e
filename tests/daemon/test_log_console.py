"""The log beside its file: on a terminal or a pipe that nobody reads, and in systemd's journal."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from omlxd.core.events import Event, EventLevel, EventName
from omlxd.daemon.journal import JOURNAL_VARIABLE, journal_of, with_priority
from omlxd.daemon.log import EventLog
from omlxd.daemon.log_console import WAITING_LINES, Console
from tests.acceptance.harness import Daemon

EVENT = Event(EventName.LIMIT_WARNING, EventLevel.WARNING, fields={"message": "é\nx"}, seq=3, ts=1.5)


def journal_name(path: Path) -> str:
    """What systemd would put into the variable if this were the journal."""
    found = path.stat()
    return f"{found.st_dev}:{found.st_ino}"


def test_in_the_journal_a_line_is_a_priority_and_json_without_what_the_journal_has_itself() -> None:
    stream = io.StringIO()
    console = Console(stream, journal=True)
    console.show(EVENT.to_json())
    console.close()
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("<4>{")
    assert json.loads(line[3:]) == {"seq": 3, "event": "limit_warning", "message": "é\nx"}


@pytest.mark.parametrize(
    ("level", "priority"),
    [(EventLevel.DEBUG, 7), (EventLevel.INFO, 6), (EventLevel.WARNING, 4), (EventLevel.ERROR, 3)],
)
def test_each_level_has_syslogs_number_on_every_line(level: EventLevel, priority: int) -> None:
    assert with_priority(level, "one\ntwo") == f"<{priority}>one\n<{priority}>two"


def test_the_journal_is_known_by_its_file_and_not_by_the_variable_alone(tmp_path: Path) -> None:
    journal, other = tmp_path / "journal", tmp_path / "other"
    with journal.open("w") as out, other.open("w") as err:
        named = {JOURNAL_VARIABLE: journal_name(journal)}
        assert journal_of(named, [out, err]) is out
        assert journal_of(named, [err, out]) is out
        assert journal_of(named, [err]) is None
        assert journal_of({}, [out]) is None
        assert journal_of({JOURNAL_VARIABLE: "nonsense"}, [out]) is None
    assert journal_of(named, [out, io.StringIO()]) is None


def test_a_reader_that_stops_reading_holds_nothing_up_and_is_told_what_it_missed(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    count = 3 * WAITING_LINES
    numbers = itertools.count()
    with os.fdopen(writer, "w") as stream, os.fdopen(reader, "r") as out:
        console = Console(stream)
        log = EventLog(tmp_path / "omlxd.jsonl", console=console)

        def write() -> None:
            log.write(replace(EVENT, fields={"number": next(numbers)}))

        try:
            for _ in range(count):
                write()  # returns, which is the point: a pipe holds some 600 of them
            assert (tmp_path / "omlxd.jsonl").read_text().count("limit_warning") == count
            seen, missing, told = -1, 0, 0
            while seen < count:
                line = out.readline()
                write()
                if "missing" in line:
                    missing = int(line.split()[0].lstrip("("))
                    continue
                number = int(re.findall(r"number=(\d+)", line)[0])
                assert number == seen + missing + 1
                seen, missing, told = number, 0, told + missing
            assert told > 0
        finally:
            out.close()  # or the end would wait for the reader, for a moment
            log.close()


def test_a_daemon_in_the_journal_writes_there_and_to_its_file_and_neither_twice() -> None:
    daemon = Daemon({})
    journal = daemon.home / "test.err"
    journal.touch()
    try:
        daemon.spawn("--supervisor", "systemd", env={JOURNAL_VARIABLE: journal_name(journal)})
        daemon.until_event("daemon_ready")
        assert daemon.terminate() == 0
        shown = journal.read_text().splitlines()
        assert [json.loads(line.removeprefix("<6>")) for line in shown] == [
            {key: value for key, value in line.items() if key not in ("ts", "level")} for line in daemon.log()
        ]
    finally:
        daemon.close()


def test_a_daemon_that_cannot_start_says_so_in_the_journal_as_an_error() -> None:
    daemon = Daemon(text="[models.x]\npaht = 1\n")
    journal = daemon.home / "test.err"
    journal.touch()
    try:
        daemon.spawn("--supervisor", "systemd", env={JOURNAL_VARIABLE: journal_name(journal)})
        assert daemon.wait() == 78
        shown = journal.read_text().splitlines()
        assert all(line.startswith("<3>") for line in shown)
        assert "paht" in journal.read_text()
    finally:
        daemon.close()


def test_the_terminal_shows_the_same_events_readably(tmp_path: Path) -> None:
    stream = io.StringIO()
    log = EventLog(tmp_path / "omlxd.jsonl", console=Console(stream))
    log.write(EVENT)
    log.close()
    assert "limit_warning" in stream.getvalue()
    assert "\x1b[" not in stream.getvalue()


def test_a_terminal_that_cannot_show_a_letter_stops_nothing(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as stream:
        log = EventLog(tmp_path / "omlxd.jsonl", console=Console(stream))
        log.write(EVENT)
        log.write(EVENT)
        log.close()
    assert (tmp_path / "out").read_text().count("limit_warning") == 2


def test_a_terminal_that_went_away_stops_nothing(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        log = EventLog(tmp_path / "omlxd.jsonl", console=Console(stream))
        for _ in range(3):
            log.write(EVENT)
        log.close()
    assert (tmp_path / "omlxd.jsonl").read_text().count("limit_warning") == 3


def test_a_stack_is_shown_below_its_line() -> None:
    stream = io.StringIO()
    console = Console(stream)
    console.show(Event(EventName.ENGINE_STALLED, fields={"stack": ["a.py:1 f", "b.py:2 g"]}).to_json())
    console.close()
    assert "engine_stalled" in stream.getvalue()
    assert "  a.py:1 f\n  b.py:2 g\n" in stream.getvalue()


def test_what_cannot_be_rendered_is_named_and_stops_nothing() -> None:
    stream = io.StringIO()
    console = Console(stream)
    console.show({"event": "odd", "level": "info", "exception": object(), "stack": object()})
    console.show(EVENT.to_json())
    console.close()
    assert "odd" in stream.getvalue().splitlines()[0]
    assert "limit_warning" in stream.getvalue()
