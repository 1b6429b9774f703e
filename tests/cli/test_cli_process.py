"""`start`, `stop` and `restart` with real processes: a stand-in daemon that does what the contract says, or dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omlxd.cli import daemon as commands
from omlxd.cli import process
from omlxd.cli.client import Client
from omlxd.cli.holder import is_held
from omlxd.cli.process import StartOptions, start_detached, wait_until_gone
from omlxd.core.errors import AlreadyRunning, InvalidRequest, ManifestInvalid, StartFailed
from omlxd.daemon.home import Home
from omlxd.daemon.lock import HomeLock
from tests.cli.conftest import Omlxd
from tests.cli.fake_daemon import FakeDaemon, as_error, as_json
from tests.cli.hollow_model import hollow_model

GONE = 2**22 + 1  # above every pid that Linux gives out, and macOS too

Stand = Callable[[str], Home]

PRELUDE = """
import fcntl, json, os, signal, sys, time
arguments = dict(zip(sys.argv[4::2], sys.argv[5::2]))
home, ready_fd = arguments["--home"], int(arguments["--ready-fd"])
def say(line):
    os.write(ready_fd, line.encode() + b"\\n")
    os.close(ready_fd)
"""


@pytest.fixture
def stand_in(home: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    """Makes `python -m omlxd.daemon` run this text instead."""

    def make(text: str) -> Home:
        script = home / "daemon"
        script.write_text(f"#!{sys.executable}\n{PRELUDE}\n{textwrap.dedent(text)}")
        script.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(script))
        (home / "omlxd.toml").touch()
        home.chmod(0o700)
        return Home(home)

    return make


LIVES = """
    lock = os.open(f"{home}/omlxd.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    print("to stderr file", flush=True)
    say(json.dumps({"ready": True, "pid": os.getpid(), "sid": os.getsid(0), "cwd": os.getcwd(), "argv": sys.argv[1:],
                    "stdin": os.readlink("/proc/self/fd/0") if os.path.exists("/proc/self/fd/0") else "/dev/null"}))
    signal.pause()
"""


def _ended(home: Home) -> None:
    pid = int(home.lock.read_text())
    os.kill(pid, signal.SIGTERM)
    assert wait_until_gone(home, pid, timeout_s=30)


def test_start_says_that_the_daemon_answers_and_what_it_still_loads(stand_in: Stand, omlxd: Omlxd) -> None:
    names = json.dumps([f"m{number}" for number in range(8)])
    more = f'"warnings": ["mind the gap"], "api": "127.0.0.1:8321", "loading": {names}, "argv"'
    home = stand_in(
        LIVES.replace('"argv"', more).replace("fcntl.flock", 'os.write(lock, b"%d" % os.getpid()); fcntl.flock')
    )
    done = omlxd("start")
    assert (done.returncode, done.stderr) == (0, "warning: mind the gap\n")
    loading = "loading `m0`, `m1`, `m2`, `m3`, `m4` and 3 others"
    pid = home.lock.read_text()
    assert done.stdout == f"omlxd answers: pid {pid}, api http://127.0.0.1:8321; {loading}\n"
    _ended(home)


def test_where_the_ready_line_names_no_loads_the_status_does(fake: FakeDaemon, home: Path) -> None:
    line = commands.answering_line({"pid": 7}, Client(home / "omlxd.sock"))
    assert line == "omlxd answers: pid 7, limit 400 MiB; loading `big`"
    assert "loading" not in commands.answering_line({"pid": 7, "loading": []}, Client(home / "omlxd.sock"))


def test_a_started_daemon_is_on_its_own(stand_in: Stand) -> None:
    home = stand_in(LIVES)
    ready = start_detached(home, StartOptions(max_memory="8G", policy="reference"))
    try:
        assert ready["sid"] == ready["pid"] != os.getsid(0)
        assert Path(ready["cwd"]).samefile(home.root)
        assert ready["stdin"] == "/dev/null"
        expected = [
            "--home",
            str(home.root),
            "--manifest",
            str(home.manifest),
            "--max-memory",
            "8G",
            "--policy",
            "reference",
        ]
        assert ready["argv"][3 : 3 + len(expected)] == expected
        assert home.daemon_err.read_text() == "to stderr file\n"
        assert is_held(home.lock)
    finally:
        os.kill(ready["pid"], signal.SIGTERM)
    assert wait_until_gone(home, ready["pid"], timeout_s=30)


def test_what_the_daemon_says_instead_of_ready_is_raised(stand_in: Stand) -> None:
    error = json.dumps({"error": AlreadyRunning("omlxd is already running", hint="`omlxd status`").to_json()})
    home = stand_in(f"say({error!r}); sys.exit(1)")
    with pytest.raises(AlreadyRunning, match="already running") as raised:
        start_detached(home, StartOptions())
    assert raised.value.hint == "`omlxd status`"


def test_a_daemon_that_dies_shows_its_last_words_and_only_its_own(stand_in: Stand) -> None:
    home = stand_in('sys.stderr.write("ImportError: no mlx\\n"); sys.exit(9)')
    home.logs.mkdir()
    home.daemon_err.write_text("an older start\n")
    with pytest.raises(StartFailed, match="with status 9") as raised:
        start_detached(home, StartOptions())
    assert "ImportError: no mlx" in raised.value.message
    assert "older" not in raised.value.message


def test_a_daemon_that_is_killed_while_starting_is_told_apart(stand_in: Stand) -> None:
    home = stand_in("os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(StartFailed, match="by signal 9"):
        start_detached(home, StartOptions())


def test_a_daemon_that_never_gets_ready_is_ended(stand_in: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "READY_TIMEOUT_S", 0.0)
    home = stand_in(LIVES.replace("say(", "dict("))
    with pytest.raises(StartFailed, match="did not answer within"):
        start_detached(home, StartOptions())
    assert not is_held(home.lock)


def test_without_a_manifest_nothing_is_started(stand_in: Stand) -> None:
    home = stand_in(LIVES)
    home.manifest.unlink()
    with pytest.raises(ManifestInvalid) as raised:
        start_detached(home, StartOptions())
    assert raised.value.hint == "`omlxd init` writes one"
    assert not home.logs.exists()


def test_the_lock_tells_whether_a_daemon_lives(home: Path) -> None:
    place = Home(home)
    assert not is_held(place.lock)
    with HomeLock(place.lock):
        assert is_held(place.lock)
        assert not wait_until_gone(place, GONE, timeout_s=0.0)
    assert wait_until_gone(place, GONE, timeout_s=0.0)


def test_a_process_that_still_ends_its_work_is_not_gone(home: Path) -> None:
    ends = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert ends.stdin is not None
    assert not wait_until_gone(Home(home), ends.pid, timeout_s=0.0)
    ends.stdin.close()
    assert wait_until_gone(Home(home), ends.pid, timeout_s=30)
    ends.wait()


def test_a_process_whose_status_nobody_asked_for_is_gone(home: Path) -> None:
    text = "import os, time\nif (pid := os.fork()) == 0: os._exit(0)\nprint(pid, flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert wait_until_gone(Home(home), int(parent.stdout.readline()), timeout_s=30)
        parent.communicate(input="\n", timeout=30)


def test_stop_waits_until_the_lock_is_free(omlxd: Omlxd, home: Path, fake: FakeDaemon) -> None:
    lock = HomeLock(home / "omlxd.lock")

    def stop(_: dict[str, object]) -> tuple[int, str, object]:
        lock.release()
        return 200, "application/json", iter([b'{"state": "draining", "pid": 4194305}'])

    fake.routes["POST /v1/control/stop"] = stop  # type: ignore[assignment]
    done = omlxd("stop", "--now")
    assert (done.returncode, done.stdout) == (0, "omlxd stopped (pid 4194305)\n")
    assert fake.seen == [("POST", "/v1/control/stop", {"now": True})]


@pytest.mark.parametrize(
    ("cut", "told"),
    [
        ({"chat": 2, "small": 1}, "2 requests to `chat`, 1 request to `small` were cut\n"),
        ({"chat": 1}, "1 request to `chat` was cut\n"),
        ({}, ""),
        (None, ""),
    ],
)
def test_stop_says_which_requests_were_cut(
    omlxd: Omlxd, home: Path, fake: FakeDaemon, cut: dict[str, int] | None, told: str
) -> None:
    lock = HomeLock(home / "omlxd.lock")
    (home / "logs").mkdir()
    earlier = {"ts": time.time() - 60.0, "event": "daemon_stopped", "cut": {"chat": 9}}
    (home / "logs" / "omlxd.jsonl").write_text(json.dumps(earlier) + "\n")

    def stop(_: dict[str, object]) -> tuple[int, str, object]:
        if cut is not None:
            with (home / "logs" / "omlxd.jsonl").open("a") as log:
                log.write(json.dumps({"ts": time.time(), "event": "daemon_stopped", "cut": cut}) + "\n")
        lock.release()
        return 200, "application/json", iter([json.dumps({"state": "draining", "pid": GONE}).encode()])

    fake.routes["POST /v1/control/stop"] = stop  # type: ignore[assignment]
    done = omlxd("stop")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"omlxd stopped (pid {GONE})\n", told)
    if cut:
        assert f"stopped; {told}" in omlxd("logs", "-n", "1").stdout


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command says at once what it waits for."""
    monkeypatch.setattr(commands, "SILENT_S", 0.2)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("requests", "said"), [(0, ""), (1, "stopping: 1 request is still running; ")])
