"""`omlxd service` under a real `systemd --user`: install, crashes, hangs, a bad manifest, the next login, uninstall."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from omlxd.service.spec import service_name
from tests.service.user_manager import CannotRun, UserManager, user_manager

pytestmark = pytest.mark.slow

SMALL = '[daemon]\nmax_memory = "64M"\nmin_available = 0\ndrain_timeout = "1s"\n[api]\nlisten = "off"\n'


class Service:
    """One home, and its service under one manager."""

    def __init__(self, manager: UserManager, home: Path, manifest: str = SMALL) -> None:
        self.manager, self.home = manager, home
        home.mkdir(mode=0o700, exist_ok=True)
        (home / "omlxd.toml").write_text(manifest)

    def omlxd(self, *arguments: str, status: int = 0) -> str:
        """Its output, of both kinds."""
        done = self.manager.run(sys.executable, "-m", "omlxd", "--home", str(self.home), *arguments, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    @property
    def unit(self) -> str:
        default = Path(self.manager.environment["HOME"]) / ".omlxd"
        return f"{service_name(self.home, default)}.service"

    @property
    def pid(self) -> int:
        return int(self.manager.show(self.unit, "MainPID"))

    def set(self, *lines: str) -> None:
        """Change settings of the unit in the user's own way, beside our file."""
        folder = Path(self.manager.environment["HOME"]) / ".config" / "systemd" / "user" / f"{self.unit}.d"
        folder.mkdir()
        (folder / "test.conf").write_text("\n".join(("[Service]", *lines)) + "\n")
        self.manager.systemctl("daemon-reload")

    def kill(self, signal: str, pid: int) -> None:
        self.manager.run("kill", f"-{signal}", str(pid))


@pytest.fixture(scope="module")
def user() -> Iterator[Path]:
    """A home directory with a short path, a space and a letter beyond ASCII."""
    folder = Path(tempfile.mkdtemp(prefix="omlxd ü-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def manager(user: Path) -> Iterator[UserManager]:
    try:
        with user_manager(user, user / "systemd.log") as manager:
            yield manager
    except CannotRun as why:
        pytest.skip(str(why))


def test_it_runs_comes_back_after_a_crash_and_at_the_next_login_and_stays_away_when_asked_to(
    manager: UserManager, user: Path
) -> None:
    service = Service(manager, user / ".omlxd")
    other = user / "my models.toml"
    other.write_text(SMALL)
    service.omlxd("service", "install", "--manifest", str(other), "--env", "WORDS=two words, 50% of $HOME")
    service.set("RestartSec=10ms")
    assert manager.systemctl("is-enabled", "omlxd") == "enabled"
    assert "omlxd answers" in service.omlxd("service", "start")
    first = service.pid
    status = json.loads(service.omlxd("status", "--json"))
    assert (status["pid"], status["manifest"]) == (first, str(other))
    variables = manager.run("cat", f"/proc/{first}/environ").stdout.split("\0")
    assert "WORDS=two words, 50% of $HOME" in variables

    service.kill("KILL", first)
    manager.until("omlxd", ActiveState="active", NRestarts="1")
    second = service.pid
    assert second != first
    assert "omlxd answers" in service.omlxd("service", "start"), "one that runs is left alone"
    assert service.pid == second

    assert "with the options of its service" in service.omlxd("restart", "--max-memory", "1G", status=2)
    assert "omlxd answers" in service.omlxd("restart")
    manager.until("omlxd", ActiveState="active", NRestarts="0")
    third = service.pid
    assert third not in (first, second), "it is the service's daemon still"
    manager.systemctl("reload", "omlxd")
    while '"manifest_reloaded"' not in (service.home / "logs" / "omlxd.jsonl").read_text():
        pass
    assert service.pid == third

    service.omlxd("stop")
    manager.until("omlxd", ActiveState="inactive", Result="success")
    with user_manager(user, user / "systemd.log") as next_login:
        next_login.until("omlxd", ActiveState="active", NRestarts="0")
        next_login.systemctl("stop", "omlxd")
        next_login.until("omlxd", ActiveState="inactive", Result="success", ExecMainStatus="0")
    service.omlxd("service", "uninstall")
    assert manager.show("omlxd", "LoadState") == "not-found"


def test_a_bad_manifest_fails_once_and_is_not_tried_again(manager: UserManager, user: Path) -> None:
    service = Service(manager, user / "bad")
    service.omlxd("service", "install")
    service.set("RestartSec=10ms")
    (service.home / "omlxd.toml").write_text("[daemon]\nno_such_key = 1\n")
    assert "did not answer (failed)" in service.omlxd("service", "start", status=1)
    assert manager.show(service.unit, "ExecMainStatus") == "78"
    assert manager.show(service.unit, "NRestarts") == "0"
    assert "systemd: failed, last exit status 78" in service.omlxd("service", "status")
    service.omlxd("service", "uninstall")


def test_one_that_crashes_at_once_is_given_up_or_waited_for_longer_each_time(manager: UserManager, user: Path) -> None:
    service = Service(manager, user / "crash")
    service.omlxd("service", "install")
    service.set("RestartSec=1ms", "ExecStart=", "ExecStart=/bin/false")
    if "StartLimitBurst=10" in service.omlxd("service", "show"):
        assert "did not answer (failed)" in service.omlxd("service", "start", status=1)
        manager.until(service.unit, ActiveState="failed", NRestarts="10")
    else:
        manager.systemctl("start", "--no-block", service.unit)
        manager.until(service.unit, ActiveState="activating", NRestarts="3")
    service.omlxd("service", "uninstall")


def test_one_that_hangs_is_ended_and_started_again(manager: UserManager, user: Path) -> None:
    service = Service(manager, user / "hang")
    service.omlxd("service", "install")
    service.set("WatchdogSec=2s", "RestartSec=10ms")
    service.omlxd("service", "start")
    hung, unit = service.pid, service.unit
    service.kill("STOP", hung)
    manager.until(unit, ActiveState="active", NRestarts="1")
    assert service.pid != hung
    service.omlxd("service", "uninstall")
