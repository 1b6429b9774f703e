"""How long memory stays over the soft limit: after the limit was lowered, and after a decode has grown past it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from omlxd.core.units import parse_duration
from tests.bench.report import Judged, Row, Target, alone
from tests.bench.scratch import CHECKOUT, Scratch
from tests.bench.servers import RunningDaemon, our_daemon
from tests.bench.streaming import chat

SOON_MS = 50.0
KEPT_TOKENS = 4000


@dataclass(frozen=True, slots=True)
class _Case:
    poll_interval: str
    decoding: bool

    def __str__(self) -> str:
        return f"poll {self.poll_interval}, {'one decodes' if self.decoding else 'idle'}"


CASES = (_Case("1s", decoding=False), _Case("1h", decoding=False), _Case("1h", decoding=True))


def run(scratch: Scratch) -> Iterator[Row]:
    """The limit is changed over the control socket; growth is watched from inside the process, every millisecond."""
    for case in CASES:
        yield from _lowered_limit(scratch, case)
    for poll_interval in ("1s", "1h"):
        yield from _growth(scratch, poll_interval)


def _lowered_limit(scratch: Scratch, case: _Case) -> Iterator[Row]:
    models = {"kept": scratch.llama(50), "victim": scratch.llama(50)}
    answered_ms, acted_ms, step_ms = [], [], 0.0
    with our_daemon(scratch.home("react"), models, poll_interval=case.poll_interval) as daemon:
        for _ in range(scratch.rounds(20, 4)):
            daemon.load("victim")
            daemon.load("kept")
            with _decoding(daemon) if case.decoding else _nothing():
                step_ms = max(step_ms, _step_ms(daemon))
                changed, took_ms = _lower(daemon)
            answered_ms.append(took_ms)
            acted_ms.append(1000 * changed["recent_decisions"][-1]["duration_s"])
            daemon.limit("auto")
            daemon.unload("kept")  # the next round loads it after the victim again
    target = Target(SOON_MS + step_ms, Judged.WORST)
    yield alone(f"limit lowered: memory back, {case}", "ms", answered_ms, target)
    yield alone(f"  of which the unload, {case}", "ms", acted_ms)


def _lower(daemon: RunningDaemon) -> tuple[dict[str, Any], float]:
    """Set a limit that one of the two models fits; the status after it, and the milliseconds it took."""
    soft_bytes = daemon.status()["memory"]["active"] * 7 // 10
    began_s = time.perf_counter()
    changed = daemon.limit(soft_bytes)
    took_ms = 1000 * (time.perf_counter() - began_s)
    if changed["evicted"] != ["victim"] or changed["memory"]["active"] > soft_bytes:
        raise RuntimeError(f"the limit {soft_bytes} led to {changed}")
    return daemon.status(), took_ms


def _step_ms(daemon: RunningDaemon) -> float:
    """Of a decode step, as the daemon sees it; 0 when nobody decodes."""
    speeds = [model["tokens_per_s"] for model in daemon.status()["models"]]
    return max((1000 / speed for speed in speeds if speed), default=0.0)


@contextmanager
def _decoding(daemon: RunningDaemon) -> Iterator[None]:
    """`kept` decodes while the block runs; its answer is cut off afterwards."""

    def ask() -> None:
        try:
            chat(daemon.api, "kept", "Hello", KEPT_TOKENS)
        except RuntimeError:
            pass  # cut off, as it should be

    client = threading.Thread(target=ask)
    client.start()
    while not any(request["generated_tokens"] > 5 for request in daemon.status()["requests"]):
        time.sleep(0.01)
    try:
        yield
    finally:
        for request in daemon.status()["requests"]:
            daemon.client.call("DELETE", f"/v1/control/requests/{request['id']}")
        client.join()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _growth(scratch: Scratch, poll_interval: str) -> Iterator[Row]:
    rounds = scratch.rounds(20, 4)
    arguments = [str(scratch.llama(5)), str(scratch.llama(50)), str(parse_duration(poll_interval)), str(rounds)]
    command = [sys.executable, "-m", "tests.bench.growth_child", *arguments]
    done = subprocess.run(command, cwd=CHECKOUT, check=True, stdout=subprocess.PIPE)
    found = json.loads(done.stdout)
    target = Target(SOON_MS + found["step_ms"], Judged.WORST)
    yield alone(f"decode grew past soft: action, poll {poll_interval}", "ms", found["action_ms"], target)
    yield alone(f"decode grew past soft: memory back, poll {poll_interval}", "ms", found["back_ms"], target)