def test_a_stop_that_takes_a_while_says_what_it_waits_for_and_nothing_when_that_is_nothing(
    omlxd: Omlxd, home: Path, fake: FakeDaemon, requests: int, said: str
) -> None:
    lock = HomeLock(home / "omlxd.lock")
    fake.routes["POST /v1/control/stop"] = as_json({"state": "draining", "pid": GONE})

    def running(_: dict[str, object]) -> tuple[int, str, object]:
        threading.Timer(0.3, lock.release).start()
        return 200, "application/json", iter([json.dumps({"requests": [{}] * requests}).encode()])

    fake.routes["GET /v1/control/requests"] = running  # type: ignore[assignment]
    done = omlxd("stop")
    assert (done.returncode, done.stdout) == (0, f"omlxd stopped (pid {GONE})\n")
    assert done.stderr.startswith(said)
    assert bool(done.stderr) is bool(said)


def test_a_restart_ends_a_daemon_that_is_older_than_the_command(omlxd: Omlxd, home: Path, fake: FakeDaemon) -> None:
    (home / "omlxd.toml").write_text('[api]\nlisten = "off"\n')
    (home / "omlxd.lock").mkdir()  # the start that follows fails, and this test has no daemon to end

    unknown = as_error(InvalidRequest("`restart`: is not a field that omlxd understands"))
    stopped = as_json({"state": "draining", "pid": GONE})
    fake.routes["POST /v1/control/stop"] = lambda body: (unknown if "restart" in body else stopped)(body)
    done = omlxd("restart", "--now", "--manifest", str(home / "omlxd.toml"))
    assert done.stderr.startswith(f"omlxd stopped (pid {GONE})\nerror: ")
    assert [body for _, path, body in fake.seen if path.endswith("/stop")] == [
        {"now": True, "restart": True},
        {"now": True},
    ]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("command", "way_out"),
    [
        (("stop",), "`omlxd stop --now` ends them"),
        (("restart", "--manifest", "omlxd.toml"), "Ctrl-C, then `omlxd restart --now` ends them"),
    ],
)
def test_who_waits_for_a_drain_is_told_the_way_out_of_it(
    omlxd: Omlxd, home: Path, fake: FakeDaemon, command: tuple[str, ...], way_out: str
) -> None:
    (home / "omlxd.toml").write_text('[api]\nlisten = "off"\n')
    words = [str(home / word) if word == "omlxd.toml" else word for word in command]
    lock = HomeLock(home / "omlxd.lock")

    def requests(_: object) -> tuple[int, str, object]:
        lock.release()
        (home / "omlxd.lock").unlink()
        (home / "omlxd.lock").mkdir()  # the start that follows fails, and this test has no daemon to end
        return 200, "application/json", iter([b'{"requests": [{}]}'])

    fake.routes["POST /v1/control/stop"] = as_json({"state": "draining", "pid": GONE})
    fake.routes["GET /v1/control/requests"] = requests  # type: ignore[assignment]
    assert f"stopping: 1 request is still running; {way_out}\n" in omlxd(*words).stderr


