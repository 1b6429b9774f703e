"""`omlxd service` on Linux, with a stand-in for `systemctl` that starts what the unit says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from omlxd.cli.holder import holder_of
from tests.cli.conftest import Omlxd

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux's")

FAKE = Path(__file__).parent / "fake_systemctl.py"


@dataclass
class Machine:
    """A user's home directory and their systemd."""

    call: Callable[..., subprocess.CompletedProcess[str]]
    folder: Path
    omlxd_home: Path

    def service(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.call("service", *arguments, **variables)

    @property
    def unit(self) -> Path:
        (found,) = (self.folder / ".config" / "systemd" / "user").iterdir()
        return found

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def machine(omlxd: Omlxd, home: Path, tmp_path: Path) -> Iterator[Machine]:
    folder = tmp_path / "user"
    folder.mkdir()
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {FAKE} "{folder}" "$@"\n')
    program.chmod(0o755)
    own = home / "a home, ü"
    own.mkdir(mode=0o700)
    (own / "omlxd.toml").write_text('[daemon]\nmax_memory = "64M"\ndrain_timeout = "1s"\n[api]\nlisten = "off"\n')

    def call(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        variables = {"PATH": f"{program.parent}:{os.environ['PATH']}", "HOME": str(folder)} | variables
        return omlxd(*arguments, OMLXD_HOME=str(own), **variables)

    yield Machine(call, folder, own)
    if (holder := holder_of(own / "omlxd.lock")) is not None and holder.pid is not None:
        os.kill(holder.pid, signal.SIGKILL)


def test_show_needs_neither_systemd_nor_a_manifest_that_is_well(machine: Machine) -> None:
    (machine.omlxd_home / "omlxd.toml").write_text("[daemon]\nno_such_key = 1\n")
    nowhere = machine.folder / "nowhere"
    nowhere.mkdir()
    done = machine.service("show", PATH=str(nowhere))
    assert done.returncode == 0
    assert "ExecStart=" in done.stdout
    assert done.stderr.startswith("warning: the manifest ")
    assert "`omlxd service install` would refuse it" in done.stderr


@pytest.mark.slow
def test_from_install_to_uninstall(machine: Machine) -> None:
    assert machine.service("start").stderr.startswith("error: the service is not installed\nhint: ")
    installed = machine.service("install")
    assert (installed.returncode, installed.stderr) == (0, "next: `omlxd service start`\n")
    assert installed.stdout == f"installed {machine.unit}\n"
    assert machine.unit.stat().st_mode & 0o777 == 0o600

    started = machine.service("start")
    assert (started.returncode, started.stderr) == (0, "")
    assert started.stdout.startswith("omlxd answers: pid ")
    found = json.loads(machine.service("status", "--json").stdout)
    assert (found["state"], found["installed"], found["enabled"], found["edited"]) == ("running", True, True, False)
    assert holder_of(machine.omlxd_home / "omlxd.lock").pid == found["pid"]  # type: ignore[union-attr]
    assert f"systemd: running, pid {found['pid']}" in machine.service("status").stdout

    refused = machine.call("restart", "--max-memory", "1G")
    assert refused.returncode == 2
    assert "error: systemd runs this daemon as `omlxd-" in refused.stderr
    restarted = machine.call("restart")
    assert (restarted.returncode, restarted.stderr) == (0, f"omlxd stopped (pid {found['pid']})\n")
    again = json.loads(machine.service("status", "--json").stdout)
    assert again["state"] == "running", "as a service, and not beside it"
    assert restarted.stdout.startswith(f"omlxd answers: pid {again['pid']}")
    assert again["pid"] != found["pid"]

    (machine.omlxd_home / "state.toml.new").mkdir()  # in the way of each write of the state
    assert "in force, but not saved" in machine.call("limit", "48M").stderr
    assert machine.call("restart").returncode == 75
    forced = machine.call("restart", "--force")
    assert "limit 48.0 MiB" in forced.stdout
    assert "in force, but not saved" in forced.stderr
    assert json.loads(machine.service("status", "--json").stdout)["state"] == "running"

    assert machine.service("stop").returncode == 0
    assert holder_of(machine.omlxd_home / "omlxd.lock") is None
    unit = machine.unit
    assert machine.service("uninstall").stdout == f"removed {unit}\n"
    assert not unit.exists()
    assert machine.service("uninstall").stdout == "the service is not installed\n"
    assert (machine.omlxd_home / "omlxd.toml").exists()


def test_installing_twice_changes_nothing_and_an_edit_is_kept(machine: Machine) -> None:
    machine.service("install")
    again = machine.service("install")
    assert (again.returncode, again.stdout) == (0, f"already installed: {machine.unit}\n")
    assert machine.unit.read_text() == machine.service("show").stdout
    edited = machine.unit.read_text().replace("WatchdogSec=180", "WatchdogSec=600")
    machine.unit.write_text(edited)
    for verb in ("install", "uninstall"):
        refused = machine.service(verb)
        assert refused.returncode == 2
        assert "was edited and is left as it is" in refused.stderr
        assert machine.unit.read_text() == edited
    assert "(edited)" in machine.service("status").stdout


def test_the_doctor_sees_a_service_that_cannot_start(machine: Machine) -> None:
    machine.service("install")
    assert "✓ service " in machine.call("doctor").stdout
    unit = machine.unit
    unit.write_text(unit.read_text().replace(sys.executable, "/opt/gone/bin/python"))
    done = machine.call("doctor")
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if " service " in line]
    assert line.startswith("✗ service ")
    assert "it starts `/opt/gone/bin/python`, which does not exist; `omlxd service install`" in line


def test_what_the_daemon_needs_of_the_environment_goes_along_and_secrets_only_when_asked_for(machine: Machine) -> None:
    shell = {"HF_HOME": "/models of mine", "OMLXD_API_KEY": "secret", "OTHER": "x"}
    lines = machine.service("show", "--env", "A=1 2", **shell).stdout.splitlines()
    assert {'Environment="HF_HOME=/models of mine"', 'Environment="A=1 2"'} <= set(lines)
    assert not [line for line in lines if "secret" in line or "OTHER" in line]
    assert 'Environment="OMLXD_API_KEY=secret"' in machine.service("show", "--env", "OMLXD_API_KEY", **shell).stdout
    assert machine.service("show", "--env", "NOT_SET").stderr.startswith("error: `NOT_SET` is not set here\n")


def test_a_bad_manifest_is_not_installed(machine: Machine) -> None:
    (machine.omlxd_home / "omlxd.toml").write_text("[daemon]\nno_such_key = 1\n")
    refused = machine.service("install")
    assert refused.returncode == 78
    assert "no_such_key" in refused.stderr
    assert not (machine.folder / ".config").exists()


def test_another_manifest_is_named_absolutely(machine: Machine) -> None:
    other = machine.folder / "my models.toml"
    other.write_text('[api]\nlisten = "off"\n')
    assert f'"--manifest" "{other}"' in machine.service("show", "--manifest", str(other)).stdout


def test_without_a_systemd_that_answers_nothing_is_written(machine: Machine) -> None:
    (machine.folder / "broken").touch()
    refused = machine.service("install")
    assert refused.returncode == 1
    first, hint = refused.stderr.splitlines()
    assert first == "error: no systemd of yours answers here (No medium found)"
    assert "enable-linger" in hint
    told = machine.call("--debug", "service", "install").stderr
    assert "`systemctl --user show" in told
    assert "Failed to connect to bus: No medium found" in told
    assert not (machine.folder / ".config").exists()


@pytest.mark.slow
def test_a_service_whose_daemon_ends_at_once_is_not_waited_for(machine: Machine) -> None:
    machine.service("install")
    (machine.omlxd_home / "omlxd.toml").write_text("[daemon]\nno_such_key = 1\n")
    refused = machine.service("start")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: the service's daemon did not answer (failed)\nhint: `omlxd check`; ")


def test_without_an_action_the_command_says_what_is_missing(machine: Machine) -> None:
    done = machine.service()
    assert (done.returncode, done.stderr) == (2, "error: missing command\nhint: `omlxd service --help`\n")
