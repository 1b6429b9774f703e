"""The structured log: one JSON object a line, bounded, and harmless when the disk is full."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from omlxd.core.events import Event, EventLevel, EventName
from omlxd.daemon import log as log_module
from omlxd.daemon.log import MOST_ALIKE, EventLog, libraries_to, trace_of
from omlxd.daemon.log_file import LOOK_S

PROMPT = "Tell me a secret"
LOADED = Event(
    EventName.LOAD_FINISHED,
    model="chat",
    decision="d7",
    fields={"weights_bytes": 8 * 2**30, "load_s": 1.5},
    seq=4,
    ts=9.5,
)


def a_while_later() -> Callable[[], float]:
    """A clock that goes on by more than the log takes a look at its file to be good for, each time it is read."""
    return itertools.count(step=2 * LOOK_S).__next__


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


def test_a_log_directory_that_vanished_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "omlxd.jsonl"
    log = EventLog(path, clock=a_while_later())
    log.write(LOADED)
    shutil.rmtree(path.parent)
    log.write(LOADED)
    log.close()
    assert log.lost_lines == 0
    assert lines(path) == [LOADED.to_json()]
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_home_that_vanished_does_not_raise_and_is_not_made_again(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "gone" / "logs" / "omlxd.jsonl")
    log.write(LOADED)
    assert log.lost_lines == 1
    log.close()
    assert not (tmp_path / "gone").exists()


def test_without_old_files_to_keep_the_log_is_bounded_too(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "omlxd.jsonl", max_bytes=2_000, kept=0)
    for _ in range(200):
        log.write(LOADED)
    log.close()
    (file,) = tmp_path.iterdir()
    assert 0 < file.stat().st_size <= 2_000
    assert lines(file)[-1] == LOADED.to_json()


def test_the_bound_is_in_bytes_whatever_the_letters_take(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "omlxd.jsonl", max_bytes=2_000, kept=1)
    for _ in range(20):
        log.write(Event(EventName.LIMIT_WARNING, fields={"message": "漢" * 200}))
    log.close()
    assert log.lost_lines == 0
    assert all(entry.stat().st_size <= 2_000 for entry in tmp_path.iterdir())


def test_a_line_longer_than_a_file_may_be_is_written_all_the_same_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "omlxd.jsonl"
    log = EventLog(path, max_bytes=300, kept=2)
    for message in ("short", "long " * 200, "short"):
        log.write(Event(EventName.LIMIT_WARNING, fields={"message": message}))
    log.close()
    found = [lines(path.with_name(path.name + suffix)) for suffix in (".2", ".1", "")]
    assert [len(str(line["message"])) for (line,) in found] == [5, 1000, 5]


def test_after_somebody_moved_the_file_away_the_name_gets_a_new_one(tmp_path: Path) -> None:
    path, moved = tmp_path / "omlxd.jsonl", tmp_path / "moved"
    log = EventLog(path, clock=a_while_later())
    log.write(LOADED)
    path.rename(moved)
    log.write(LOADED)
    log.write(LOADED)
    log.close()
    assert (len(lines(moved)), len(lines(path))) == (1, 2)


def test_lines_of_one_moment_look_at_the_file_once_and_none_is_lost_when_it_is_moved(tmp_path: Path) -> None:
    path, moved, now = tmp_path / "omlxd.jsonl", tmp_path / "moved", 0.0
    log = EventLog(path, clock=lambda: now)
    log.write(LOADED)
    path.rename(moved)
    log.write(LOADED)
    now += LOOK_S
    log.write(LOADED)
    log.close()
    assert (len(lines(moved)), len(lines(path))) == (2, 1)


def test_lines_of_one_moment_are_counted_and_the_file_still_keeps_to_its_size(tmp_path: Path) -> None:
    path = tmp_path / "omlxd.jsonl"
    log = EventLog(path, max_bytes=1_000, kept=9, clock=lambda: 0.0)
    for _ in range(50):
        log.write(LOADED)
    log.close()
    line_bytes = len(path.read_bytes().splitlines(keepends=True)[0])
    sizes = sorted(each.stat().st_size // line_bytes for each in tmp_path.iterdir())
    fit = 1_000 // line_bytes
    assert sizes == [50 % fit, *[fit] * (50 // fit)]


def test_after_somebody_put_another_file_in_its_place_that_one_is_written_to(tmp_path: Path) -> None:
    path, moved = tmp_path / "omlxd.jsonl", tmp_path / "moved"
    log = EventLog(path, clock=a_while_later())
    log.write(LOADED)
    path.rename(moved)
    path.touch()
    log.write(LOADED)
    log.close()
    assert (len(lines(moved)), len(lines(path))) == (1, 1)


def test_after_somebody_emptied_the_file_it_begins_anew_without_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "omlxd.jsonl"
    log = EventLog(path, clock=a_while_later())
    for _ in range(3):
        log.write(LOADED)
    os.truncate(path, 0)
    log.write(LOADED)
    log.close()
    assert path.read_bytes().startswith(b"{")
    assert lines(path) == [LOADED.to_json()]


def test_a_complaint_that_comes_again_and_again_is_written_a_few_times_and_then_counted() -> None:
    events: list[Event] = []
    with libraries_to(events.append):
        for _ in range(1000):
            logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
        logging.getLogger("uvicorn.error").warning("something else")
        assert len(events) == MOST_ALIKE + 1
    *passed, last = events
    assert all("alike_left_out" not in event.fields for event in passed)
    assert last.fields["message"] == "Invalid HTTP request received."
    assert last.fields["alike_left_out"] == 1000 - MOST_ALIKE


def test_after_a_while_such_complaints_pass_again_with_the_number_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "ALIKE_S", 0.0)
    monkeypatch.setattr(log_module, "MOST_ALIKE", 0)
    events: list[Event] = []
    with libraries_to(events.append):
        complain = logging.getLogger("uvicorn.error").warning
        complain("again")
        complain("again")
        monkeypatch.setattr(log_module, "MOST_ALIKE", 1)
        complain("again")
        complain("again")
    assert [event.fields.get("alike_left_out") for event in events] == [2, None]


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


async def test_a_callback_that_raises_is_told_without_what_it_was_called_with() -> None:
    events: list[Event] = []

    def callback(prompt: str) -> None:
        raise ValueError(prompt)

    with libraries_to(events.append):
        asyncio.get_running_loop().call_soon(callback, PROMPT)
        await asyncio.sleep(0)
    (event,) = events
    assert event.fields["message"].startswith("Exception in callback")
    assert "ValueError" in event.fields["traceback"]
    assert PROMPT not in str(event.fields)


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
