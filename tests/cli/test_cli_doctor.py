"""`omlxd doctor` over real homes: what is well, what is wrong, and the exit status."""

from __future__ import annotations

import fcntl
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Omlxd
from tests.cli.fake_daemon import FakeDaemon
from tests.fakes.daemon import model_folder

MIB = 2**20


@pytest.fixture
def whole(home: Path, tmp_path: Path) -> Path:
    """A home with a manifest of one model whose folder is whole."""
    folder = model_folder(tmp_path / "chat", 10 * MIB)
    (home / "omlxd.toml").write_text(f'[daemon]\nmax_memory = "100M"\n[models.chat]\npath = "{folder}"\npin = true\n')
    return home


def examined(omlxd: Omlxd, **variables: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit status, and the findings by check; of several of one check the last."""
    done = omlxd("doctor", "--json", **variables)
    body = json.loads(done.stdout)
    assert body["ok"] == (done.returncode == 0)
    return done.returncode, {finding["check"]: finding for finding in body["checks"]}


def test_a_home_in_order_has_a_tick_in_each_line(omlxd: Omlxd, whole: Path) -> None:
    done = omlxd("doctor", HOME=str(whole))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    for check in (
        "mlx",
        "mlx-lm",
        "backend",
        "limits",
        "model",
        "pins",
        "socket",
        "logs",
        "clock",
        "daemon",
        "service",
    ):
        assert [line for line in lines if line.startswith(f"✓ {check} ")], done.stdout
    assert omlxd("doctor", HOME=str(whole), LC_ALL="C").stdout.startswith("+ mlx ")


def test_everything_that_is_wrong_is_told_at_once_with_its_remedy(omlxd: Omlxd, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "chat" / "model.safetensors").unlink()
    whole.chmod(0o755)
    (whole / "state.toml.damaged").touch()
    (whole / "omlxd.sock").touch()
    status, found = examined(omlxd)
    assert status == 1
    assert [check for check, finding in found.items() if finding["health"] == "wrong"] == ["model", "home", "socket"]
    assert found["files"]["health"] == "warning"
    assert found["home"]["remedy"] == f"`chmod 700 '{whole}'`"
    assert found["model"]["found"].startswith("`chat`: ")
    assert all(finding["remedy"] for finding in found.values() if finding["health"] != "ok")


def test_a_bad_manifest_and_pins_over_the_limit_are_wrong(omlxd: Omlxd, whole: Path) -> None:
    text = (whole / "omlxd.toml").read_text()
    (whole / "omlxd.toml").write_text(text.replace("100M", "5M"))
    status, found = examined(omlxd)
    assert (status, found["pins"]["health"], found["model"]["health"]) == (1, "wrong", "wrong")
    (whole / "omlxd.toml").write_text("[daemon]\nno_such_key = 1\n")
    status, found = examined(omlxd)
    assert (status, found["manifest"]["health"]) == (1, "wrong")
    assert "no_such_key" in found["manifest"]["found"]


def test_a_socket_that_a_killed_daemon_left_is_no_fault(omlxd: Omlxd, whole: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(whole / "omlxd.sock"))
    (whole / "omlxd.sock").chmod(0o600)
    status, found = examined(omlxd)
    assert (status, found["daemon"]["found"]) == (0, "not running")
    assert "left by a daemon" in found["socket"]["found"]


def test_a_home_that_does_not_exist_is_a_warning_beside_the_missing_manifest(omlxd: Omlxd, home: Path) -> None:
    status, found = examined(omlxd, OMLXD_HOME=str(home / "none"))
    assert (status, found["home"]["health"], found["manifest"]["health"]) == (1, "warning", "wrong")
    assert not (home / "none").exists()


def test_the_daemon_that_holds_the_lock_is_asked(omlxd: Omlxd, whole: Path, fake: FakeDaemon) -> None:
    (whole / "omlxd.sock").chmod(0o600)
    with (whole / "omlxd.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, found = examined(omlxd)
        assert (status, found["daemon"]["health"]) == (0, "ok")
        assert found["daemon"]["found"].startswith("omlxd 0.1.0, ")
        fake.close()
        status, found = examined(omlxd)
        assert (status, found["daemon"]["health"]) == (1, "wrong")