def test_restart_without_a_manifest_has_already_said_that_nothing_ran(omlxd: Omlxd) -> None:
    done = omlxd("restart")
    assert done.returncode == 78
    assert done.stderr.startswith("the daemon was not running\nerror: the manifest")


# A daemon that holds the lock and has no socket

SILENT = """
import fcntl, os, signal, sys
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(lock, fcntl.LOCK_EX)
os.write(lock, f"{os.getpid()}\\n".encode())
asked = []
def end(number, frame):
    asked.append(number)
    if len(asked) == int(sys.argv[2]):
        os._exit(0)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, end)
print("held", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def silent(home: Path) -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    """A process that holds the home's lock, listens nowhere, and ends at the so manieth signal."""
    started: list[subprocess.Popen[str]] = []

    def make(signals: int = 1) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SILENT, str(home / "omlxd.lock"), str(signals)]
        made = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(made)
        assert made.stdout is not None
        assert made.stdout.readline() == "held\n"
        return made

    yield make
    for each in started:
        each.kill()
        each.communicate()


@pytest.mark.parametrize("command", ["status", "status --json", "limit 1G", "pin chat"])
def test_who_holds_the_lock_and_does_not_listen_is_named_with_the_way_out(
    omlxd: Omlxd, silent: Callable[..., subprocess.Popen[str]], command: str
) -> None:
    holder = silent()
    done = omlxd(*command.split())
    assert (done.returncode, done.stdout) == (69, "")
    assert done.stderr.startswith(f"error: the daemon (pid {holder.pid}) holds the lock but does not answer\n")
    assert "`omlxd stop`" in done.stderr


