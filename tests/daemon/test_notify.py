"""What a service manager is told: by a real daemon process over a real socket, and by the watchdog in virtual time."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from omlxd.daemon.notify import ServiceManager, take_service_manager
from omlxd.daemon.watchdog import Watchdog
from tests.fakes.clock import on_virtual_time
from tests.fakes.engine import FakeEngine

TIMEOUT_S = 60.0


@contextmanager
def manager_socket(address: str) -> Iterator[socket.socket]:
    """What systemd listens on; an address that begins with `@` is an abstract one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.settimeout(TIMEOUT_S)
        listening.bind("\0" + address[1:] if address.startswith("@") else address)
        yield listening


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="omlxd-n-", dir="/tmp") as made:
        yield Path(made)


def spawn(folder: Path, text: str, *options: str, **variables: str) -> subprocess.Popen[bytes]:
    home = folder / "h"
    home.mkdir(mode=0o700)
    (home / "omlxd.toml").write_text(text)
    with (folder / "err").open("wb") as err:
        return subprocess.Popen(
            [sys.executable, "-m", "omlxd.daemon", "--home", str(home), *options],
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stderr=err,
            start_new_session=True,
        )


GOOD = '[daemon]\nmax_memory = "100M"\ndrain_timeout = "7s"\n[api]\nlisten = "off"\n'


@pytest.mark.parametrize(
    "kind",
    ["path", pytest.param("abstract", marks=pytest.mark.skipif(sys.platform != "linux", reason="Linux has them"))],
)
def test_a_daemon_says_ready_gives_signs_of_life_and_says_that_it_stops(folder: Path, kind: str) -> None:
    address = str(folder / "notify") if kind == "path" else f"@{folder}/notify"
    with manager_socket(address) as manager:
        variables = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "400000"}
        process = spawn(folder, GOOD, "--supervisor", "systemd", **variables)
        try:
            assert manager.recv(4096).decode().split("\n") == ["READY=1", f"MAINPID={process.pid}"]
            assert (folder / "h" / "omlxd.sock").exists()
            assert manager.recv(4096) == b"WATCHDOG=1"
            assert manager.recv(4096) == b"WATCHDOG=1"
            process.terminate()
            said = b"WATCHDOG=1"
            while said == b"WATCHDOG=1":
                said = manager.recv(4096)
            assert said.decode().split("\n") == ["STOPPING=1", "EXTEND_TIMEOUT_USEC=37000000"]
            assert process.wait(TIMEOUT_S) == 0
        finally:
            process.kill()
            process.wait(TIMEOUT_S)


@pytest.mark.parametrize(
    ("options", "status"), [((), 78), (("--supervisor", "systemd"), 78), (("--supervisor", "launchd"), 0)]
)
def test_a_bad_manifest_ends_so_that_nobody_starts_it_again(
    folder: Path, options: tuple[str, ...], status: int
) -> None:
    process = spawn(folder, "[daemon]\nno_such_key = 1\n", *options)
    assert process.wait(TIMEOUT_S) == status
    assert "no_such_key" in (folder / "err").read_text()


@pytest.mark.parametrize(("supervisor", "status"), [("systemd", 2), ("launchd", 0)])
def test_neither_is_one_started_again_whose_command_line_is_wrong(folder: Path, supervisor: str, status: int) -> None:
    process = spawn(folder, GOOD, "--supervisor", supervisor, "--max-memory", "much")
    assert process.wait(TIMEOUT_S) == status
    assert "`much` is not a size" in (folder / "err").read_text()


@pytest.mark.parametrize(("options", "status"), [((), 1), (("--supervisor", "systemd"), 0)])
def test_an_end_in_a_hurry_is_no_failure_to_whoever_would_start_it_again(
    folder: Path, options: tuple[str, ...], status: int
) -> None:
    address = str(folder / "notify")
    with manager_socket(address) as manager:
        process = spawn(folder, GOOD, *options, NOTIFY_SOCKET=address)
        try:
            assert manager.recv(4096).startswith(b"READY=1")
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)
            assert process.wait(TIMEOUT_S) == status
        finally:
            process.kill()
            process.wait(TIMEOUT_S)


def test_the_environment_is_read_once_and_kept_from_children() -> None:
    mine = {"NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid()), "A": "b"}
    assert take_service_manager(mine) == ServiceManager("/run/n", 3.0)
    assert mine == {"A": "b"}
    another = {"NOTIFY_SOCKET": "@n", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}
    assert take_service_manager(another) == ServiceManager("@n", None)
    for nonsense in ({"WATCHDOG_USEC": "3000000"}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1"}):
        assert take_service_manager(nonsense) == ServiceManager()
    assert take_service_manager({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "soon"}) == ServiceManager("/n", None)


def test_a_manager_that_is_gone_or_does_not_read_is_no_reason_to_stop(folder: Path) -> None:
    ServiceManager(str(folder / "gone")).ready()
    with manager_socket(str(folder / "full")):
        for _ in range(5000):
            ServiceManager(str(folder / "full")).alive()


class Overdue:
    """The enforcer, as far as the watchdog asks it."""

    seconds = 0.0

    def overdue_s(self) -> float:
        return self.seconds


@on_virtual_time
async def test_the_watchdog_is_fed_only_while_the_engine_and_the_enforcer_get_on() -> None:
    engine, enforcer = FakeEngine(), Overdue()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, manager_socket(f"{folder}/n") as manager:
        manager.setblocking(False)
        watchdog = Watchdog(ServiceManager(f"{folder}/n", 60.0), engine, enforcer)
        watchdog.start()
        watchdog.start()

        async def fed_in_a_minute() -> int:
            await asyncio.sleep(60)
            count = 0
            while True:
                try:
                    assert manager.recv(100) == b"WATCHDOG=1"
                except BlockingIOError:
                    return count
                count += 1

        await asyncio.sleep(1)
        assert await fed_in_a_minute() >= 4
        engine.stalled_for_s = 31.0
        assert await fed_in_a_minute() == 0
        engine.stalled_for_s = 29.0
        assert await fed_in_a_minute() == 4
        enforcer.seconds = 31.0
        assert await fed_in_a_minute() == 0
        await watchdog.stop()
        await watchdog.stop()


@on_virtual_time
async def test_nobody_is_fed_who_does_not_ask_for_it() -> None:
    watchdog = Watchdog(ServiceManager("/nowhere", None), FakeEngine(), Overdue())
    watchdog.start()
    assert "omlxd-watchdog" not in {task.get_name() for task in asyncio.all_tasks()}
    await watchdog.stop()
