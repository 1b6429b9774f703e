"""How soon `/health` and `status` are answered while a prompt of 4,000 tokens is prefilled and another model loads.

Beside them, how soon a process answers that does nothing but send back a byte: the machine has so many cores.
"""

from __future__ import annotations

import http.client
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from math import inf
from typing import TypeAlias

from tests.bench.background import again_and_again
from tests.bench.report import Judged, Row, Target, alone, percentile_95
from tests.bench.scratch import Scratch
from tests.bench.servers import Address, RunningDaemon, our_daemon
from tests.bench.streaming import chat

BOUND_MS = 50.0
LONG_PROMPT = "so many words that nobody will ever read them all " * 80  # 4,000 tokens of the tiny models
VOCABULARY = 49_152
_Question: TypeAlias = tuple[str, Callable[[], object], float | None]
"""What is asked, how, and within how many milliseconds it has to be answered."""
_ECHO = "import os\nwhile byte := os.read(0, 1): os.write(1, byte)"
REST_S = 0.01  # between two questions, so that they fall into all parts of a step


def run(scratch: Scratch) -> Iterator[Row]:
    """Idle first, then beside one client that prefills without end and one model that is loaded again and again."""
    new = [f"new-{number}" for number in range(scratch.rounds(10, 3))]
    models = {"reader": scratch.llama(20), "big": scratch.llama(100 if scratch.quick else 500)}
    models |= dict.fromkeys(new, scratch.tiny("llama", 30, vocab=VOCABULARY))
    with our_daemon(scratch.home("answers"), models, prefix_cache=0) as daemon:
        daemon.load("reader")
        numbers = count()

        def reads() -> None:
            chat(daemon.api, "reader", f"{next(numbers)}: {LONG_PROMPT}", 1)  # never one that it knows

        def loads() -> None:
            daemon.load("big")
            daemon.unload("big")

        with _echo() as echo:
            questions: list[_Question] = [
                ("GET /health over TCP", lambda: _health(daemon.api), BOUND_MS),
                ("status over the socket", daemon.status, BOUND_MS),
                ("an echo of another process", echo, None),
            ]
            yield from _rows(questions, "idle", scratch, [])
            with again_and_again(reads, loads) as works:
                yield from _rows(questions, "busy", scratch, works)
        yield _first_loads(daemon, new)


def _rows(
    questions: Sequence[_Question], when: str, scratch: Scratch, works: Sequence[Sequence[None]]
) -> Iterator[Row]:
    """As many questions as asked for, and as many more as it takes until each work was done some times meanwhile."""
    for what, ask, bound_ms in questions:
        ask()
        before, took_ms = [len(work) for work in works], list[float]()
        least, times = scratch.rounds(500, 100), scratch.rounds(5, 1)
        while len(took_ms) < least or (_fewest(works, before) < times and len(took_ms) < 20 * least):
            took_ms.append(_milliseconds(ask))
        counts = [len(work) - was for work, was in zip(works, before, strict=True)]
        note = "{} prompts and {} loads meanwhile".format(*counts) if counts else ""
        worst, often = (Target(bound_ms, Judged.WORST), Target(bound_ms)) if bound_ms else (None, None)
        yield alone(f"{what}, {when}", "ms", took_ms, worst, note)
        yield alone("  its 95 %", "ms", [percentile_95(took_ms)], often)


@contextmanager
def _echo() -> Iterator[Callable[[], object]]:
    """What asks a process of its own for a byte, and waits for it."""
    with subprocess.Popen(
        [sys.executable, "-c", _ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as child:
        asked, told = child.stdin, child.stdout
        assert asked is not None
        assert told is not None

        def ask() -> None:
            asked.write(b"?")
            told.read(1)

        yield ask
        asked.close()  # its end


def _first_loads(daemon: RunningDaemon, names: Sequence[str]) -> Row:
    """Loads of models that the daemon has not seen: the GIL is held while a tokenizer is read, once for each."""
    took_ms: list[float] = []
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(lambda: [daemon.load(name) for name in names])
        while not loading.done():
            took_ms.append(_milliseconds(lambda: _health(daemon.api)))
        loading.result()
    note = f"95 %: {percentile_95(took_ms):.1f} ms; {len(names)} models of {VOCABULARY} tokens"
    return alone("GET /health over TCP, first loads", "ms", took_ms, note=note)


def _fewest(works: Sequence[Sequence[None]], before: Sequence[int]) -> float:
    return min((len(work) - was for work, was in zip(works, before, strict=True)), default=inf)


def _health(address: Address) -> None:
    connection = http.client.HTTPConnection(*address, timeout=60)
    try:
        connection.request("GET", "/health")
        connection.getresponse().read()
    finally:
        connection.close()


def _milliseconds(ask: Callable[[], object]) -> float:
    time.sleep(REST_S)
    began_s = time.perf_counter()
    ask()
    return 1000 * (time.perf_counter() - began_s)
