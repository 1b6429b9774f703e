"""`omlxd status` on a real terminal with the fake daemon: how it begins, answers keys and size, and gives back."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Omlxd
from tests.cli.fake_daemon import SMALL, FakeDaemon, as_json, model_json, status_json
from tests.fakes.terminal import ENTERS, LEAVES, Terminal
from tests.fakes.terminal import omlxd as command

Open = Callable[..., Terminal]


@pytest.fixture
def terminal(environment: dict[str, str]) -> Iterator[Open]:
    opened: list[Terminal] = []
    plain = {key: value for key, value in environment.items() if key not in ("COLUMNS", "NO_COLOR")}

    def make(*words: str, **size: int) -> Terminal:
        opened.append(Terminal(words or command("status"), plain | {"TERM": "xterm-256color"}, **size))
        return opened[-1]

    yield make
    for each in opened:
        each.__exit__(None, None, None)


def given_back(terminal: Terminal) -> bool:
    """Whether the terminal is as it was: its settings, the first buffer, and a cursor."""
    tail = terminal.raw.rpartition(ENTERS)[2]
    return terminal.settings == terminal.settings_before and LEAVES in tail and b"\x1b[?25h" in tail


def settings_of_the_shell(terminal: Terminal) -> bytes:
    """What a command in the shell is given; at its prompt the shell has settings of its own."""
    before = len(terminal.raw)
    terminal.type('echo "<$(stty -g)>"\n')
    said = re.compile(rb"<([0-9a-f:]+)>")
    terminal.until(lambda: said.search(terminal.raw, before) is not None)
    return said.findall(terminal.raw, before)[0]


@pytest.mark.parametrize(("ends", "status"), [("q", 0), ("\x03", 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_however_it_ends_the_terminal_is_given_back(
    fake: FakeDaemon, terminal: Open, ends: str | signal.Signals, status: int
) -> None:
    shown = terminal()
    shown.until_shown("omlxd 0.1.0 ready", "chat", "q quit")
    assert shown.settings != shown.settings_before
    if isinstance(ends, str):
        shown.type(ends)
    else:
        os.kill(shown.pid, ends)
    assert shown.ended() == status
    assert given_back(shown)


def test_an_error_in_the_middle_is_told_on_the_terminal_as_it_was(fake: FakeDaemon, terminal: Open) -> None:
    shown = terminal()
    shown.until_shown("q quit")
    fake.routes["GET /v1/control/status"] = as_json(status_json() | {"schema": 2})
    assert shown.ended() == 1
    assert given_back(shown)
    assert b"schema 2" in shown.raw.rpartition(LEAVES)[2]
    assert b"hint: " in shown.raw.rpartition(LEAVES)[2].replace(b"\x1b[36mhint:\x1b[0m", b"hint:")


def test_without_a_daemon_no_screen_is_opened(home: Path, terminal: Open) -> None:
    shown = terminal()
    assert shown.ended() == 3
    assert ENTERS not in shown.raw
    assert b"the daemon is not running" in shown.raw


def test_it_follows_the_size_of_the_window(fake: FakeDaemon, terminal: Open) -> None:
    shown = terminal()
    shown.until_shown("q quit")
    assert not any("UNTIL" in line for line in shown.lines)
    shown.resize(140, 40)
    shown.until(lambda: "UNTIL" in "\n".join(shown.lines) and "q quit" in shown.lines[-1])
    shown.resize(30, 5)
    shown.until(lambda: "q quit" in shown.lines[-1])
    shown.type("q")
    assert shown.ended() == 0


def test_keys_pin_unload_and_abort_by_the_daemon(fake: FakeDaemon, terminal: Open) -> None:
    fake.routes["POST /v1/control/models/chat/unpin"] = as_json({"model": model_json(SMALL), "warnings": ["not saved"]})
    fake.routes["POST /v1/control/models/chat/unload"] = as_json({"was": "loaded", "freed_bytes": 2**20})
    shown = terminal()
    shown.until_shown("q quit")
    shown.type("\x1b[Bp")
    shown.until_shown("unpinned `chat`; not saved")
    shown.type("u")
    shown.until_shown("`chat` is pinned; unload it all the same? y = yes")
    shown.type("y")
    shown.until_shown("unloaded `chat` (1.00 MiB freed)")
    shown.type("\x1b[Fay")
    shown.until_shown("request `r7` aborted")
    shown.type("\x1b[Hl")
    shown.until_shown("did you mean `chat`?")
    done = [(method, path) for method, path, _ in fake.seen if method != "GET"]
    assert done == [
        ("POST", "/v1/control/models/chat/unpin"),
        ("POST", "/v1/control/models/chat/unload"),
        ("DELETE", "/v1/control/requests/r7"),
        ("POST", "/v1/control/models/chat/load"),
    ]


def test_a_daemon_that_goes_and_comes_back_is_waited_for(home: Path, fake: FakeDaemon, terminal: Open) -> None:
    shown = terminal()
    shown.until_shown("omlxd 0.1.0 ready")
    fake.close()
    (home / "omlxd.sock").unlink()
    shown.until_shown("reconnecting… the daemon is not running")
    shown.until_shown("chat")
    again = FakeDaemon(home / "omlxd.sock")
    try:
        again.routes["GET /v1/control/status"] = as_json(status_json() | {"version": "0.2.0"})
        shown.until_shown("omlxd 0.2.0 ready")
        shown.type("q")
        assert shown.ended() == 0
    finally:
        again.close()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs a shell with job control")
def test_ctrl_z_gives_the_terminal_to_the_shell_and_fg_brings_the_screen_back(fake: FakeDaemon, terminal: Open) -> None:
    shown = terminal("bash", "--norc", "--noprofile", "-i")
    shown.type("PS1='ready> '\n")
    shown.until_shown("ready> ")
    in_shell = settings_of_the_shell(shown)
    shown.type(" ".join(command("status")) + "\n")
    shown.until_shown("q quit")
    shown.type("\x1a")
    shown.until(lambda: b"Stopped" in shown.raw and shown.raw.rstrip().endswith(b"ready>"))
    assert shown.raw.count(ENTERS) == shown.raw.count(LEAVES) == 1
    assert settings_of_the_shell(shown) == in_shell
    shown.type("fg\n")
    shown.until(lambda: shown.raw.count(ENTERS) == 2 and "q quit" in shown.lines[-1])
    shown.type("q")
    shown.until(lambda: shown.raw.rstrip().endswith(b"ready>"))
    assert shown.raw.count(ENTERS) == shown.raw.count(LEAVES)
    assert settings_of_the_shell(shown) == in_shell
    shown.type("exit\n")
    assert shown.ended() == 0


def test_keys_are_left_alone_when_stdin_is_no_terminal(fake: FakeDaemon, terminal: Open) -> None:
    shown = terminal("sh", "-c", f"{' '.join(command('status'))} < /dev/null")
    shown.until_shown("q quit")
    shown.type("\x03")
    assert shown.ended() in (130, -signal.SIGINT)
    assert given_back(shown)


def test_once_is_a_page_also_on_a_terminal(fake: FakeDaemon, terminal: Open) -> None:
    shown = terminal(*command("status", "--once"))
    assert shown.ended() == 0
    assert ENTERS not in shown.raw
    assert any("last decisions" in line for line in shown.lines)


def test_a_dumb_terminal_gets_a_page(fake: FakeDaemon, environment: dict[str, str]) -> None:
    with Terminal(command("status"), environment) as shown:
        assert shown.ended() == 0
        assert ENTERS not in shown.raw


def test_watch_as_json_is_a_line_for_each_look_until_nobody_reads(
    fake: FakeDaemon, environment: dict[str, str]
) -> None:
    with subprocess.Popen(
        command("status", "--watch", "--json"), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(2)]
        assert [line["pid"] for line in lines] == [4321] * 2
        process.stdout.close()
        assert process.wait(timeout=30) == 0
        assert process.stderr.read() == b""


def test_watch_as_json_needs_a_daemon_to_begin_with(omlxd: Omlxd) -> None:
    done = omlxd("status", "--watch", "--json")
    assert (done.returncode, done.stdout) == (3, "")
