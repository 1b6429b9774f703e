"""`omlxd logs`: readable lines, the last ones across rotated files, and a follower that misses nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from omlxd.cli.sentences import decision_sentence, event_line
from omlxd.core.events import EventName
from tests.cli.conftest import Omlxd
from tests.cli.fake_daemon import DECISION

TS = 1_764_438_048.25
RECORDS = [
    {"ts": TS, "level": "info", "event": "daemon_ready", "seq": 1, "pid": 4321, "api": "127.0.0.1:8321"},
    {"ts": TS, "level": "info", "event": "load_finished", "model": "small", "weights_bytes": 50331648, "load_s": 0.351},
    {"ts": TS, "level": "warning", "event": "level_changed", "before": "ok", "after": "over", "reason": "all pinned"},
    DECISION,
    {"ts": TS, "level": "info", "event": "request_finished", "request": "r7", "tokens_per_s": 17.8412, "stop": None},
    {
        "ts": TS,
        "level": "error",
        "event": "load_failed",
        "model": "big",
        "error": {"code": "load_failed", "hint": None},
    },
]


@pytest.fixture
def log(home: Path) -> Path:
    path = home / "logs" / "omlxd.jsonl"
    path.parent.mkdir()
    return path


def _line(number: int) -> str:
    return json.dumps({"ts": TS, "level": "info", "event": "pinned", "model": f"m{number}"}) + "\n"


def test_lines_are_readable(omlxd: Omlxd, log: Path, golden: Callable[[str, str], None]) -> None:
    damaged = "not JSON at all\n[1, 2]\n{}\n"
    log.write_text("".join(json.dumps(record) + "\n" for record in RECORDS) + damaged)
    done = omlxd("logs")
    assert (done.returncode, done.stderr) == (0, "")
    golden("logs", done.stdout)


def test_json_is_the_log_as_it_is(omlxd: Omlxd, log: Path) -> None:
    text = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in RECORDS) + "damaged\n"
    log.write_text(text)
    assert omlxd("logs", "--json").stdout == text


@pytest.mark.parametrize(("count", "expected"), [(0, []), (1, [9]), (3, [7, 8, 9]), (50, range(10))])
def test_the_last_lines_come_from_rotated_files_too(omlxd: Omlxd, log: Path, count: int, expected: list[int]) -> None:
    (log.parent / "omlxd.jsonl.2").write_text("".join(map(_line, range(4))))
    (log.parent / "omlxd.jsonl.1").write_text("".join(map(_line, range(4, 8))))
    log.write_text("".join(map(_line, range(8, 10))))
    shown = omlxd("logs", "--json", "-n", str(count)).stdout
    assert shown == "".join(map(_line, expected))


def test_without_a_log_it_says_so(omlxd: Omlxd) -> None:
    done = omlxd("logs")
    assert done.returncode == 1
    assert "there is no log at" in done.stderr
    assert "hint: `omlxd start`" in done.stderr


def test_a_follower_sees_every_line_across_a_rotation(log: Path, environment: dict[str, str]) -> None:
    log.write_text(_line(0) + _line(1))
    with subprocess.Popen(
        [sys.executable, "-m", "omlxd", "logs", "-f", "-n", "1", "--json"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == _line(1)
        with log.open("a") as file:
            file.write(_line(2) + _line(3)[:10])
            file.flush()
            assert process.stdout.readline() == _line(2)
            file.write(_line(3)[10:] + _line(4))
        log.rename(log.with_name("omlxd.jsonl.1"))
        log.write_text(_line(5))
        assert [process.stdout.readline() for _ in range(3)] == [_line(3), _line(4), _line(5)]
        process.terminate()
        process.communicate(timeout=30)


def test_a_follower_may_come_before_the_log(home: Path, environment: dict[str, str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "omlxd", "logs", "-f", "--json"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        (home / "logs").mkdir()
        (home / "logs" / "omlxd.jsonl").write_text(_line(0))
        assert process.stdout.readline() == _line(0)
        process.terminate()
        process.communicate(timeout=30)


@pytest.mark.parametrize("event", EventName)
def test_every_event_makes_one_line_whatever_it_carries(event: EventName) -> None:
    odd = {
        "a": None,
        "b_bytes": -1,
        "c_s": "soon",
        "d": ["x\ny", 1],
        "e": {"f_bytes": 2**30},
        "g": "\x1b[2J",
        "ts": 1e300,
    }
    line = event_line({"event": event.value, "level": "info", **odd})
    assert event.value in line
    assert "\n" not in line
    assert "\x1b" not in line


def test_an_error_is_its_sentence_and_its_code_and_no_list_of_details() -> None:
    error = {"code": "load_failed", "message": "`/m` has no config.json", "hint": "look", "details": {"kind": "x"}}
    line = event_line({"event": "request_failed", "level": "warning", "ts": TS, "model": "big", "error": error})
    assert line.endswith("warning request_failed   big `/m` has no config.json (load_failed)")


def test_a_decision_is_a_sentence() -> None:
    assert decision_sentence(DECISION).startswith("unloaded `small` (48.0 MiB freed): active memory 450 MiB is")
    assert decision_sentence(DECISION).endswith("→ 402 MiB")
    assert decision_sentence({"action": None, "reason": "all 2 loaded models are pinned"}) == (
        "nothing to do: all 2 loaded models are pinned"
    )


def test_a_limit_of_0_reads_as_no_limit_and_other_zeros_as_sizes(omlxd: Omlxd, home: Path) -> None:
    (home / "logs").mkdir()
    limits = {"before_bytes": 0, "soft_limit_bytes": 2**30, "hard_limit_bytes": 0}
    records = [{"event": "limit_changed", **limits}, {"event": "cache_dropped", "before_bytes": 0}]
    (home / "logs" / "omlxd.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    changed, dropped = omlxd("logs").stdout.splitlines()
    assert changed.endswith('before="no limit" soft_limit=1.00 GiB hard_limit="no limit"')
    assert dropped.endswith("before=0 B")
