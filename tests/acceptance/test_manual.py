"""omlxd(1) is true: each entry of FILES, SIGNALS and EXIT STATUS is shown by the real thing.

Who adds an entry to the page adds its check here; without one these tests fail, and name it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import plistlib
import signal
import stat
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pexpect
import pytest

from omlxd.service.launchctl import Launchctl
from omlxd.service.systemctl import Systemctl
from tests.acceptance.harness import OMLXD, TIMEOUT_S, Daemon, errors_in, has_text, text_of
from tests.acceptance.manual import Shown, entries
from tests.fakes.daemon import model_folder
from tests.service.specs import PLAIN

pytestmark = pytest.mark.mlx

NOBODY = 65534
LEAST_LOG_BYTES = 2**16
FILES, SIGNALS, STATUSES = Shown("FILES"), Shown("SIGNALS"), Shown("EXIT STATUS")


@pytest.fixture(scope="module")
def world(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A detached daemon with a model that runs, and one that can never fit; every check leaves it running."""
    models = {
        "chat": tiny_model("llama", 5_000_000),
        "huge": model_folder(tmp_path_factory.mktemp("huge") / "huge", 2**40),
    }
    settings = {"log_max_size": LEAST_LOG_BYTES, "log_backups": 1, "max_batch": 1, "max_waiting": 1}
    daemon = Daemon(models, daemon=settings)
    (daemon.home / "logs").mkdir()
    # What an earlier daemon has left: the next rotation is not far.
    line = json.dumps({"ts": 1.0, "level": "info", "event": "pinned", "model": "m" * 100}) + "\n"
    (daemon.home / "logs" / "omlxd.jsonl").write_text(line * ((LEAST_LOG_BYTES - 8000) // len(line)))
    try:
        assert daemon.start().returncode == 0
        yield daemon
        assert daemon.cli("stop", "--now").returncode == 0
    finally:
        daemon.close()


@pytest.mark.parametrize("shown", [FILES, SIGNALS, STATUSES], ids=lambda shown: shown.section)
def test_nothing_is_checked_that_the_page_does_not_say(shown: Shown) -> None:
    shown.require_entries()


@pytest.mark.parametrize("entry", entries("FILES"))
def test_each_file_is_what_the_page_says(entry: str, request: pytest.FixtureRequest) -> None:
    FILES.show(entry, request.getfixturevalue)


@pytest.mark.parametrize("entry", entries("SIGNALS"))
def test_each_signal_does_what_the_page_says(entry: str, request: pytest.FixtureRequest) -> None:
    SIGNALS.show(entry, request.getfixturevalue, signal.Signals[entry])


@pytest.mark.parametrize("entry", entries("EXIT STATUS"))
def test_each_exit_status_means_what_the_page_says(entry: str, request: pytest.FixtureRequest) -> None:
    STATUSES.show(entry, request.getfixturevalue, int(entry))


Fixture = Callable[[str], object]


def _world(fixture: Fixture) -> Daemon:
    found = fixture("world")
    assert isinstance(found, Daemon)
    return found


# FILES


@FILES.by("omlxd.toml")
def _manifest(fixture: Fixture) -> None:
    world = _world(fixture)
    assert world.status["manifest"] == str(world.home / "omlxd.toml")
    assert [model["name"] for model in world.cli_json("models")["models"]] == ["chat", "huge"]


@FILES.by("state.toml")
def _state(fixture: Fixture) -> None:
    world = _world(fixture)
    world.control("POST", "models/chat/pin")
    assert tomllib.loads((world.home / "state.toml").read_text())["pins"]["chat"]
    world.control("POST", "models/chat/unpin")
    assert world.cli("limit", "7G").returncode == 0
    assert "7G" in (world.home / "state.toml").read_text()
    assert world.cli("limit", "8G").returncode == 0
    world.control("POST", "models/chat/load")
    learned = world.control("GET", "models")["models"][0]["weights_bytes"]
    while not all(word in (world.home / "state.toml").read_text() for word in (str(learned), "loaded = [")):
        pass  # written in the background; the test's own timeout ends this


@FILES.by("omlxd.sock")
def _socket(fixture: Fixture) -> None:
    world = _world(fixture)
    seen = (world.home / "omlxd.sock").stat()
    assert stat.S_ISSOCK(seen.st_mode)
    assert stat.S_IMODE(seen.st_mode) == 0o600
    assert stat.S_IMODE(world.home.stat().st_mode) == 0o700, "readable by its owner only"
    assert world.control("GET", "status")["pid"] == world.pid


@FILES.by("omlxd.lock")
def _lock(fixture: Fixture) -> None:
    world = _world(fixture)
    with (world.home / "omlxd.lock").open() as lock:
        assert lock.read().strip() == str(world.status["pid"])
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@FILES.by("logs/omlxd.jsonl")
def _log(fixture: Fixture) -> None:
    world = _world(fixture)
    answer = world.chat("chat", "my secret is Rumpelstilzchen", max_tokens=8)
    assert answer.status == 200
    newest, old = world.home / "logs" / "omlxd.jsonl", world.home / "logs" / "omlxd.jsonl.1"
    seen = ""
    while not old.exists():
        seen = newest.read_text()
        for _ in range(20):
            world.control("POST", "models/huge/pin", {"force": True})
            world.control("POST", "models/huge/unpin")
    text = seen + old.read_text() + newest.read_text()
    assert all("event" in json.loads(line) for line in text.splitlines())
    assert "request_finished" in text
    assert "Rumpelstilzchen" not in text
    assert answer.json["choices"][0]["message"]["content"] not in text
    assert max(newest.stat().st_size, old.stat().st_size) <= LEAST_LOG_BYTES
    assert sorted(path.name for path in newest.parent.glob("omlxd.jsonl*")) == ["omlxd.jsonl", "omlxd.jsonl.1"]


@FILES.by("logs/stacks.txt")
def _stacks(fixture: Fixture) -> None:
    _usr1(fixture, signal.SIGUSR1)


@FILES.by("logs/daemon.err")
def _outside_of_the_log(fixture: Fixture) -> None:
    small = Daemon({})
    try:
        assert small.start().returncode == 0
        with (small.home / "omlxd.lock").open() as lock:
            os.kill(small.pid, signal.SIGABRT)  # what nobody can log: a crash
            fcntl.flock(lock, fcntl.LOCK_SH)
        assert "Fatal Python error: Aborted" in (small.home / "logs" / "daemon.err").read_text()
    finally:
        small.close()


@FILES.by("models", "demo")
def _demo(fixture: Fixture) -> None:
    kept = Path(str(fixture("smollm2_path")))
    daemon = Daemon({})
    home = daemon.home
    try:
        (home / "omlxd.toml").unlink()
        (home / "models").mkdir()
        (home / "models" / kept.name).symlink_to(kept)
        environment = {**os.environ, "OMLXD_HOME": str(home), "HF_HUB_OFFLINE": "1"}
        with subprocess.Popen([*OMLXD, "demo"], env=environment, stdout=subprocess.PIPE, text=True) as demo:
            assert demo.stdout is not None
            named = next(line for line in demo.stdout if line.startswith("  chat "))
            assert str(home / "models" / kept.name) in named
            assert [path.is_dir() for path in (home / "demo").iterdir()] == [True]
            demo.send_signal(signal.SIGINT)
            demo.stdout.read()
        assert [path.name for path in home.iterdir()] == ["models"]
    finally:
        daemon.close()


@FILES.by("chat_history")
def _typed(fixture: Fixture) -> None:
    world = _world(fixture)
    environment = {**os.environ, "OMLXD_HOME": str(world.home), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    terminal = pexpect.spawn(
        OMLXD[0], [*OMLXD[1:], "run", "chat"], env=environment, encoding="utf-8", timeout=TIMEOUT_S
    )
    terminal.expect(">>>")
    terminal.send("/help\r")
    terminal.expect("Alt-Enter")
    terminal.expect(">>>")
    terminal.sendcontrol("d")
    terminal.expect(pexpect.EOF)
    terminal.close()
    history = world.home / "chat_history"
    assert "+/help\n" in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


@FILES.by("~/.config/systemd/user/omlxd.service")
def _unit(fixture: Fixture) -> None:
    host = Systemctl(_nothing_runs, {"HOME": "/home/me"})
    assert host.path("omlxd") == Path("/home/me/.config/systemd/user/omlxd.service")


@FILES.by("~/Library/LaunchAgents/org.omlxd.plist", "/Library/LaunchDaemons/org.omlxd.plist")
def _property_list(fixture: Fixture) -> None:
    agent, machine = (Launchctl(_nothing_runs, 501, Path("/Users/me"), system) for system in (False, True))
    assert agent.path("omlxd") == Path("/Users/me/Library/LaunchAgents/org.omlxd.plist")
    assert machine.path("omlxd") == Path("/Library/LaunchDaemons/org.omlxd.plist")
    assert plistlib.loads(machine.text(replace(PLAIN, user="me")).encode())["UserName"] == "me"


def _nothing_runs(command: object) -> object:
    raise AssertionError(f"{command} was run for the name of a file")


# SIGNALS


@SIGNALS.by("SIGTERM", "SIGINT")
def _drains(fixture: Fixture, number: signal.Signals) -> None:
    small = fixture("tiny_model")("llama", 5_000_000)  # type: ignore[operator]
    with contextlib.closing(Daemon({"chat": small}, daemon={"drain_timeout": "60s"}).spawn()) as daemon:
        assert daemon.process is not None
        with (
            daemon.chat_stream("chat", "Go on.", max_tokens=20_000) as endless,
            daemon.chat_stream("chat", "And you?", max_tokens=30) as short,
        ):
            endless.until(has_text)
            first = short.until(has_text)
            daemon.process.send_signal(number)
            daemon.until_event("daemon_draining", asked_by=number.name)
            refused = daemon.chat("chat", "And I?")
            assert (refused.status, refused.json["error"]["code"]) == (503, "shutting_down")
            frames = [first, *short]
            assert not errors_in(frames), "a running request may finish"
            assert text_of(frames)
            endless.until(has_text)
            daemon.process.send_signal(number)
            assert len(errors_in(list(endless))) == 1, "the second one ends at once"
        assert daemon.wait() == 1


@SIGNALS.by("SIGHUP")
def _reloads(fixture: Fixture, number: signal.Signals) -> None:
    world = _world(fixture)
    manifest, pid = world.home / "omlxd.toml", world.status["pid"]
    before = manifest.read_text()
    for text, there in ((f'{before}[models.new]\npath = "/nowhere"\n', True), (before, False)):
        manifest.write_text(text)
        os.kill(pid, number)
        while ("new" in world.states) is not there:
            pass
    assert world.until_event("manifest_reloaded", added=["new"])
    assert world.until_event("manifest_reloaded", removed=["new"])
    assert world.status["pid"] == pid


@SIGNALS.by("SIGUSR1")
def _usr1(fixture: Fixture, number: signal.Signals) -> None:
    world = _world(fixture)
    stacks = world.home / "logs" / "stacks.txt"
    for _ in range(2):
        before = stacks.read_text().count("(most recent call first)")
        os.kill(world.status["pid"], number)
        while stacks.read_text().count("(most recent call first)") <= before:
            pass
        assert world.status["state"] == "ready", "it goes on"


# EXIT STATUS


@STATUSES.by("0")
def _done(fixture: Fixture, status: int) -> None:
    done = _world(fixture).cli("status")
    assert (done.returncode, done.stderr) == (status, "")
    assert "chat" in done.stdout


@STATUSES.by("1")
def _failed(fixture: Fixture, status: int) -> None:
    _says(_world(fixture).cli("start"), status, "already running")


@STATUSES.by("2")
def _wrong(fixture: Fixture, status: int) -> None:
    world = _world(fixture)
    _says(world.cli("limit", "much"), status, "`much` is not a size")
    _says(world.cli("run", "chat", "hi", "--temperature", "-3"), status, "temperature")


@STATUSES.by("3")
def _not_running(fixture: Fixture, status: int) -> None:
    elsewhere = str(_world(fixture).home / "none")
    for command in (("status",), ("load", "chat"), ("run", "chat", "hi")):
        _says(_world(fixture).cli("--home", elsewhere, *command), status, "not running")


@STATUSES.by("4")
def _unknown(fixture: Fixture, status: int) -> None:
    _says(_world(fixture).cli("load", "chad"), status, "chad")


@STATUSES.by("5")
def _does_not_fit(fixture: Fixture, status: int) -> None:
    _says(_world(fixture).cli("load", "huge"), status, "huge")


@STATUSES.by("69")
def _does_not_answer(fixture: Fixture, status: int) -> None:
    world = _world(fixture)
    aside = world.home / "aside"
    (world.home / "omlxd.sock").rename(aside)
    try:
        _says(world.cli("status"), status, str(world.pid))
    finally:
        aside.rename(world.home / "omlxd.sock")


@STATUSES.by("75")
def _later(fixture: Fixture, status: int) -> None:
    world = _world(fixture)
    with world.chat_stream("chat", "Go on.", max_tokens=20_000) as running:
        running.until(has_text)
        with world.chat_stream("chat", "And then?", max_tokens=20_000):
            while [each["state"] for each in world.requests].count("waiting") < 1:
                pass
            _says(world.cli("run", "chat", "hi"), status, "wait")
    world.until_idle()


@STATUSES.by("77")
def _not_permitted(fixture: Fixture, status: int) -> None:
    world = _world(fixture)
    closed = world.home / "closed.toml"
    closed.touch(0o000)
    try:
        command = [*OMLXD, "check", "--manifest", str(closed)]
        mortal = None if os.geteuid() else _obey_modes
        done = subprocess.run(
            command, preexec_fn=mortal, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    finally:
        closed.unlink()
    _says(done, status, "may not be read")
    if os.geteuid() == 0:  # only root can give a home away
        other = world.home / "other"
        other.mkdir(0o700)
        os.chown(other, NOBODY, NOBODY)
        (other / "omlxd.toml").touch()
        _says(world.cli("--home", str(other), "start"), status, "another user")


def _obey_modes() -> None:
    """Give up, in a child to be, root's right to pass over the modes of files: PR_CAPBSET_DROP of CAP_DAC_*."""
    for capability in (1, 2):
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)


@STATUSES.by("78")
def _bad_manifest(fixture: Fixture, status: int) -> None:
    bad = _world(fixture).home / "bad.toml"
    bad.write_text("[daemon]\nno_such_key = 1\n")
    elsewhere = str(_world(fixture).home / "elsewhere")
    _says(_world(fixture).cli("check", "--manifest", str(bad)), status, "no_such_key")
    _says(_world(fixture).cli("--home", elsewhere, "start", "--manifest", str(bad)), status, "no_such_key")


@STATUSES.by("130")
def _interrupted(fixture: Fixture, status: int) -> None:
    world = _world(fixture)
    environment = {**os.environ, "OMLXD_HOME": str(world.home)}
    with subprocess.Popen(
        [*OMLXD, "events", "-n", "1"], env=environment, stdout=subprocess.PIPE, text=True
    ) as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        assert watching.wait(TIMEOUT_S) == status


def _says(done: subprocess.CompletedProcess[str], status: int, words: str) -> None:
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stderr.startswith("error: "), "the message says why"
    assert words in done.stderr
