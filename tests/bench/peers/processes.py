"""A peer's server: started from its own environment in a home of its own, and ended with all its processes."""

from __future__ import annotations

import http.client
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import psutil

from tests.bench.peers.asking import TIMEOUT_S, Reply, ask
from tests.bench.peers.catalogue import Launch, Needs, Peer
from tests.bench.peers.footprint import tree
from tests.bench.peers.venvs import Unavailable, last_line
from tests.bench.servers import Address, free_port, is_healthy

START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 15.0
LOOK_S: Final = 0.05
OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "NO_COLOR": "1"}


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers.

    Attributes:
        name: of the product.
        address: of its OpenAI-style API.
        names: what it calls each model.
        process: the one at the top; it may have others below it.
        load: brings a model by our name of it, for a server that answers 404 until that was done.
    """

    name: str
    address: Address
    names: Mapping[str, str]
    process: psutil.Process
    load: Callable[[str], None] | None = None

    def ask(self, model: str, prompt: str, max_tokens: int, *, timeout_s: float = TIMEOUT_S) -> Reply:
        """One greedy chat with a model by our name of it; the time that bringing it takes is part of the answer's.

        Who hears nothing for `timeout_s` seconds goes away.
        """
        reply = ask(self.address, self.names[model], prompt, max_tokens, timeout_s=timeout_s)
        if self.load and reply.status == http.client.NOT_FOUND:
            self.load(model)
            again = ask(self.address, self.names[model], prompt, max_tokens, timeout_s=timeout_s)
            return replace(again, sent_s=reply.sent_s)
        return reply


@contextmanager
def started(peer: Peer, models: Mapping[str, Path], needs: Needs, home: Path, environments: Path) -> Iterator[Running]:
    """Start it with these models and wait until it says that it is well.

    Raises:
        Unavailable: it could not be installed, ended, or did not answer in time.
    """
    launch = Launch(peer.bin_folder(environments), models, needs, home, free_port())
    command = peer.command(launch)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMLXD_HOME")}
    environment |= OFFLINE | {"HOME": str(home), "PATH": f"{launch.bin_folder}:{os.environ['PATH']}"}
    log = home / "log.txt"
    with log.open("wb") as out:
        process = psutil.Popen(
            command, cwd=home, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        address = ("127.0.0.1", launch.port)
        _wait_until_it_answers(address, process, log)
        names = peer.names(launch)

        def load(model: str) -> None:
            assert peer.load
            peer.load(address, names[model], models[model])

        yield Running(peer.name, address, names, psutil.Process(process.pid), load if peer.load else None)
    finally:
        _end(process)


def _wait_until_it_answers(address: Address, process: psutil.Popen, log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            said = last_line(log.read_text(errors="replace"))
            raise Unavailable(f"ended at its start with status {process.returncode}: {said}")
        if is_healthy(address):
            return
        time.sleep(LOOK_S)
    raise Unavailable(f"no answer within {START_TIMEOUT_S:g} s: {last_line(log.read_text(errors='replace'))}")


def _end(process: psutil.Popen) -> None:
    """Ask, and insist when it takes too long; its children go with it. Those that stand still are woken first."""
    processes = tree(process)
    for each in processes:
        _quietly(psutil.Process.resume, each)
    _quietly(psutil.Process.terminate, process)
    psutil.wait_procs([process], STOP_TIMEOUT_S)
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for each in processes:
            _quietly(end, each)
        _, processes = psutil.wait_procs(processes, STOP_TIMEOUT_S)


def _quietly(act: Callable[[psutil.Process], None], process: psutil.Process) -> None:
    try:
        act(process)
    except psutil.NoSuchProcess:
        pass