@pytest.mark.parametrize(("arguments", "signals"), [(["stop"], 1), (["stop", "--now"], 2)])
def test_stop_ends_who_holds_the_lock_even_without_a_socket(
    omlxd: Omlxd, home: Path, silent: Callable[..., subprocess.Popen[str]], arguments: list[str], signals: int
) -> None:
    holder = silent(signals)
    done = omlxd(*arguments)
    assert (done.returncode, done.stdout) == (0, f"omlxd stopped (pid {holder.pid})\n")
    assert not is_held(home / "omlxd.lock")
    assert omlxd("stop").returncode == 3


def test_restart_ends_who_holds_the_lock_before_it_starts(
    omlxd: Omlxd, home: Path, silent: Callable[..., subprocess.Popen[str]]
) -> None:
    holder = silent()
    (home / "omlxd.toml").write_text('[api]\nlisten = "off"\n')
    (home / "omlxd.sock").write_text("in the way: the start that follows fails, and this test has no daemon to end")
    done = omlxd("restart")
    assert done.returncode == 1
    assert done.stderr.startswith(f"omlxd stopped (pid {holder.pid})\nerror: `{home / 'omlxd.sock'}` is in the way")
    assert holder.wait(30) == 0


@pytest.mark.parametrize("text", [None, "[daemon]\nmax_memroy = 3\n"], ids=["missing", "wrong"])
def test_a_restart_looks_at_the_manifest_before_it_stops_anything(
    omlxd: Omlxd, home: Path, silent: Callable[..., subprocess.Popen[str]], text: str | None
) -> None:
    holder = silent()
    if text is not None:
        (home / "omlxd.toml").write_text(text)
    done = omlxd("restart")
    assert done.returncode == 78
    assert "the daemon that runs was left as it is" in done.stderr
    assert holder.poll() is None


@pytest.mark.parametrize(
    ("text", "options", "status", "said"),
    [
        ('[daemon]\nhard_limit = "9000G"\n', (), 78, "hard_limit"),
        ("", ("--hard-limit", "9000G"), 2, "`hard_limit` 8.79 TiB"),
        ('[daemon]\nmax_memory = "10M"\n[models.chat]\npath = "chat"\npin = true\n', (), 78, "models.chat.pin"),
        ('[api]\napi_key_file = "gone"\n', (), 1, "gone"),
    ],
    ids=["limits of the manifest", "limits of the command line", "pins", "no key"],
)
def test_a_restart_looks_at_all_that_a_start_would_refuse_before_it_stops_anything(
    omlxd: Omlxd,
    home: Path,
    silent: Callable[..., subprocess.Popen[str]],
    text: str,
    options: tuple[str, ...],
    status: int,
    said: str,
) -> None:
    holder = silent()
    hollow_model(home / "chat", 20)
    (home / "omlxd.toml").write_text(text)
    done = omlxd("restart", *options)
    assert done.returncode == status
    assert said in done.stderr
    assert "the daemon that runs was left as it is" in done.stderr
    assert holder.poll() is None


