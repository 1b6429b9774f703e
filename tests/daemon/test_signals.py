"""SIGHUP to a real process: another manifest, at any moment; and the end when the terminal has gone."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.wire import ask

TIMEOUT_S = 60.0


def text(*models: str, key: str = "max_waiting", value: Any = 256) -> str:
    tables = "".join(f'[models.{name}]\npath = "/nowhere/{name}"\n' for name in models)
    return f'[daemon]\nmax_memory = "100M"\n{key} = {value}\n[api]\nlisten = "off"\n{tables}'


class Process:
    """A daemon whose home is in a folder; in the foreground of a terminal when one is given."""

    def __init__(self, home: Path, *options: str, terminal: int | None = None, wait: bool = True) -> None:
        self.home = home
        reader, writer = os.pipe()
        command = [sys.executable, "-m", "omlxd.daemon", "--home", str(home), "--ready-fd", str(writer), *options]
        if terminal is None:
            self.popen = subprocess.Popen(command, pass_fds=[writer], stderr=subprocess.DEVNULL)
        else:
            controlled = "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
            become = f"{controlled}; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
            command = [sys.executable, "-c", become, *command[1:]]
            streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
            self.popen = subprocess.Popen(command, pass_fds=[writer], **streams)  # type: ignore[call-overload]
        os.close(writer)
        with os.fdopen(reader) as ready:
            assert not wait or json.loads(ready.read())["ready"]

    def models(self) -> list[str]:
        return [view["name"] for view in ask(self.home / "omlxd.sock", "GET", "/v1/control/models").json["models"]]

    def until(self, event: str, count: int = 1) -> list[dict[str, Any]]:
        """The lines of this event, as soon as there are so many."""
        log = self.home / "logs" / "omlxd.jsonl"
        while True:
            assert self.popen.poll() is None
            lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
            if len(found := [line for line in lines if line["event"] == event]) >= count:
                return found


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "h").mkdir(mode=0o700)
    (tmp_path / "h" / "omlxd.toml").write_text(text("a"))
    return tmp_path / "h"


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    made: list[Process] = []
    yield made
    for process in made:
        process.popen.kill()
        process.popen.wait(TIMEOUT_S)


def test_of_manifests_rewritten_in_a_hurry_the_last_one_wins_and_a_bad_one_is_told_with_its_line(
    home: Path, processes: list[Process]
) -> None:
    processes.append(process := Process(home))
    for number in range(10):
        (home / "omlxd.toml").write_text(text("a", f"m{number}"))
        process.popen.send_signal(signal.SIGHUP)
    while process.models() != ["a", "m9"]:
        assert process.popen.poll() is None
    (home / "omlxd.toml").write_text(text("b", key="max_wating"))
    process.popen.send_signal(signal.SIGHUP)
    (rejected,) = process.until("manifest_rejected")
    problems = rejected["error"]["details"]["problems"]
    assert problems == ["daemon.max_wating: unknown key; did you mean `max_waiting`? (line 3)"]
    assert process.models() == ["a", "m9"]
    process.popen.terminate()
    assert process.popen.wait(TIMEOUT_S) == 0


def test_a_signal_never_takes_a_manifest_that_was_emptied(home: Path, processes: list[Process]) -> None:
    processes.append(process := Process(home))
    (home / "omlxd.toml").write_text("")
    process.popen.send_signal(signal.SIGHUP)
    (rejected,) = process.until("manifest_rejected")
    assert "has no models" in rejected["error"]["message"]
    assert process.models() == ["a"]


def test_a_signal_that_comes_while_it_starts_is_not_lost_and_ends_nothing(home: Path, processes: list[Process]) -> None:
    processes.append(process := Process(home, wait=False))
    process.until("daemon_starting")  # its manifest has been read, and the signals are its own from here on
    while not (home / "logs" / "stacks.txt").exists():
        assert process.popen.poll() is None
    (home / "omlxd.toml").write_text(text("a", "b"))
    process.popen.send_signal(signal.SIGHUP)
    process.until("manifest_reloaded")
    assert process.models() == ["a", "b"]


def test_in_the_foreground_of_a_terminal_a_signal_reloads_and_the_end_of_the_terminal_ends_it(
    home: Path, processes: list[Process]
) -> None:
    ours, theirs = pty.openpty()
    processes.append(process := Process(home, "--foreground", terminal=theirs))
    os.close(theirs)
    process.popen.send_signal(signal.SIGHUP)
    process.until("manifest_reloaded")
    assert process.models() == ["a"]
    os.close(ours)
    assert process.popen.wait(TIMEOUT_S) == 0
    assert '"daemon_stopped"' in (home / "logs" / "omlxd.jsonl").read_text()
