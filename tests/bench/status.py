"""`omlxd status --json`, as a process and as the daemon's own time, when idle and when everything is going on."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.bench.background import again_and_again
from tests.bench.report import Row, Target, against, alone
from tests.bench.scratch import Scratch
from tests.bench.servers import RunningDaemon, our_daemon
from tests.bench.streaming import chat

PROCESS_TARGET = Target(100.0)
DAEMON_TARGET = Target(50.0)
LONG_PROMPT = "so many words that nobody will ever read them all " * 60
PEER = "python -c pass"


def run(scratch: Scratch) -> Iterator[Row]:
    """Idle first; then a client prefills without end, another decodes, and a load is always on its way."""
    models = {
        "chat": scratch.llama(50),
        "reader": scratch.llama(5),
        "big": scratch.llama(200 if scratch.quick else 1000),
    }
    with our_daemon(scratch.home("status"), models) as daemon:
        yield from _look(daemon, "idle", scratch)
        daemon.load("chat")
        daemon.load("reader")
        with _busy(daemon):
            yield from _look(daemon, "prefill, decode and load", scratch)


def _look(daemon: RunningDaemon, when: str, scratch: Scratch) -> Iterator[Row]:
    environment = as_installed(scratch, daemon)

    def process() -> None:
        command = [*omlxd(), "status", "--json"]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)

    def floor() -> None:
        subprocess.run([sys.executable, "-c", "pass"], env=environment, check=True)

    process()  # writes the byte code
    ours, peer, ours_cpu, peer_cpu = [], [], [], []
    for _ in range(scratch.rounds(21, 5)):
        for work, wall_ms, cpu_ms in ((process, ours, ours_cpu), (floor, peer, peer_cpu)):
            before_ms = _children_cpu_ms()
            wall_ms.append(milliseconds(work))
            cpu_ms.append(_children_cpu_ms() - before_ms)
    yield against(f"omlxd status --json, {when}", "ms", ours, PEER, peer, PROCESS_TARGET)
    yield against("  its processor time", "ms", ours_cpu, PEER, peer_cpu)
    answers = [milliseconds(daemon.status) for _ in range(scratch.rounds(60, 10))]
    yield alone(f"GET /v1/control/status, {when}", "ms", answers, DAEMON_TARGET)


def omlxd() -> Sequence[str]:
    """The command as people run it."""
    script = Path(sys.executable).with_name("omlxd")
    return [str(script)] if script.exists() else [sys.executable, "-m", "omlxd"]


def as_installed(scratch: Scratch, daemon: RunningDaemon) -> dict[str, str]:
    """The environment of a command that talks to the daemon: with byte code on the disk, as after an installation.

    Where Python may write none it compiles our modules anew for each command, half as long again as the command takes.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return environment | {"PYTHONPYCACHEPREFIX": str(scratch.root / "bytecode"), "OMLXD_HOME": str(daemon.home.root)}


def milliseconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    began_s = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - began_s)


def _children_cpu_ms() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (used.ru_utime + used.ru_stime)


@contextmanager
def _busy(daemon: RunningDaemon) -> Iterator[None]:
    """Keep the engine at prefill, decode and loads until the block ends."""

    def loads() -> None:
        daemon.load("big")
        daemon.unload("big")

    with again_and_again(
        lambda: chat(daemon.api, "chat", "Hello", 200), lambda: chat(daemon.api, "reader", LONG_PROMPT, 1), loads
    ):
        yield
