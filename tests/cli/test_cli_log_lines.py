"""Reading the log backwards: every line once, whatever the blocks, the files and the rubbish in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omlxd.cli import log_lines
from omlxd.cli.log_lines import Log

LINES = st.lists(
    st.one_of(
        st.integers(0, 999).map(lambda number: json.dumps({"event": "pinned", "seq": number}).encode()),
        st.binary(max_size=60).filter(lambda raw: b"\n" not in raw),
    ),
    max_size=30,
)


def events(lines: list[bytes]) -> list[int]:
    """What `Log` should make of these lines: the numbers of those that are events."""
    found = []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, UnicodeDecodeError):
            continue
        if isinstance(record, dict) and isinstance(record.get("event"), str):
            found.append(record["seq"])
    return found


@given(LINES, st.integers(1, 80), st.booleans())
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_backwards_is_every_whole_line_once_in_any_blocks(
    tmp_path: Path, lines: list[bytes], block_bytes: int, is_torn: bool
) -> None:
    path = tmp_path / "omlxd.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in lines) + (b'{"event": "torn", "seq"' if is_torn else b""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_lines, "BLOCK_BYTES", block_bytes)
        log = Log(path)
        found = [line.record["seq"] for line in log.newest_first()]
    assert found == events(lines)[::-1]
    assert log.damaged == sum(bool(line.strip()) for line in lines) - len(found)


def test_a_line_longer_than_any_of_ours_is_counted_once_and_costs_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_lines, "LONGEST_LINE_BYTES", 100)
    monkeypatch.setattr(log_lines, "BLOCK_BYTES", 32)
    path = tmp_path / "omlxd.jsonl"
    path.write_bytes(b'{"event": "a"}\n' + b"x" * 5000 + b'\n{"event": "b"}\n')
    log = Log(path)
    assert [line.record["event"] for line in log.newest_first()] == ["b", "a"]
    assert log.damaged == 1


def test_a_rotation_while_it_is_read_loses_and_doubles_nothing(tmp_path: Path) -> None:
    path = tmp_path / "omlxd.jsonl"
    path.with_name("omlxd.jsonl.1").write_text('{"event": "a"}\n{"event": "b"}\n')
    path.write_text('{"event": "c"}\n{"event": "d"}\n')
    reading = Log(path).newest_first()
    found = [next(reading).record["event"]]
    path.with_name("omlxd.jsonl.1").rename(path.with_name("omlxd.jsonl.2"))
    path.rename(path.with_name("omlxd.jsonl.1"))
    path.write_text('{"event": "e"}\n')
    assert found + [line.record["event"] for line in reading] == ["d", "c", "b", "a"]


def test_a_file_that_stands_under_two_names_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "omlxd.jsonl"
    path.write_text('{"event": "a"}\n')
    path.with_name("omlxd.jsonl.1").hardlink_to(path)
    assert len(list(Log(path).newest_first())) == 1
