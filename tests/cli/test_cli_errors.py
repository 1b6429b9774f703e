"""Whatever goes wrong: one sentence, one next step, the right exit status, nothing on stdout, no traceback."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from omlxd.core import errors
from omlxd.core.errors import OmlxError
from tests.cli.conftest import Omlxd
from tests.cli.fake_daemon import CHAT, FakeDaemon, as_error, as_json, as_lines, model_json

COMMANDS = [
    ["status"],
    ["status", "--json"],
    ["models"],
    ["load", "chat"],
    ["unload", "chat"],
    ["pin", "chat"],
    ["unpin", "chat"],
    ["limit"],
    ["limit", "6G"],
    ["run", "chat", "hello"],
    ["requests"],
    ["abort", "r1"],
    ["stop"],
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_without_a_daemon_every_command_says_how_to_start_it(omlxd: Omlxd, arguments: list[str]) -> None:
    done = omlxd(*arguments)
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr == "error: the daemon is not running\nhint: `omlxd start`\n"


def test_a_socket_nobody_listens_on_is_no_daemon(omlxd: Omlxd, home: Path) -> None:
    left_over = socket.socket(socket.AF_UNIX)
    left_over.bind(str(home / "omlxd.sock"))
    left_over.close()
    assert omlxd("status").returncode == 3


def test_a_daemon_that_hangs_up_is_unreachable(omlxd: Omlxd, home: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(home / "omlxd.sock"))
        listener.listen()
        with subprocess.Popen(
            [sys.executable, "-m", "omlxd", "--home", str(home), "status"], stderr=subprocess.PIPE, text=True
        ) as process:
            connection, _ = listener.accept()
            connection.close()
            _, stderr = process.communicate(timeout=30)
    assert process.returncode == 69
    assert stderr.startswith("error: the daemon closed the connection")
    assert "hint: `omlxd logs" in stderr


def test_what_does_not_answer_like_omlxd_is_named(omlxd: Omlxd, fake: FakeDaemon) -> None:
    fake.routes["GET /v1/control/status"] = lambda _: (200, "text/html", iter([b"<html>"]))
    done = omlxd("status")
    assert done.returncode == 69
    assert "does not answer like omlxd" in done.stderr


def _leaves(kind: type[OmlxError]) -> list[type[OmlxError]]:
    return [kind, *(leaf for child in kind.__subclasses__() for leaf in _leaves(child))]


FROM_THE_DAEMON = [kind for kind in _leaves(OmlxError) if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", FROM_THE_DAEMON, ids=lambda kind: kind.__name__)
def test_the_daemons_error_keeps_its_words_and_exit_status(
    omlxd: Omlxd, fake: FakeDaemon, kind: type[OmlxError]
) -> None:
    fake.routes["GET /v1/control/status"] = as_error(kind("it is so", hint="do this"))
    done = omlxd("status")
    assert (done.returncode, done.stdout) == (kind.exit_status, "")
    assert done.stderr == "error: it is so\nhint: do this\n"


def test_an_error_at_the_end_of_a_load_counts(omlxd: Omlxd, fake: FakeDaemon) -> None:
    error = errors.LoadFailed("`model.safetensors` is truncated", hint="fetch it again").to_json()
    fake.routes["POST /v1/control/models/chat/load"] = as_lines({"error": error})
    done = omlxd("load", "chat")
    assert (done.returncode, done.stdout) == (1, "")
    assert "truncated" in done.stderr


def test_a_load_that_breaks_off_is_not_a_success(omlxd: Omlxd, fake: FakeDaemon) -> None:
    fake.routes["POST /v1/control/models/chat/load"] = as_lines()
    assert omlxd("load", "chat").returncode == 69


def test_an_answer_that_is_no_error_object_is_still_an_error(omlxd: Omlxd, fake: FakeDaemon) -> None:
    fake.routes["GET /v1/control/status"] = as_json(["?"], status=500)
    done = omlxd("status")
    assert done.returncode == 1
    assert "answered 500" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["stat"], "no such command `stat`", "`omlxd --help`"),
        (["run"], "missing argument `MODEL`", "`omlxd run --help`"),
        (["status", "--fast"], "no such option: --fast", "`omlxd status --help`"),
        (["limit", "8Q"], "`8Q` is not a size", "write `8G`"),
        (["limit", "0.5"], "`0.5` has no unit", "write `0.5G`, or a whole number of bytes"),
        (["limit", "8"], "`8` is 8 B, too little for a memory limit", "did you mean `8G`?"),
        (["limit", "-5"], "`-5` is not a size", "write `8G`"),
        (["limit", "--fast"], "no such option: --fast", "`omlxd limit --help`"),
        (["start", "--max-memory", "0.5"], "`0.5` has no unit", "write `0.5G`, or a whole number of bytes"),
        (["start", "--max-memory", "lots"], "`lots` is not a size", "write `8G`"),
        (["start", "--hard-limit", "-1G"], "`-1G` is not a size", "write `8G`"),
        (["start", "--policy", "kind"], "invalid value for `--policy`", "`omlxd start --help`"),
        (["run", "chat", "hi", "--max-tokens", "0"], "invalid value for `--max-tokens`", "`omlxd run --help`"),
        (["run", "chat", ""], "the prompt is empty", "`omlxd run chat"),
        (["status", "--watch", "--once"], "`--watch` and `--once` exclude each other", "leave one"),
        (["status", "--watch"], "`--watch` needs a terminal", "`--watch --json`"),
        (["logs", "-n", "-1"], "invalid value for", "`omlxd logs --help`"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_slip_of_the_keyboard_is_a_usage_error(omlxd: Omlxd, arguments: list[str], message: str, hint: str) -> None:
    done = omlxd(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    first, second = done.stderr.splitlines()
    assert first.startswith(f"error: {message}")
    assert second.startswith(f"hint: {hint}")


def test_no_command_shows_the_help_and_is_a_usage_error(omlxd: Omlxd) -> None:
    done = omlxd()
    assert (done.returncode, done.stdout) == (2, "")
    assert "Commands:" in done.stderr


def test_version(omlxd: Omlxd) -> None:
    assert omlxd("--version").stdout == "omlxd 0.1.0\n"


def test_a_home_whose_socket_path_is_too_long_says_what_to_do(omlxd: Omlxd, home: Path) -> None:
    done = omlxd("--home", str(home / ("x" * 100)), "status")
    assert done.returncode == 3
    assert "longer than 103 bytes" in done.stderr
    assert "OMLXD_HOME" in done.stderr


def test_debug_shows_the_traceback(omlxd: Omlxd) -> None:
    assert "Traceback" in omlxd("--debug", "status").stderr
    assert "Traceback" not in omlxd("status").stderr


@pytest.mark.parametrize("arguments", ["models --json", "logs -n 50000", "--help"])
def test_a_reader_that_leaves_is_no_error(
    home: Path, fake: FakeDaemon, environment: dict[str, str], arguments: str
) -> None:
    (home / "logs").mkdir()
    (home / "logs" / "omlxd.jsonl").write_text('{"ts": 1.0, "level": "info", "event": "cache_dropped"}\n' * 50_000)
    command = f"{sys.executable} -m omlxd {arguments} | head -1 >/dev/null; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_control_characters_from_the_daemon_do_not_reach_a_table(omlxd: Omlxd, fake: FakeDaemon) -> None:
    evil = model_json(CHAT) | {"name": "a\x1b[2Jb", "path": "[link=x]y[/link]"}
    fake.routes["GET /v1/control/models"] = as_json({"schema": 1, "models": [evil]})
    done = omlxd("models")
    assert "\x1b" not in done.stdout
    assert "[link=x]y[/link]" in done.stdout


def test_a_home_that_is_named_like_a_command_is_a_home(omlxd: Omlxd, home: Path) -> None:
    done = omlxd("--home", "status", "logs")
    assert done.returncode == 1
    assert "there is no log at" in done.stderr


def test_the_home_option_wins_over_the_environment(omlxd: Omlxd, fake: FakeDaemon, home: Path) -> None:
    assert omlxd("--home", str(home), "limit", OMLXD_HOME="/nowhere").returncode == 0
    assert omlxd(f"--home={home}", "limit", OMLXD_HOME="/nowhere").returncode == 0


@pytest.mark.parametrize("command", ["logs", "start", "demo"])
def test_what_the_system_says_of_a_file_is_no_fault_to_report(omlxd: Omlxd, command: str) -> None:
    home = "/" + "x" * 300
    done = omlxd("--home", home, command)
    assert done.returncode == 1
    first, second = done.stderr.splitlines()
    assert first.startswith("error: cannot ")
    assert home in first
    assert first.endswith("`: File name too long")
    assert second.startswith("hint: ")
    assert "report" not in second
