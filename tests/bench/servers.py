"""The processes under measurement: our daemon, and mlx-lm's server as its peer."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from omlxd.cli.client import Client, model_path
from omlxd.cli.process import StartOptions, start_detached
from omlxd.daemon.home import Home

Address = tuple[str, int]
PEER = "mlx_lm.server"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class RunningDaemon:
    """A daemon that answers."""

    home: Home
    client: Client
    api: Address
    process: psutil.Process

    def status(self) -> dict[str, Any]:
        """As `omlxd status --json` shows it."""
        return self.client.get("/v1/control/status", timeout_s=60.0)

    def load(self, model: str) -> dict[str, Any]:
        """Load, and answer when it is done."""
        return self.client.call("POST", model_path(model, "load"), {}, timeout_s=None)

    def unload(self, model: str) -> dict[str, Any]:
        """Unload at once, and answer when the memory is back."""
        return self.client.call("POST", model_path(model, "unload"), {"now": True}, timeout_s=None)

    def limit(self, max_memory: str | int) -> dict[str, Any]:
        """Change the soft limit, and answer when the enforcer has acted."""
        return self.client.call("PATCH", "/v1/control/limits", {"max_memory": max_memory}, timeout_s=60.0)


@contextmanager
def our_daemon(
    home: Path, models: Mapping[str, Path], *, ttl: Mapping[str, str] | None = None, **settings: Any
) -> Iterator[RunningDaemon]:
    """Start a daemon that knows `models`, some with a `ttl`, with these keys of `[daemon]`; stopped at the end."""
    at = Home(home)
    manifest: dict[str, dict[str, Any]] = {
        "daemon": {"min_available": 0, **settings},
        "api": {"listen": "127.0.0.1:0"},
        "models": {name: {"path": str(path)} for name, path in models.items()},
    }
    for name, time_to_live in (ttl or {}).items():
        manifest["models"][name]["ttl"] = time_to_live
    at.manifest.write_text(tomli_w.dumps(manifest))
    with without_preload():
        ready = start_detached(at, StartOptions())
    process = psutil.Process(ready["pid"])
    try:
        host, _, port = ready["api"].rpartition(":")
        yield RunningDaemon(at, Client(at.socket), (host, int(port)), process)
    finally:
        _end(process)


@contextmanager
def mlx_lm_server(model: Path) -> Iterator[tuple[Address, psutil.Process]]:
    """Start `mlx_lm.server` from the same environment and wait until it answers."""
    address = ("127.0.0.1", free_port())
    command = [sys.executable, "-m", "mlx_lm.server", "--model", str(model), "--port", str(address[1])]
    process = psutil.Popen(
        [*command, "--log-level", "ERROR"], cwd=model.parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait_until_it_answers(address, process)
        yield address, psutil.Process(process.pid)
    finally:
        _end(process)


@contextmanager
def without_preload() -> Iterator[None]:
    """Processes of ours that are started meanwhile bring their BLAS along by themselves, as for users."""
    preloaded = os.environ.pop("LD_PRELOAD", None)
    try:
        yield
    finally:
        if preloaded is not None:
            os.environ["LD_PRELOAD"] = preloaded


def cpu_s(process: psutil.Process) -> float:
    """Processor seconds so far, of threads that have ended too; counted in ticks of 10 ms on Linux."""
    times = process.cpu_times()
    return float(times.user + times.system)


def _end(process: psutil.Process | psutil.Popen) -> None:
    """Ask, and insist when it takes too long; whoever is gone already is fine."""
    try:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)
    except psutil.TimeoutExpired:
        process.kill()
        process.wait()
    except psutil.NoSuchProcess:
        pass


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_healthy(address: Address) -> bool:
    """Whether a server answers `/health` well by now."""
    connection = http.client.HTTPConnection(*address, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _wait_until_it_answers(address: Address, process: psutil.Popen) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{PEER} ended with status {process.returncode}")
        if is_healthy(address):
            return
        time.sleep(0.1)
    raise TimeoutError(f"{PEER} did not answer within {START_TIMEOUT_S:g} s")
