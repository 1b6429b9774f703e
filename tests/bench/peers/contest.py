"""Ours and its peers, up at once and asked in turns: only one of them runs at any time, the others stand still.

A server that has nothing to do may still take a core's time (some look for work a thousand times a second); so whoever
is not asked is stopped (SIGSTOP), and its idle work is charged to nobody. Each round begins with another one.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

from tests.bench.peers.asking import Reply
from tests.bench.peers.catalogue import PEERS, Needs
from tests.bench.peers.footprint import tree
from tests.bench.peers.processes import Running, started
from tests.bench.peers.venvs import Unavailable
from tests.bench.scratch import Scratch
from tests.bench.servers import our_daemon

OURS = "omlxd"
WARM_TIMEOUT_S = 60.0
T = TypeVar("T")


@dataclass(slots=True)
class Contest:
    """Who is up, and why the others are not.

    Attributes:
        running: by name, ours first; those that have failed are taken out.
        absent: by name, the reason in one line.
    """

    running: dict[str, Running]
    absent: dict[str, str] = field(default_factory=dict)

    def turns(self, rounds: int, work: Callable[[Running, int], T]) -> dict[str, list[T]]:
        """What `work` found of each in each round; the round's number is its second argument.

        Who raises Unavailable is out, with all it did before; round 0 warms up and is not told.
        """
        found: dict[str, list[T]] = {name: [] for name in self.running}
        for number in range(rounds + 1):
            names = list(self.running)
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                with alone(self.running[name]):
                    try:
                        found[name].append(work(self.running[name], number))
                    except Unavailable as error:
                        self.out(name, str(error))
        return {name: found[name][1:] for name in self.running}

    def out(self, name: str, why: str) -> None:
        """Take one out; ours may not fail."""
        if name == OURS:
            raise RuntimeError(f"{OURS}: {why}")
        self.absent[name] = why
        del self.running[name]


@contextmanager
def contest(
    scratch: Scratch,
    models: Mapping[str, Path],
    needs: Needs,
    *,
    warm: Sequence[str],
    settings: Mapping[str, object] | None = None,
) -> Iterator[Contest]:
    """Start all that can do what is needed, let each answer once from the `warm` models, and let all stand still.

    Args:
        scratch: where homes and models are, and where peers are installed.
        models: name and folder of each.
        needs: of a server: several models, a limit of so many bytes.
        warm: the models that are loaded before it begins, so that files are cached and imports done.
        settings: of our daemon.
    """
    with ExitStack() as stack:
        daemon = stack.enter_context(our_daemon(scratch.home("ours"), models, **needs.ours(), **(settings or {})))
        ours = Running(OURS, daemon.api, {name: name for name in models}, daemon.process)
        found = Contest({OURS: ours})
        for peer in PEERS:
            if reason := peer.lacks(needs):
                found.absent[peer.name] = reason
                continue
            try:
                home = scratch.home(peer.name)
                found.running[peer.name] = stack.enter_context(started(peer, models, needs, home, scratch.peers))
                _warm(found.running[peer.name], warm)
                _signal(found.running[peer.name], psutil.Process.suspend)
            except Unavailable as error:
                found.running.pop(peer.name, None)
                found.absent[peer.name] = str(error)
        _warm(ours, warm)
        _signal(ours, psutil.Process.suspend)
        stack.callback(lambda: [_signal(each, psutil.Process.resume) for each in found.running.values()])
        yield found


@contextmanager
def alone(server: Running) -> Iterator[None]:
    """Let it run for the block."""
    _signal(server, psutil.Process.resume)
    try:
        yield
    finally:
        _signal(server, psutil.Process.suspend)


def whole(reply: Reply) -> Reply:
    """The reply; Unavailable when it is not what was asked for."""
    if not reply.whole:
        raise Unavailable(reply.trouble)
    return reply


def _warm(server: Running, models: Sequence[str]) -> None:
    """An answer from each; who is not ready yet is asked again. Raises Unavailable when there is none."""
    deadline_s = time.monotonic() + WARM_TIMEOUT_S
    for model in models:
        while not (reply := server.ask(model, "Hello", 4)).whole:
            if reply.status not in (0, http.client.SERVICE_UNAVAILABLE) or time.monotonic() > deadline_s:
                raise Unavailable(reply.trouble)
            time.sleep(0.2)


def _signal(server: Running, send: Callable[[psutil.Process], None]) -> None:
    for process in tree(server.process):
        try:
            send(process)
        except psutil.NoSuchProcess:
            pass
