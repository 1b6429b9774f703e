"""What 10, 100 and 1,000 models and waiting requests cost, piece by piece, and how that grows: 1 is linear."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from tests.bench.background import again_and_again
from tests.bench.decide import slope
from tests.bench.report import Row, Target, alone
from tests.bench.scale_loop import FIGURES, LOADED_SHARE, measure
from tests.bench.scratch import CHECKOUT, Scratch
from tests.bench.servers import RunningDaemon, our_daemon
from tests.bench.status import as_installed, milliseconds, omlxd

SIZES = (10, 100, 1_000)
MOST_PROMPTS = 64
"""In one request to `/v1/completions`."""
STEP_TOKENS = 400
ASK_S = 0.5
"""Between two status, which take long themselves."""
JUDGED_SIZE = 1_000
STATUS, COMMAND = "GET status", "omlxd status --json"
TARGETS = {STATUS: Target(50.0)}
"""For a thousand."""


def run(scratch: Scratch) -> Iterator[Row]:
    """The event loop's pieces alone, the engine's step alone, and then a daemon as it is."""
    sizes, growth = SIZES[: 2 if scratch.quick else 3], _Growth()
    for size in sizes:
        for name, times_ms in measure(size, scratch.rounds(50, 5)).items():
            yield growth.row(FIGURES[name], size, "ms", times_ms)
    yield from _steps(scratch, sizes, growth)
    for size in sizes:
        yield from _daemon(scratch, size, growth)
    yield from growth.slopes()


class _Growth:
    """The medians of figures at each size, for the slopes, which are told at the end."""

    def __init__(self) -> None:
        self._medians: dict[str, list[tuple[int, float]]] = {}

    def row(self, figure: str, size: int, unit: str, values: Sequence[float], of: str = "models") -> Row:
        row = alone(f"{figure}, {size} {of}", unit, values, TARGETS.get(figure) if size == JUDGED_SIZE else None)
        self._medians.setdefault(figure, []).append((size, row.ours.median))
        return row

    def slopes(self) -> Iterator[Row]:
        for figure, seen in self._medians.items():
            if len(seen) > 1:
                yield alone(f"log-log slope, {figure}", "", [slope(*zip(*seen, strict=True))])


def _steps(scratch: Scratch, sizes: Sequence[int], growth: _Growth) -> Iterator[Row]:
    """A decode step of one request, in an engine that has ever more models and then ever more requests."""
    command = [sys.executable, "-m", "tests.bench.scale_child", str(scratch.llama(1))]
    with subprocess.Popen(command, cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None

        def step_ms(asked: Mapping[str, int]) -> float:
            print(json.dumps({**asked, "tokens": STEP_TOKENS}), file=child.stdin, flush=True)
            return float(json.loads(child.stdout.readline())["step_ms"])

        try:
            for loaded in (max(1, size // LOADED_SHARE) for size in sizes):
                times_ms = [step_ms({"loaded": loaded, "waiting": 0}) for _ in range(scratch.rounds(7, 3))]
                yield growth.row("a decode step of 1 request", loaded, "ms", times_ms, "loaded models")
            for waiting in sizes:
                times_ms = [step_ms({"loaded": 1, "waiting": waiting}) for _ in range(scratch.rounds(7, 3))]
                yield growth.row("a decode step beside others", waiting, "ms", times_ms, "waiting requests")
        finally:
            child.stdin.close()  # its end


def _daemon(scratch: Scratch, size: int, growth: _Growth) -> Iterator[Row]:
    models = {f"model-{number:05d}": scratch.llama(1) for number in range(size)}
    first, *others = list(models)[: max(1, size // LOADED_SHARE)]
    starts_ms: list[float] = []
    with ExitStack() as stack:
        for round_ in range(scratch.rounds(3, 1)):
            stack.close()
            began_s = time.perf_counter()
            home = scratch.home(f"scale-{round_}")
            daemon = stack.enter_context(our_daemon(home, models, max_batch=1, max_waiting=2 * size, prefix_cache=0))
            starts_ms.append(1000 * (time.perf_counter() - began_s))
        yield growth.row("start", size, "ms", starts_ms)
        for name in (first, *others):
            daemon.load(name)
        yield growth.row("reload, one of them changed", size, "ms", _reloads(daemon, scratch))
        come_ms, leave_ms = list[float](), list[float]()
        with ExitStack() as crowd:
            with _asked_meanwhile(daemon, come_ms):
                crowd.enter_context(_waiting(daemon, first, size))
            rounds = scratch.rounds(21, 3)
            yield growth.row(STATUS, size, "ms", [milliseconds(daemon.status) for _ in range(rounds)])
            environment = as_installed(scratch, daemon)

            def command() -> None:
                subprocess.run([*omlxd(), "status", "--json"], env=environment, check=True, stdout=subprocess.DEVNULL)

            command()  # writes the byte code
            yield growth.row(COMMAND, size, "ms", [milliseconds(command) for _ in range(rounds)])
            with _asked_meanwhile(daemon, leave_ms):
                crowd.close()
                while daemon.status()["requests"]:
                    time.sleep(ASK_S)
        yield growth.row("GET /health, as many requests come at once", size, "ms", come_ms)
        yield growth.row("GET /health, they all go away at once", size, "ms", leave_ms)


@contextmanager
def _asked_meanwhile(daemon: RunningDaemon, took_ms: list[float]) -> Iterator[None]:
    """How long each of many `/health` takes, one after the other, until the block ends."""

    def ask() -> None:
        took_ms.append(milliseconds(lambda: daemon.client.get("/health", timeout_s=60.0)))
        time.sleep(0.005)

    with again_and_again(ask):
        yield


def _reloads(daemon: RunningDaemon, scratch: Scratch) -> list[float]:
    path, times_ms = daemon.home.manifest, []
    written = path.read_text()
    for round_ in range(scratch.rounds(7, 2)):
        path.write_text(f'{written}ttl = "{round_ + 1}h"\n')  # of the last model
        times_ms.append(milliseconds(lambda: daemon.client.call("POST", "/v1/control/reload", {}, timeout_s=60.0)))
    return times_ms


@contextmanager
def _waiting(daemon: RunningDaemon, model: str, count: int) -> Iterator[None]:
    """One request that decodes and so many that wait behind it, until the block ends."""
    with ExitStack() as connections:
        for begin in range(0, count + 1, MOST_PROMPTS):
            prompts = [f"number {number}" for number in range(begin, min(count + 1, begin + MOST_PROMPTS))]
            connection = http.client.HTTPConnection(*daemon.api, timeout=60)
            connections.callback(connection.close)
            body = json.dumps({"model": model, "prompt": prompts, "max_tokens": 2000, "temperature": 0})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        while len(daemon.status()["requests"]) < count:
            time.sleep(ASK_S)
        yield
