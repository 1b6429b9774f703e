"""The structured log: one JSON object a line, bounded, and harmless when the disk is full."""

from __future__ import annotations

import io
import json
import logging
import resource
import sys
from pathlib import Path

import pytest

from omlxd.core.events import Event, EventLevel, EventName
from omlxd.daemon.log import EventLog, libraries_to, trace_of

PROMPT = "Tell me a secret"
LOADED = Event(
    EventName.LOAD_FINISHED,
    model="chat",
    decision="d7",
    fields={"weights_bytes": 8 * 2**30, "load_s": 1.5},
    seq=4,
    ts=9.5,
)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_event_is_one_json_line_with_the_leading_keys_first(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "omlxd.jsonl")
    log.write(LOADED)
    log.close()
    (line,) = lines(tmp_path / "omlxd.jsonl")
    assert list(line)[:5] == ["ts", "level", "event", "model", "decision"]
    assert line == LOADED.to_json()


def test_the_log_is_private(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "omlxd.jsonl")
    log.write(LOADED)
    log.close()
    assert (tmp_path / "omlxd.jsonl").stat().st_mode & 0o777 == 0o600


def test_text_of_any_kind_stays_on_one_line(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "omlxd.jsonl")
    log.write(Event(EventName.API_ERROR, fields={"message": "two\nlines, é, 🙂 and \x1b[31m", "odd": {1, 2}}))
    log.close()
    (line,) = lines(tmp_path / "omlxd.jsonl")
    assert line["message"] == "two\nlines, é, 🙂 and \x1b[31m"


def test_a_file_name_that_is_no_text_is_written_all_the_same(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "omlxd.jsonl")
    log.write(Event(EventName.LOAD_FAILED, fields={"path": "/models/\udcff"}))
    log.close()
    assert log.lost_lines == 0
    assert "/models/" in (tmp_path / "omlxd.jsonl").read_text()


def test_the_log_never_grows_past_its_bounds(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "omlxd.jsonl", max_bytes=2_000, kept=2)
    for _ in range(200):
        log.write(LOADED)
    log.close()
    files = sorted(entry.name for entry in tmp_path.iterdir())
    assert files == ["omlxd.jsonl", "omlxd.jsonl.1", "omlxd.jsonl.2"]
    assert all(entry.stat().st_size <= 2_000 for entry in tmp_path.iterdir())


def test_events_below_the_chosen_level_are_not_written(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "omlxd.jsonl", least=EventLevel.WARNING)
    log.write(LOADED)
    log.write(Event(EventName.LIMIT_WARNING, level=EventLevel.WARNING))
    log.close()
    assert [line["event"] for line in lines(tmp_path / "omlxd.jsonl")] == ["limit_warning"]


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_full_disk_costs_lines_and_is_told_when_there_is_room_again(tmp_path: Path) -> None:
    path = tmp_path / "omlxd.jsonl"
    path.symlink_to("/dev/full")
    log = EventLog(path)
    for _ in range(3):
        log.write(LOADED)
    assert log.lost_lines == 3
    path.unlink()
    log.write(LOADED)
    log.write(LOADED)
    log.write(LOADED)
    log.close()
    written = lines(path)
    assert [line["event"] for line in written].count("load_finished") == 3
    (report,) = [line for line in written if line["event"] == "log_error"]
    assert report["lost_lines"] == 3
    assert "No space" in str(report["reason"])


def test_a_line_that_a_full_disk_has_torn_is_not_glued_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "omlxd.jsonl"
    log = EventLog(path)
    log.write(LOADED)
    most, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))  # room for a part of the next line
    try:
        log.write(LOADED)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    assert log.lost_lines == 1
    log.write(LOADED)
    log.write(LOADED)
    log.close()
    first, torn, *others = path.read_text().splitlines()
    assert len(torn) == 20
    assert [json.loads(line)["event"] for line in (first, *others)] == [
        *["load_finished"] * 2,
        "log_error",
        "load_finished",
    ]


def test_a_line_that_a_killed_daemon_left_half_is_not_glued_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "omlxd.jsonl"
    path.write_text('{"ts": 1.0}\n{"ts"')
    log = EventLog(path)
    log.write(LOADED)
    log.close()
    _, torn, last = path.read_text().splitlines()
    assert torn == '{"ts"'
    assert json.loads(last) == LOADED.to_json()


def test_a_log_directory_that_vanished_does_not_raise(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "gone" / "omlxd.jsonl")
    log.write(LOADED)
    assert log.lost_lines == 1
    log.close()


def test_the_console_shows_the_same_events_readably(tmp_path: Path) -> None:
    console = io.StringIO()
    log = EventLog(tmp_path / "omlxd.jsonl", console=console)
    log.write(LOADED)
    log.close()
    assert "load_finished" in console.getvalue()
    assert "chat" in console.getvalue()


def test_a_console_that_cannot_show_a_letter_or_goes_away_stops_nothing(tmp_path: Path) -> None:
    console = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    log = EventLog(tmp_path / "omlxd.jsonl", console=console)
    for message in ("é", "plain"):
        log.write(Event(EventName.LIMIT_WARNING, fields={"message": message}))
    log.close()
    assert [line["message"] for line in lines(tmp_path / "omlxd.jsonl")] == ["é", "plain"]


def test_errors_of_libraries_become_events_and_stop_doing_so_at_the_end() -> None:
    events: list[Event] = []
    with libraries_to(events.append):
        logging.getLogger("uvicorn.error").info("Started server process")
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
        try:
            raise ValueError(PROMPT)
        except ValueError as error:
            logging.getLogger("asyncio").error("Task exception was never retrieved", exc_info=error)
    assert [(event.event, event.level) for event in events] == [
        (EventName.API_ERROR, EventLevel.WARNING),
        (EventName.API_ERROR, EventLevel.ERROR),
    ]
    assert "ValueError" in events[1].fields["traceback"]
    assert PROMPT not in str(events[1].fields)
    assert logging.getLogger("asyncio").handlers == []


def test_a_client_that_hangs_up_in_the_middle_of_an_answer_is_no_fault() -> None:
    events: list[Event] = []
    with libraries_to(events.append):
        logging.getLogger("asyncio").warning("socket.send() raised exception.")
        logging.getLogger("asyncio").warning("something else")
    assert [event.fields["message"] for event in events] == ["something else"]


def test_a_trace_names_the_frames_and_the_type_and_quotes_no_message() -> None:
    try:
        json.loads(PROMPT)
    except ValueError as error:
        trace = trace_of(error)
    assert "JSONDecodeError" in trace
    assert "test_log.py" in trace
    assert PROMPT not in trace
