"""A disk without room, under the log and the state file: serving goes on, and both come back with the room."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.acceptance.harness import Daemon
from tests.faults.asking import ask_all, judge
from tests.faults.campaign import Campaign, events
from tests.faults.tally import Tally

TMPFS_BYTES = 512 * 1024
LINES_OF_A_PAGE = 30


def run(campaign: Campaign) -> Iterator[Tally]:
    """By a bound on what the process may write to a file, and by a file system that is full."""
    if sys.platform == "linux":
        yield _no_file_may_grow(campaign)
    yield _full_file_system(campaign)


def _no_file_may_grow(campaign: Campaign) -> Tally:
    tally, daemon = Tally("disk full: no file may grow, with requests under way"), campaign.daemon
    daemon.control("POST", "models/small/load")
    process = psutil.Process(daemon.pid)
    _, most = process.rlimit(resource.RLIMIT_FSIZE)
    for _ in range(campaign.times(10, 1)):
        process.rlimit(resource.RLIMIT_FSIZE, (1, most))
        try:
            _serves_and_pins(campaign, daemon, tally, saved=False)
        finally:
            process.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, most))
        _serves_and_pins(campaign, daemon, tally, saved=True)
        tally.times += 1
    campaign.check_serves(tally)
    campaign.check_base(tally)
    return tally


def _full_file_system(campaign: Campaign) -> Tally:
    tally = Tally("disk full: the home's file system, a tmpfs")
    home = Path(tempfile.mkdtemp(prefix="omlxd-", dir="/tmp"))
    if not _mount(home):
        shutil.rmtree(home)
        tally.note = "left out: it takes root, and Linux, to mount one"
        return tally
    daemon = campaign.daemon_in(home, log_max_size=TMPFS_BYTES)  # no rotation that would make room
    try:
        home.chmod(0o700)
        daemon.spawn()
        if not campaign.short:
            daemon.control("POST", "models/small/load")
        for _ in range(campaign.times(10, 1)):
            ballast = home / "logs" / "ballast"
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(256))
            for _ in range(LINES_OF_A_PAGE):  # what is left of the log's last page
                daemon.control("POST", "models/medium/pin", {})
                daemon.control("POST", "models/medium/unpin", {})
            _serves_and_pins(campaign, daemon, tally, saved=False, asks=not campaign.short)
            ballast.unlink()
            _serves_and_pins(campaign, daemon, tally, saved=True, asks=not campaign.short)
            tally.times += 1
        if daemon.terminate() != 0:
            tally.wrong.append("it did not end with 0")
    finally:
        daemon.process.kill()
        daemon.wait()
        subprocess.run(["umount", str(home)], check=False)
        shutil.rmtree(home)
    return tally


def _mount(place: Path) -> bool:
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "omlxd-faults", str(place)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _serves_and_pins(campaign: Campaign, daemon: Daemon, tally: Tally, *, saved: bool, asks: bool = True) -> None:
    """With a full disk (not `saved`) a pin is set, and with room it is taken away."""
    pinned = not saved
    asked = ask_all(daemon, "small") if asks else []
    answer = daemon.ask("POST", f"/v1/control/models/twin/{'pin' if pinned else 'unpin'}", {})
    if answer.status != 200:
        tally.wrong.append(f"pinning: {answer.body!r}")
    elif bool(answer.json["warnings"]) is saved:
        tally.wrong.append(f"pinning warns {answer.json['warnings']}, and the state could be saved: {saved}")
    if answer.json["model"]["pinned"] is not pinned:
        tally.wrong.append(f"the pin is not in force: {answer.body!r}")
    for each in asked:
        outcome = each.result()
        judge(tally, outcome, campaign.right("small", outcome.prompt))
    if not saved:
        return
    pins = tomllib.loads((daemon.home / "state.toml").read_text())["pins"]
    if pins["twin"]["pinned"] is not pinned:
        tally.wrong.append(f"the pin is not in the state file: {pins}")
    if not events(daemon, "log_error"):
        tally.wrong.append("the log does not tell of the lines that were lost")
