"""A home on a full disk or one that cannot be written: the start says so, the daemon goes on; on a real file system."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.wire import Answer, ask

MANIFEST = '[daemon]\nmax_memory = "100M"\n[api]\nlisten = "off"\n[models.a]\npath = "/nowhere"\n'
Omlxd = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def disk() -> Iterator[Path]:
    """An empty file system of 256 KiB."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root on Linux can mount a small file system")
    with tempfile.TemporaryDirectory(prefix="omlxd-disk-", dir="/tmp") as name:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "none", name], capture_output=True
        )
        if mounted.returncode != 0:
            pytest.skip(f"this machine mounts nothing: {mounted.stderr.decode().strip()}")
        try:
            (Path(name) / "omlxd.toml").write_text(MANIFEST)
            yield Path(name)
        finally:
            subprocess.run(["umount", "-l", name], check=True)


@pytest.fixture
def omlxd(disk: Path) -> Iterator[Omlxd]:
    """The command for a home on that disk; its daemon is ended."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "omlxd", "--home", str(disk), *arguments]
        return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)

    yield call
    call("stop", "--now")


def fill(disk: Path) -> Path:
    """Leave no byte free."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1024)):
            pass
    return filler


def control(disk: Path, method: str, path: str) -> Answer:
    return ask(disk / "omlxd.sock", method, f"/v1/control/{path}")


def test_on_a_full_disk_it_starts_and_serves_and_what_cannot_be_saved_is_said(disk: Path, omlxd: Omlxd) -> None:
    filler = fill(disk)
    started = omlxd("start")
    assert started.returncode == 0
    assert started.stderr.startswith("warning: nothing can be saved: No space left on device\nwarning: `a` cannot be")
    pinned = omlxd("pin", "a")
    assert pinned.returncode == 0
    assert "warning: in force, but not saved: No space left on device" in pinned.stderr
    reloaded = omlxd("reload")
    assert (reloaded.returncode, reloaded.stderr) == (0, "warning: in force, but not saved: No space left on device\n")
    assert control(disk, "GET", "models").json["models"][0]["pinned"] is True
    trouble = control(disk, "GET", "status").json["log_trouble"]
    assert re.fullmatch(r"\d+ lines not written: No space left on device", trouble)
    assert re.search(f"the log is not whole\nmemory(?s:.*)\nlog     {trouble}\n", omlxd("status").stdout)
    notes = [f"the log has not all that happened, {trouble}", "now `a` is not loaded: that the daemon says itself"]
    assert omlxd("why", "a").stderr.splitlines()[-2:] == notes
    assert json.loads(omlxd("why", "a", "--json").stdout)["log_trouble"] == trouble
    filler.unlink()
    for command in ("unpin", "pin"):  # the line after the first that was written again tells of the lost ones
        assert "not saved" not in omlxd(command, "a").stderr
    assert "[pins.a]" in (disk / "state.toml").read_text()
    assert "of the log were lost" in omlxd("logs").stdout
    assert control(disk, "GET", "status").json["log_trouble"] is None
    assert re.search(r"lines of the log were lost.*: this may not be all\n", omlxd("why", "a").stderr)
    stopped = omlxd("stop")
    assert (stopped.returncode, stopped.stderr) == (0, "")


@pytest.mark.slow
def test_on_a_full_disk_a_restart_neither_widens_the_limit_nor_loses_a_pin_unasked(disk: Path, omlxd: Omlxd) -> None:
    (disk / "omlxd.toml").write_text(MANIFEST.replace('[daemon]\nmax_memory = "100M"\n', ""))
    assert omlxd("start", "--max-memory", "100M").returncode == 0
    filler = fill(disk)
    for command in (["pin", "a"], ["limit", "80M"]):
        assert "in force, but not saved: No space left on device" in omlxd(*command).stderr
    pid = control(disk, "GET", "status").json["pid"]
    refused = omlxd("restart")
    assert refused.returncode == 75
    assert "would lose what could not be saved, the limit and pins: No space left on device" in refused.stderr
    assert "`omlxd restart --force`" in refused.stderr
    assert control(disk, "GET", "status").json["pid"] == pid
    forced = omlxd("restart", "--force")
    assert "limit 80.0 MiB" in forced.stdout
    filler.unlink()
    assert "not saved" not in omlxd("pin", "a").stderr
    again = omlxd("restart")
    assert (again.returncode, "limit 80.0 MiB" in again.stdout) == (0, True)
    assert control(disk, "GET", "models").json["models"][0]["pinned"] is True


def test_a_disk_that_cannot_be_written_is_named_by_the_start(disk: Path, omlxd: Omlxd) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for command in (["start"], ["start", "--foreground"]):
        refused = omlxd(*command)
        assert refused.returncode == 1
        assert refused.stderr.startswith(f"error: cannot write `{disk}/")
        assert "Read-only file system" in refused.stderr
        assert "hint: name another home" in refused.stderr
        assert "Traceback" not in refused.stderr
