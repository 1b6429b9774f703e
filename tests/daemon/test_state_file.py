"""The state file: what outlives the process, and what happens when the file does not make sense."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from omlxd.core.events import Event, EventName
from omlxd.core.learned_costs import LearnedCosts
from omlxd.core.saved_state import LearnedSizes, SavedLimit, SavedPin, SavedState
from omlxd.daemon.state_file import TRY_AGAIN_S, StateFile
from omlxd.daemon.state_text import parse_state, render_state
from tests.fakes.clock import run

FULL = SavedState(
    limit=SavedLimit(max_memory="6G", manifest_max_memory="8G"),
    pins={"chat": SavedPin(pinned=True, manifest_pinned=False), "a.b:c": SavedPin(False, True)},
    learned={"chat": LearnedSizes(fingerprint='with "quotes"', weights_bytes=123)},
)
LATER = replace(FULL, loaded=("chat", "a.b:c"), restart=True)
# The first file format ever written: it has to stay readable.
OLD_FILE = """\
schema = 1

[limit]
max_memory = "6G"
manifest_max_memory = "8G"

[pins.chat]
pinned = true
manifest_pinned = false

[pins."a.b:c"]
pinned = false
manifest_pinned = true

[learned.chat]
fingerprint = 'with "quotes"'
weights_bytes = 123
"""


def test_what_was_written_is_read_again() -> None:
    assert parse_state(render_state(FULL)) == FULL
    assert parse_state(render_state(LATER)) == LATER
    assert parse_state(render_state(SavedState())) == SavedState()


def test_measured_costs_are_read_again_and_those_of_another_version_are_forgotten() -> None:
    costs = LearnedCosts(
        **{each.name: 7 if each.type == "int" else 7.5 for each in fields(LearnedCosts)}  # type: ignore[arg-type]
    )
    state = SavedState(learned={"odd": LearnedSizes("files-1", 123, costs)})
    written = render_state(state)
    assert parse_state(written) == state
    renamed = written.replace(fields(LearnedCosts)[0].name, "bytes_per_furlong")
    assert parse_state(renamed) == SavedState(learned={"odd": LearnedSizes("files-1", 123)})


def test_the_first_file_format_is_still_read() -> None:
    assert parse_state(OLD_FILE) == FULL


def test_what_another_version_writes_beside_it_does_no_harm() -> None:
    unknown = OLD_FILE.replace("schema = 1\n", 'schema = 1\ncolour = "red"\n') + "\n[learned.chat.extra]\nx = 1\n"
    unknown = unknown.replace("pinned = true\n", "pinned = true\nsince = 1979-05-27\n", 1) + "\n[fonts]\nsize = 3\n"
    assert parse_state(unknown) == FULL


@pytest.mark.parametrize(
    "text",
    [
        "",
        "schema = 1\n[limit",
        "schema = 2\n",
        'schema = 1\nlimit = "6G"\n',
        "schema = 1\n[limit]\nmax_memory = 6\nmanifest_max_memory = '8G'\n",
        "schema = 1\npins = 3\n",
        "schema = 1\nloaded = 'chat'\n",
        "schema = 1\nloaded = [1]\n",
        "schema = 1\npins.chat = true\n",
        "schema = 1\n[learned.chat]\nfingerprint = 'x'\n",
        "schema = 1\n[learned.chat]\nfingerprint = 'x'\nweights_bytes = true\n",
    ],
)
def test_a_damaged_file_is_moved_aside_with_a_warning_and_the_daemon_starts_without_it(
    tmp_path: Path, text: str
) -> None:
    events: list[Event] = []
    path = tmp_path / "state.toml"
    path.write_text(text)
    assert StateFile(path, events.append).load() == SavedState()
    assert not path.exists()
    assert (tmp_path / "state.toml.damaged").read_text() == text
    assert [event.event for event in events] == [EventName.STATE_FILE_DAMAGED]
    assert events[0].fields["reason"]


BAD_FIELDS = {
    "limit": ('max_memory = "6G"', "max_memory = 6"),
    "limit of another omlxd": ('max_memory = "6G"', 'max_memory = "0.5"'),
    "pin": ("pinned = true\nmanifest_pinned = false", "pinned = 1\nmanifest_pinned = false"),
    "learned": ("weights_bytes = 123", "weights_bytes = true"),
    "no TOML": ("weights_bytes = 123", "weights_bytes = "),
    "newer": ("schema = 1", "schema = 2"),
}


@pytest.mark.parametrize("which", BAD_FIELDS)
def test_a_bad_value_costs_itself_alone_and_is_told_and_the_file_kept(tmp_path: Path, which: str) -> None:
    expected = {
        "limit": replace(FULL, limit=None),
        "limit of another omlxd": replace(FULL, limit=None),
        "pin": replace(FULL, pins={"a.b:c": FULL.pins["a.b:c"]}),
        "learned": replace(FULL, learned={}),
        "no TOML": replace(FULL, learned={}),
        "newer": FULL,
    }[which]
    path, text = tmp_path / "state.toml", OLD_FILE.replace(*BAD_FIELDS[which])
    path.write_text(text)
    events: list[Event] = []
    file = StateFile(path, events.append)
    assert file.load() == expected
    assert (tmp_path / "state.toml.damaged").read_text() == text
    assert parse_state(path.read_text()) == expected
    assert path.read_text() == render_state(expected)
    assert events[0].fields | {"reason": ""} == {
        "path": str(path),
        "reason": "",
        "kept": True,
        "moved_to": f"{path}.damaged",
    }
    (warning,) = file.warnings
    assert warning.startswith(f"`{path}` is damaged, it is kept as `{path}.damaged`; the rest of it holds: ")
    later = StateFile(path, events.append)
    assert (later.load(), later.warnings, len(events)) == (expected, (), 1)


async def test_that_nothing_can_be_saved_is_known_before_there_is_anything_to_save(tmp_path: Path) -> None:
    events: list[Event] = []
    file = StateFile(tmp_path / "state.toml", events.append)
    await file.try_writing()
    assert (file.warnings, os.listdir(tmp_path)) == ((), [])  # noqa: PTH208
    (tmp_path / "state.toml.new").mkdir()
    await file.try_writing()
    assert file.warnings[0].startswith("nothing can be saved: ")
    assert await file.change(lambda _: FULL)
    assert [event.event for event in events] == [EventName.STATE_FILE_NOT_SAVED]


def test_a_second_damage_leaves_the_first_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "state.toml"
    for number in range(12):
        path.write_text(f"schema = 'damage {number}'\n" + ("[pins.a]\npinned=1\n" if number % 2 else ""))
        StateFile(path, lambda _: None).load()
    assert "damage 0" in (tmp_path / "state.toml.damaged").read_text()
    assert "damage 1" in (tmp_path / "state.toml.damaged-2").read_text()
    assert "damage 11" in (tmp_path / "state.toml.damaged-9").read_text()
    assert len(list(tmp_path.iterdir())) == 9


def test_a_damaged_file_that_cannot_be_written_anew_stays_and_is_kept_once(tmp_path: Path) -> None:
    path, text = tmp_path / "state.toml", OLD_FILE.replace("weights_bytes = 123", "weights_bytes = true")
    path.write_text(text)
    (tmp_path / "state.toml.new").mkdir()
    for _ in range(2):
        assert StateFile(path, lambda _: None).load() == replace(FULL, learned={})
        assert path.read_text() == text
    assert {each.name for each in tmp_path.iterdir()} == {"state.toml", "state.toml.new", "state.toml.damaged"}


def test_where_a_damaged_file_went_is_never_an_error_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "state.toml").mkdir()
    monkeypatch.setattr(Path, "replace", refuse)
    events: list[Event] = []
    file = StateFile(tmp_path / "state.toml", events.append)
    file.load()
    assert "moved_to" not in events[0].fields
    assert events[0].fields["not_moved"] == "Permission denied"
    assert "it is where it was; nothing of it holds" in file.warnings[0]


def test_bytes_that_are_no_text_are_damage_too(tmp_path: Path) -> None:
    events: list[Event] = []
    path = tmp_path / "state.toml"
    path.write_bytes(b"\xff\xfe\x00schema")
    assert StateFile(path, events.append).load() == SavedState()
    assert (tmp_path / "state.toml.damaged").exists()


def test_a_missing_file_is_the_empty_state_without_a_word(tmp_path: Path) -> None:
    events: list[Event] = []
    assert StateFile(tmp_path / "state.toml", events.append).load() == SavedState()
    assert events == []


async def test_a_change_is_on_the_disk_when_it_returns_and_private(tmp_path: Path) -> None:
    path = tmp_path / "state.toml"
    await StateFile(path, lambda _: None).change(lambda _: FULL)
    assert StateFile(path, lambda _: None).load() == FULL
    assert path.stat().st_mode & 0o777 == 0o600
    assert not path.with_name("state.toml.new").exists()


async def test_a_change_that_cannot_be_written_holds_and_says_that_it_is_not_saved(tmp_path: Path) -> None:
    events: list[Event] = []
    file = StateFile(tmp_path / "state.toml", events.append)
    (tmp_path / "state.toml.new").mkdir()
    (warning,) = await file.change(lambda _: FULL)
    assert warning.startswith("in force, but not saved: ")
    assert file.state == FULL
    assert [event.event for event in events] == [EventName.STATE_FILE_NOT_SAVED]
    (tmp_path / "state.toml.new").rmdir()
    assert await file.change(lambda state: state) == ()
    assert StateFile(tmp_path / "state.toml", events.append).load() == FULL


def test_a_change_that_could_not_be_written_is_written_by_itself_once_that_goes(tmp_path: Path) -> None:
    events: list[Event] = []
    path = tmp_path / "state.toml"

    async def main() -> None:
        file = StateFile(path, events.append)
        (tmp_path / "state.toml.new").mkdir()
        assert await file.change(lambda _: FULL)
        await asyncio.sleep(3.5 * TRY_AGAIN_S)
        assert not path.exists()
        (tmp_path / "state.toml.new").rmdir()
        await asyncio.sleep(TRY_AGAIN_S)
        assert StateFile(path, events.append).load() == FULL
        path.unlink()
        await asyncio.sleep(3 * TRY_AGAIN_S)
        assert not path.exists(), "it is not written again and again"

    run(main())
    assert [event.event for event in events] == [EventName.STATE_FILE_NOT_SAVED]


async def test_a_file_that_cannot_be_written_is_told_once_until_it_can_be(tmp_path: Path) -> None:
    events: list[Event] = []
    file = StateFile(tmp_path / "state.toml", events.append)
    for _ in range(2):
        (tmp_path / "state.toml.new").mkdir()
        for number in range(3):
            pin = SavedPin(True, False)
            assert await file.change(lambda state, name=f"m{number}", pin=pin: state.with_pin(name, pin))
        (tmp_path / "state.toml.new").rmdir()
        assert await file.change(lambda _: FULL) == ()
        await file.change(lambda _: SavedState())
    assert len(events) == 2


async def test_changes_made_at_once_are_all_kept(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state.toml", lambda _: None)
    names = [f"model{number}" for number in range(20)]
    await asyncio.gather(
        *(file.change(lambda state, name=name: state.with_pin(name, SavedPin(True, False))) for name in names)
    )
    assert set(StateFile(file.path, lambda _: None).load().pins) == set(names)


async def test_a_file_that_cannot_be_written_is_an_event_and_no_error(tmp_path: Path) -> None:
    events: list[Event] = []
    file = StateFile(tmp_path / "gone" / "state.toml", events.append)
    await file.change(lambda _: FULL)
    assert file.state == FULL
    assert [event.event for event in events] == [EventName.STATE_FILE_NOT_SAVED]


async def test_a_write_that_a_full_disk_cut_short_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state.toml", lambda _: None)
    assert await file.change(lambda _: FULL) == ()
    most, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        (warning,) = await file.change(lambda state: state.with_pin("new", SavedPin(True, False)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    assert "File too large" in warning
    assert os.listdir(tmp_path) == ["state.toml"]  # noqa: PTH208
    assert parse_state((tmp_path / "state.toml").read_text()) == FULL


def test_a_run_time_value_holds_until_the_manifests_own_value_changes() -> None:
    assert FULL.max_memory("8G") == "6G"
    assert FULL.max_memory("12G") is None
    assert FULL.pinned("chat", manifest_pinned=False) is True
    assert FULL.pinned("chat", manifest_pinned=True) is True
    assert FULL.pinned("a.b:c", manifest_pinned=True) is False
    assert FULL.pinned("a.b:c", manifest_pinned=False) is False
    assert FULL.pinned("other", manifest_pinned=True) is True


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "directory"])
def test_what_is_no_file_is_moved_aside_like_a_damaged_one_and_not_waited_for(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "state.toml")
    events: list[Event] = []
    assert StateFile(tmp_path / "state.toml", events.append).load() == SavedState()
    assert [event.event for event in events] == [EventName.STATE_FILE_DAMAGED]
    assert "not a regular file" in events[0].fields["reason"]
    assert not (tmp_path / "state.toml").exists()
    assert (tmp_path / "state.toml.damaged").exists()


async def test_a_pipe_under_the_name_of_the_next_state_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "state.toml.new")
    file = StateFile(tmp_path / "state.toml", lambda _: None)
    await file.change(lambda _: FULL)
    assert parse_state((tmp_path / "state.toml").read_text()) == FULL
