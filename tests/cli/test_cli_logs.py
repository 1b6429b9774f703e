"""`omlxd logs`: readable lines, the last ones across rotated files, and a follower that misses nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from omlxd.cli.event_sentences import SENTENCES
from omlxd.cli.sentences import decision_sentence, event_line
from omlxd.core.events import EventName
from tests.cli.conftest import Omlxd
from tests.cli.fake_daemon import DECISION

TS = 1_764_438_048.25
RECORDS = [
    {"ts": TS, "level": "info", "event": "daemon_ready", "seq": 1, "pid": 4321, "api": "127.0.0.1:8321"},
    {"ts": TS, "level": "info", "event": "load_finished", "model": "small", "weights_bytes": 50331648, "load_s": 0.351},
    {
        "ts": TS,
        "level": "warning",
        "event": "level_changed",
        "level_before": "ok",
        "level_now": "over",
        "reason": "all",
    },
    DECISION,
    {"ts": TS, "level": "info", "event": "request_finished", "request": "r7", "tokens_per_s": 17.8412, "stop": None},
    {
        "ts": TS,
        "level": "error",
        "event": "load_failed",
        "model": "big",
        "error": {"code": "load_failed", "hint": None},
    },
    {"ts": TS, "level": "info", "event": "of_a_later_version", "model": "big", "size_bytes": 4096, "took_s": 2.0},
]


@pytest.fixture
def log(home: Path) -> Path:
    path = home / "logs" / "omlxd.jsonl"
    path.parent.mkdir()
    return path


def _line(number: int) -> str:
    return json.dumps({"ts": TS, "level": "info", "event": "pinned", "model": f"m{number}"}) + "\n"


def test_lines_are_readable(omlxd: Omlxd, log: Path, golden: Callable[[str, str], None]) -> None:
    log.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    done = omlxd("logs")
    assert (done.returncode, done.stderr) == (0, "")
    golden("logs", done.stdout)


def test_json_is_the_log_as_it_is(omlxd: Omlxd, log: Path) -> None:
    text = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in RECORDS)
    log.write_text(text)
    assert omlxd("logs", "--json").stdout == text


@pytest.mark.parametrize("options", [(), ("--json",), ("--json", "-n", "2")], ids=" ".join)
def test_damaged_lines_are_left_out_and_counted_once(omlxd: Omlxd, log: Path, options: tuple[str, ...]) -> None:
    rubbish = b'not JSON\n[1, 2]\n{}\n\xff\xfe\n\n{"event": 3}\n' + b"x" * 3_000_000 + b'\n{"ts": 1, "ev'
    log.write_bytes(_line(1).encode() + rubbish[:-14] + b"\n" + _line(2).encode() + rubbish[-14:])
    done = omlxd("logs", *options)
    assert [name in done.stdout for name in ("m1", "m2", "not JSON")] == [True, True, False]
    assert (done.returncode, done.stderr) == (0, "left out 6 damaged lines\n")


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


def test_no_event_lacks_a_sentence() -> None:
    assert set(SENTENCES) == set(EventName) - {EventName.DECISION}


def test_an_error_is_its_sentence_and_its_code_and_no_list_of_details() -> None:
    error = {"code": "load_failed", "message": "`/m` has no config.json", "hint": "look", "details": {"kind": "x"}}
    line = event_line({"event": "request_failed", "level": "warning", "ts": TS, "model": "big", "error": error})
    assert line.endswith("warning request_failed   ? to `big` failed: `/m` has no config.json")


def test_a_decision_is_a_sentence() -> None:
    assert decision_sentence(DECISION).startswith("unloaded `small` (48.0 MiB freed): active memory 450 MiB is")
    assert decision_sentence(DECISION).endswith("→ 402 MiB")
    assert decision_sentence({"action": None, "reason": "all 2 loaded models are pinned"}) == (
        "nothing to do: all 2 loaded models are pinned"
    )


def test_a_limit_of_0_reads_as_no_limit_and_other_zeros_as_sizes(omlxd: Omlxd, home: Path) -> None:
    (home / "logs").mkdir()
    limits = {"before_bytes": 0, "soft_limit_bytes": 2**30, "hard_limit_bytes": 0, "binding": "max_memory"}
    at_run_time = {"event": "limit_changed", **limits, "limit_origin": "limit"}
    records = [{"event": "limit_changed", **limits}, at_run_time, {"event": "cache_dropped", "freed_bytes": 0}]
    (home / "logs" / "omlxd.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    changed, set_since, dropped = omlxd("logs").stdout.splitlines()
    assert changed.endswith("the soft limit is 1.00 GiB (max_memory), before none; the hard limit none")
    assert "the soft limit is 1.00 GiB (omlxd limit), before" in set_since
    assert "0 B of freed buffers" in dropped


FILTERED = [
    {"event": "daemon_starting", "ts": TS},
    {"event": "request_started", "ts": TS + 1, "level": "info", "model": "a", "request": "r1"},
    {"event": "daemon_starting", "ts": TS + 10, "level": "info"},
    {"event": "request_started", "ts": TS + 11, "level": "info", "model": "a", "request": "r1"},
    {"event": "unloaded", "ts": TS + 12, "level": "info", "model": "b", "decision": "d1"},
    {"event": "decision", "ts": TS + 13, "level": "info", "victim": "b", "for_model": "a", "decision": "d1"},
    {"event": "load_failed", "ts": TS + 14, "level": "warning", "model": "b"},
    {"event": "api_error", "ts": TS + 15, "level": "error"},
]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), range(8)),
        (("--model", "b"), (4, 5, 6)),
        (("--model", "a"), (1, 3, 5)),
        (("--model", "alias"), (4, 5, 6)),
        (("--request", "r1"), (3,)),
        (("--decision", "d1"), (4, 5)),
        (("--level", "warning"), (6, 7)),
        (("--event", "unloaded", "--event", "decision"), (4, 5)),
        (("--since", "2025-11-29T17:40:59.5"), (4, 5, 6, 7)),
        (("--since", "2025-11-29T17:40:59.5", "--until", "2025-11-29T17:41:01.5"), (4, 5)),
        (("--since", "2025-11-29T17:40:00", "-n", "1"), (7,)),
        (("--model", "b", "--level", "warning"), (6,)),
        (("-n", "2", "--model", "b"), (5, 6)),
    ],
)
def test_filters_choose_lines(
    omlxd: Omlxd, home: Path, log: Path, options: tuple[str, ...], expected: tuple[int, ...]
) -> None:
    (home / "omlxd.toml").write_text('[models.b]\naliases = ["alias"]\n')
    lines = [json.dumps(record) + "\n" for record in FILTERED]
    (log.parent / "omlxd.jsonl.1").write_text("".join(lines[:5]))
    log.write_text("".join(lines[5:]))
    done = omlxd("logs", "--json", *options)
    assert (done.stdout, done.stderr) == ("".join(lines[at] for at in expected), "")


def test_without_since_the_last_50_lines_are_shown_and_with_it_all(omlxd: Omlxd, log: Path) -> None:
    log.write_text("".join(map(_line, range(60))))
    assert len(omlxd("logs", "--json").stdout.splitlines()) == 50
    assert len(omlxd("logs", "--json", "--since", "2025-11-01").stdout.splitlines()) == 60


def test_when_nothing_matches_it_says_so(omlxd: Omlxd, log: Path) -> None:
    log.write_text(_line(1))
    done = omlxd("logs", "--model", "other")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "nothing in the log matches\n")


@pytest.mark.parametrize(
    ("option", "value", "next_step"),
    [
        ("--request", "12", "did you mean `--request r12`?"),
        ("--decision", "7", "did you mean `--decision d7`?"),
        ("--request", "r99", "`omlxd logs --event request_started` shows the last requests"),
        ("--decision", "d99", "`omlxd why -n 10` shows the last decisions"),
    ],
)
def test_an_id_that_the_log_does_not_have_is_answered_with_a_next_step(
    omlxd: Omlxd, log: Path, option: str, value: str, next_step: str
) -> None:
    log.write_text(_line(1))
    done = omlxd("logs", option, value)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", f"nothing in the log matches; {next_step}\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--event", "unloded"), "did you mean `unloaded`?"),
        (("--level", "loud"), "debug, info, warning or error"),
        (("--since", "yesterday"), "is not a time"),
        (("-f", "--until", "10m"), "leave one of them out"),
    ],
)
def test_a_filter_that_means_nothing_is_refused(
    omlxd: Omlxd, log: Path, options: tuple[str, ...], message: str
) -> None:
    log.write_text(_line(1))
    done = omlxd("logs", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_a_follower_filters_what_comes(log: Path, environment: dict[str, str]) -> None:
    log.write_text(_line(1) + _line(2))
    with subprocess.Popen(
        [sys.executable, "-m", "omlxd", "logs", "-f", "--json", "--model", "m2"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == _line(2)
        with log.open("a") as file:
            file.write("rubbish\n" + _line(3) + _line(2))
        assert process.stdout.readline() == _line(2)
        process.terminate()
        process.communicate(timeout=30)
