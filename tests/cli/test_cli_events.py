"""`omlxd events`: what was, what comes, what was missed, and a daemon that goes away and comes back."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Omlxd
from tests.cli.fake_daemon import FakeDaemon, as_lines

ROUTE = "GET /v1/control/events"


def event(seq: int, model: str = "chat", level: str = "info") -> dict[str, Any]:
    return {"seq": seq, "ts": 1_764_438_048.25, "level": level, "event": "pinned", "model": model}


def heartbeat(seq: int, run: str = "one") -> dict[str, Any]:
    return {"event": "heartbeat", "seq": seq, "run": run}


@contextmanager
def following(environment: dict[str, str], *options: str) -> Iterator[subprocess.Popen[str]]:
    """The command, until the test has seen enough."""
    with subprocess.Popen(
        [sys.executable, "-m", "omlxd", "events", *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=30)


def read(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().rstrip("\n") for _ in range(count)]


def noted(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.readline().rstrip("\n")


def test_it_begins_with_the_last_ones_and_goes_on_with_what_comes(
    fake: FakeDaemon, environment: dict[str, str]
) -> None:
    fake.routes[ROUTE] = as_lines(heartbeat(4), *map(event, range(1, 7)))
    with following(environment, "-n", "2") as process:
        lines = read(process, 4)
    assert lines == ["17:40:48.250 info    pinned           `chat` is pinned"] * 4
    with following(environment, "-n", "2", "--json") as process:
        assert [json.loads(line) for line in read(process, 4)] == [event(number) for number in (3, 4, 5, 6)]


def test_filters_hold_for_what_was_and_what_comes(fake: FakeDaemon, environment: dict[str, str]) -> None:
    records = [
        event(number, "other" if number % 2 else "chat", "error" if number > 4 else "info") for number in range(9)
    ]
    fake.routes[ROUTE] = as_lines(heartbeat(4), *records[1:])
    with following(environment, "--json", "--model", "chat", "--level", "warning") as process:
        assert [json.loads(line)["seq"] for line in read(process, 2)] == [6, 8]


def test_what_was_missed_is_told(fake: FakeDaemon, environment: dict[str, str]) -> None:
    gap = {"event": "gap", "seq": 41, "missed": 40}
    fake.routes[ROUTE] = as_lines(heartbeat(1), event(1), gap, event(42))
    with following(environment) as process:
        assert len(read(process, 2)) == 2
        assert noted(process) == "missed 40 events: they came faster than they were read"
    with following(environment, "--json") as process:
        assert [json.loads(line) for line in read(process, 3)] == [event(1), gap, event(42)]


def test_it_goes_on_where_it_was_and_says_which_run_that_was(fake: FakeDaemon, environment: dict[str, str]) -> None:
    gap = {"event": "gap", "seq": 0, "missed": None}
    answers = [
        as_lines(heartbeat(2), event(1), event(2)),
        as_lines(heartbeat(3), event(3)),
        as_lines(gap, heartbeat(1, "two"), event(1, "new")),
    ]
    fake.routes[ROUTE] = lambda body: (answers.pop(0) if answers else as_lines())(body)
    with following(environment, "--json") as process:
        found = [json.loads(line) for line in read(process, 5)]
        assert [noted(process) for _ in range(2)] == ["the daemon has gone; reconnecting", "connected again"]
    assert found == [event(1), event(2), event(3), gap, event(1, "new")]
    asked = [path.partition("?")[2] for _, path, _ in fake.seen[:3]]
    assert asked == ["follow=true&since=0", "follow=true&since=2&run=one", "follow=true&since=3&run=one"]


def test_it_waits_while_nobody_answers(fake: FakeDaemon, home: Path, environment: dict[str, str]) -> None:
    fake.routes[ROUTE] = as_lines(heartbeat(1), event(1))
    with following(environment, "--json") as process:
        assert json.loads(*read(process, 1)) == event(1)
        (home / "omlxd.sock").rename(home / "away")
        assert noted(process) == "the daemon has gone; reconnecting"
        fake.routes[ROUTE] = as_lines(heartbeat(2), event(2))
        (home / "away").rename(home / "omlxd.sock")
        assert event(2) in (json.loads(line) for line in iter(lambda: read(process, 1)[0], ""))


def test_without_a_daemon_it_says_so(omlxd: Omlxd) -> None:
    done = omlxd("events")
    assert (done.returncode, done.stdout) == (3, "")
    assert "hint: `omlxd start`" in done.stderr


@pytest.mark.parametrize("options", [("--event", "pined"), ("--level", "loud")])
def test_a_filter_that_means_nothing_is_refused(omlxd: Omlxd, options: tuple[str, ...]) -> None:
    assert omlxd("events", *options).returncode == 2
