"""How soon `/health` and `status` are answered while a prompt of 4,000 tokens is prefilled and another model loads."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator
from itertools import count

from tests.bench.background import again_and_again
from tests.bench.report import Judged, Row, Target, alone, percentile_95
from tests.bench.scratch import Scratch
from tests.bench.servers import Address, RunningDaemon, our_daemon
from tests.bench.streaming import chat

BOUND_MS = 50.0
LONG_PROMPT = "so many words that nobody will ever read them all " * 80  # 4,000 tokens of the tiny models
REST_S = 0.01  # between two questions, so that they fall into all parts of a step


def run(scratch: Scratch) -> Iterator[Row]:
    """Idle first, then beside one client that prefills without end and one model that is loaded again and again."""
    models = {"reader": scratch.llama(20), "big": scratch.llama(100 if scratch.quick else 500)}
    with our_daemon(scratch.home("answers"), models, prefix_cache=0) as daemon:
        daemon.load("reader")
        numbers = count()

        def reads() -> None:
            chat(daemon.api, "reader", f"{next(numbers)}: {LONG_PROMPT}", 1)  # never one that it knows

        def loads() -> None:
            daemon.load("big")
            daemon.unload("big")

        yield from _rows(daemon, "idle", scratch, lambda: "")
        with again_and_again(reads, loads) as (prompts, loaded):
            yield from _rows(
                daemon, "busy", scratch, lambda: f"{len(prompts)} prompts and {len(loaded)} loads meanwhile"
            )


def _rows(daemon: RunningDaemon, when: str, scratch: Scratch, meanwhile: Callable[[], str]) -> Iterator[Row]:
    questions = (("GET /health over TCP", lambda: _health(daemon.api)), ("status over the socket", daemon.status))
    for what, ask in questions:
        ask()
        took_ms = [_milliseconds(ask) for _ in range(scratch.rounds(500, 100))]
        yield alone(f"{what}, {when}", "ms", took_ms, Target(BOUND_MS, Judged.WORST), meanwhile())
        yield alone("  its 95 %", "ms", [percentile_95(took_ms)], Target(BOUND_MS))


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