def test_a_restart_goes_by_the_limit_that_was_set_and_by_the_options_of_the_start(
    omlxd: Omlxd, home: Path, silent: Callable[..., subprocess.Popen[str]]
) -> None:
    holder = silent()
    (home / "omlxd.toml").write_text('[daemon]\nmax_memory = "auto"\nhard_limit = "1G"\n')
    (home / "state.toml").write_text(
        'schema = 1\n[limit]\nmax_memory = "500M"\nmanifest_max_memory = "auto"\n[start]\nmax_memory = "2G"\n'
    )
    (home / "omlxd.sock").write_text("in the way of the next daemon")
    done = omlxd("restart")
    assert f"omlxd stopped (pid {holder.pid})" in done.stderr


@pytest.mark.parametrize(
    ("given", "before", "expected"),
    [
        (
            {},
            {"manifest": "/m.toml", "max_memory": "8G", "hard_limit": None},
            {"manifest": "/m.toml", "max_memory": "8G"},
        ),
        (
            {"max_memory": "1G"},
            {"max_memory": "8G", "policy": "reference"},
            {"max_memory": "1G", "policy": "reference"},
        ),
        ({"manifest": Path("/n.toml")}, {"manifest": "/m.toml"}, {"manifest": "/n.toml"}),
        ({"restore": "none"}, {}, {"restore": "none"}),
    ],
)
def test_a_restart_says_again_what_the_start_was_told(
    given: dict[str, Any], before: dict[str, Any], expected: dict[str, str]
) -> None:
    options = StartOptions(**given, restarted=True).over(before)
    command = options.arguments(Home(Path("/h")))
    said = dict(zip(command[6::2], command[7::2], strict=False))
    assert said == {"--manifest": "/h/omlxd.toml"} | {f"--{key.replace('_', '-')}": v for key, v in expected.items()}
    assert command[-1] == "--restarted"


def test_a_restart_after_a_crash_says_the_options_of_the_start_again_and_names_them(omlxd: Omlxd, home: Path) -> None:
    (home / "omlxd.toml").write_text('[api]\nlisten = "off"\n')
    start = ["--max-memory", "100M", "--hard-limit", "200M", "--policy", "reference"]
    try:
        assert omlxd("start", *start).returncode == 0
        for limit, expected in ((None, "100 MiB"), ("80M", "80.0 MiB")):
            if limit:
                assert omlxd("limit", limit).returncode == 0
            pid = int((home / "omlxd.lock").read_text())
            os.kill(pid, signal.SIGKILL)
            assert wait_until_gone(Home(home), pid, timeout_s=30)
            restarted = omlxd("restart")
            assert restarted.returncode == 0, restarted.stderr
            assert "was not running; its start said: " in restarted.stderr
            assert "--hard-limit 200M" in restarted.stderr
            assert f"limit {expected}\n" in restarted.stdout
            status = json.loads(omlxd("status", "--json").stdout)
            assert status["memory"]["hard_limit"] == 200 * 2**20
            assert status["enforcer"]["policy"] == "reference"
        assert omlxd("stop", "--now").returncode == 0
        ended = omlxd("restart")
        origin = "the limit was set by `omlxd limit`; the manifest says `auto`"
        assert ended.stderr.splitlines() == ["the daemon was not running", origin]
    finally:
        omlxd("stop", "--now")


def test_a_daemon_that_dies_without_a_word_is_told_by_the_end_of_its_log(stand_in: Stand) -> None:
    home = stand_in("""
    line = {"ts": time.time(), "level": "error", "event": "engine_failed", "error": "MLX is gone"}
    old = {**line, "ts": 5.0, "error": "an older end"}
    with open(f"{home}/logs/omlxd.jsonl", "w") as log:
        log.writelines(json.dumps(each) + "\\n" for each in (old, line))
    os.kill(os.getpid(), signal.SIGKILL)
    """)
    with pytest.raises(StartFailed, match="by signal 9") as raised:
        start_detached(home, StartOptions())
    assert "MLX is gone" in raised.value.message
    assert "older" not in raised.value.message


