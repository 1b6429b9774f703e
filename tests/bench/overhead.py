"""What the server costs: tokens/s of streams over HTTP, against the same engine that a loop in its process drives.

Beside it, what the least of servers costs: the same loop, whose engine writes each token to its client's socket. And
both with arithmetic on one thread: where a GPU does it, or there are cores to spare, it takes none from the server.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.bench.report import Judged, Row, Target, against
from tests.bench.scratch import CHECKOUT, Scratch
from tests.bench.servers import RunningDaemon, cpu_s, our_daemon, without_preload
from tests.bench.streaming import chats

PEER, LEAST = "bare engine", "least of servers"
BLAS_THREADS = "OPENBLAS_NUM_THREADS"
PROMPT = "Tell me what a computer does with its memory when there is too little of it."
AT_MOST_3_PERCENT = Target(0.97, Judged.RATIO, at_most=False)


@dataclass(frozen=True, slots=True)
class _Case:
    """A model, how many stream from it at once, how many tokens each, and what is asked of the ratio.

    `blas_threads` of the process that computes; None for as many as there are cores.
    """

    megabytes: int
    clients: int
    max_tokens: int
    target: Target | None
    blas_threads: int | None = None

    @property
    def what(self) -> str:
        streams = f"{self.megabytes} MB, {self.clients} stream{'s' if self.clients > 1 else ''}"
        return f"{streams}, a core to spare" if self.blas_threads else streams


CASES = (
    _Case(50, 1, 64, AT_MOST_3_PERCENT),
    _Case(50, 8, 32, AT_MOST_3_PERCENT),
    _Case(50, 1, 64, AT_MOST_3_PERCENT, blas_threads=1),
    _Case(50, 8, 32, AT_MOST_3_PERCENT, blas_threads=1),
    _Case(5, 1, 512, None),  # smaller than any model in use: a token takes 1 ms, and the rest shows most
    _Case(5, 8, 128, None),
)


@dataclass(frozen=True, slots=True)
class _Round:
    """One round of one side: the speed of all streams together, the processor time of its process, and the texts."""

    tokens_per_s: float
    cpu_ms_per_token: float
    texts: list[str]


def run(scratch: Scratch) -> Iterator[Row]:
    """The daemon and the bare engine are up at once and take turns; one is idle while the other works."""
    for case in CASES:
        model = scratch.llama(case.megabytes)
        with (
            _arithmetic_on(case.blas_threads),
            our_daemon(scratch.home("overhead"), {"chat": model}, prefix_cache=0) as daemon,
            _bare_engine(model) as bare,
        ):
            daemon.load("chat")
            ours, peer, least = list[_Round](), list[_Round](), list[_Round]()
            for number in range(scratch.rounds(24 if case.target else 12, 3) + 1):
                prompts = [f"{number}.{client}: {PROMPT}" for client in range(case.clients)]
                if number % 2:
                    mine, theirs = _over_http(daemon, prompts, case), _ask(bare, prompts, case)
                else:
                    theirs, mine = _ask(bare, prompts, case), _over_http(daemon, prompts, case)
                written = _to_sockets(bare, prompts, case)
                if number:  # the first round warms up
                    ours.append(mine)
                    peer.append(theirs)
                    least.append(written)
            yield from _rows(case, ours, peer, least)


def _rows(case: _Case, ours: Sequence[_Round], peer: Sequence[_Round], least: Sequence[_Round]) -> Iterator[Row]:
    same = sum(
        text == other for a, b in zip(ours, peer, strict=True) for text, other in zip(a.texts, b.texts, strict=True)
    )
    note = f"{same} of {len(ours) * case.clients} answers have the same text"
    speeds = [[each.tokens_per_s for each in rounds] for rounds in (ours, peer, least)]
    yield against(f"tokens/s, {case.what}", "tok/s", speeds[0], PEER, speeds[1], case.target, note)
    yield against(f"  of the least of servers, {case.what}", "tok/s", speeds[2], PEER, speeds[1])
    yield against(f"  beside that, {case.what}", "tok/s", speeds[0], LEAST, speeds[2], case.target)
    costs = [[each.cpu_ms_per_token for each in rounds] for rounds in (ours, peer)]
    yield against(f"processor time a token, {case.what}", "ms", costs[0], PEER, costs[1])


def _over_http(daemon: RunningDaemon, prompts: Sequence[str], case: _Case) -> _Round:
    before_s = cpu_s(daemon.process)
    answers = chats(daemon.api, "chat", prompts, case.max_tokens)
    took_s = max(answer.last_s for answer in answers) - min(answer.sent_s for answer in answers)
    tokens = sum(answer.tokens for answer in answers)
    cpu_ms = 1000 * (cpu_s(daemon.process) - before_s)
    return _Round(tokens / took_s, cpu_ms / tokens, [answer.text for answer in answers])


@contextmanager
def _arithmetic_on(threads: int | None) -> Iterator[None]:
    """Processes that are started meanwhile compute on so many threads; MLX's own BLAS has one in any case."""
    before = os.environ.get(BLAS_THREADS)
    if threads is not None:
        os.environ[BLAS_THREADS] = str(threads)
    try:
        yield
    finally:
        if threads is not None:
            del os.environ[BLAS_THREADS]
        if before is not None:
            os.environ[BLAS_THREADS] = before


@contextmanager
def _bare_engine(model: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.bench.overhead_child", str(model)]
    with without_preload():
        started = subprocess.Popen(command, cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with started as child:
        try:
            yield child
        finally:
            assert child.stdin is not None
            child.stdin.close()  # its end


def _to_sockets(child: subprocess.Popen[str], prompts: Sequence[str], case: _Case) -> _Round:
    """The engine writes its tokens to as many connections, which are heard as a client hears its streams."""
    with socket.create_server(("127.0.0.1", 0)) as listening, selectors.DefaultSelector() as selector:
        hearing = threading.Thread(target=_hear, args=(listening, selector, len(prompts)))
        hearing.start()
        told = _ask(child, prompts, case, port=listening.getsockname()[1])
        hearing.join()
    return told


def _hear(listening: socket.socket, selector: selectors.BaseSelector, streams: int) -> None:
    for _ in range(streams):
        selector.register(listening.accept()[0], selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            if not key.fileobj.recv(65536):
                selector.unregister(key.fileobj)
                key.fileobj.close()


def _ask(child: subprocess.Popen[str], prompts: Sequence[str], case: _Case, **more: int) -> _Round:
    assert child.stdin is not None
    assert child.stdout is not None
    process = psutil.Process(child.pid)
    before_s = cpu_s(process)
    child.stdin.write(json.dumps({"prompts": list(prompts), "max_tokens": case.max_tokens, **more}) + "\n")
    child.stdin.flush()
    told = json.loads(child.stdout.readline())
    cpu_ms = 1000 * (cpu_s(process) - before_s)
    return _Round(told["tokens_per_s"], cpu_ms / (len(prompts) * case.max_tokens), told["texts"])