def test_a_pid_in_a_lock_that_nobody_holds_is_never_signalled(omlxd: Omlxd, home: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        (home / "omlxd.lock").write_text(f"{stranger.pid}\n")
        assert omlxd("stop", "--now").returncode == 3
        assert stranger.poll() is None
        stranger.communicate(b"\n")
    assert stranger.returncode == 0


# Something else under our files' names


@pytest.mark.parametrize("name", ["omlxd.lock", "logs/omlxd.jsonl", "logs/daemon.err"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "directory"])
def test_what_is_in_the_way_of_a_file_of_ours_is_named_and_not_waited_for(
    omlxd: Omlxd, home: Path, name: str, make: Callable[[Path], None]
) -> None:
    (home / "omlxd.toml").write_text('[api]\nlisten = "off"\n')
    (home / "logs").mkdir()
    make(home / name)
    done = omlxd("start")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: `{home / name}` is in the way: it is not a regular file\nhint: ")
    assert not is_held(home / "omlxd.lock")


def test_logs_do_not_wait_for_a_pipe(omlxd: Omlxd, home: Path) -> None:
    (home / "logs").mkdir()
    os.mkfifo(home / "logs" / "omlxd.jsonl")
    assert "not a regular file" in omlxd("logs").stderr


@pytest.mark.parametrize("listens", [True, False], ids=["ends", "does not listen"])
def test_an_interrupted_start_ends_what_it_has_started(
    stand_in: Stand, monkeypatch: pytest.MonkeyPatch, listens: bool
) -> None:
    deaf = "" if listens else "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    home = stand_in(f"""
    {deaf}
    lock = os.open(f"{{home}}/omlxd.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.kill(os.getppid(), signal.SIGINT)
    signal.pause()
    """)
    monkeypatch.setattr(process, "GIVEN_UP_S", 30.0 if listens else 0.0)
    with pytest.raises(KeyboardInterrupt):
        start_detached(home, StartOptions())
    assert not is_held(home.lock)


@pytest.mark.parametrize("command", ["start", "demo"])
@pytest.mark.parametrize("name", ["home", "home/logs"])
def test_a_file_in_place_of_a_directory_of_ours_is_named(omlxd: Omlxd, home: Path, command: str, name: str) -> None:
    if (command, name) == ("demo", "home/logs"):
        name = "home/demo"
    if name != "home":
        (home / "home").mkdir(mode=0o700)
    (home / name).touch()
    (home / "omlxd.toml").touch()
    manifest = ["--manifest", str(home / "omlxd.toml")] if command == "start" else []
    done = omlxd("--home", str(home / "home"), command, *manifest)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: `{home / name}` is in the way: it is not a directory\nhint: name another")


def test_a_start_that_cannot_write_names_the_file_and_the_reason(omlxd: Omlxd, home: Path) -> None:
    (home / "omlxd.toml").touch()
    (home / "logs").mkdir()
    (home / "logs" / "daemon.err").symlink_to(home / "nowhere" / "file")
    done = omlxd("start")
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == f"error: cannot write `{home}/logs/daemon.err`: No such file or directory"
    assert "hint: name another home" in done.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (StartOptions(), "the limit was set by `omlxd limit`; the manifest says `200M`\n"),
        (StartOptions(max_memory="100M"), ""),
    ],
    ids=["nothing said", "a limit said"],
)
def test_start_says_where_its_limit_comes_from(
    home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: StartOptions,
    told: str,
) -> None:
    (home / "omlxd.toml").write_text('[daemon]\nmax_memory = "200M"\n')
    (home / "state.toml").write_text('schema = 1\n[limit]\nmax_memory = "150M"\nmanifest_max_memory = "200M"\n')
    monkeypatch.setattr(commands, "start_detached", lambda *_: {"pid": 1})
    commands._start(Home(home), options)
    assert capsys.readouterr().err == told


def test_start_says_which_pins_are_not_the_manifests(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "omlxd.toml").write_text('[models.chat]\npath = "chat"\npin = true\n')
    (home / "state.toml").write_text("schema = 1\n[pins.chat]\npinned = false\nmanifest_pinned = true\n")
    monkeypatch.setattr(commands, "start_detached", lambda *_: {"pid": 1})
    commands._start(Home(home), StartOptions(max_memory="100M"))
    assert capsys.readouterr().err == "kept: `chat` unpinned by `omlxd unpin`; the manifest says otherwise\n"


@pytest.mark.parametrize("arguments", [["status", "--json"], ["start"], ["stop"]], ids=" ".join)
def test_a_home_that_no_answer_could_name_is_refused_by_all(omlxd_process: Omlxd, arguments: list[str]) -> None:
    done = omlxd_process(*arguments, OMLXD_HOME="/tmp/h\udcff")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: the path of the home is not UTF-8: `/tmp/h\\udcff`\n")
