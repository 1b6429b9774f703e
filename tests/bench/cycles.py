"""Load, a few tokens, unload, over and over: whether the memory comes back each time, and to the same level."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from tests.bench.report import Judged, Row, Target, alone
from tests.bench.scratch import Scratch
from tests.bench.servers import RunningDaemon, our_daemon
from tests.bench.streaming import chat

MEGABYTES, CYCLES = 200, 10
ACTIVE_TARGET = Target(0.001, Judged.WORST)
ABOVE_BASE_TARGET = Target(15.0, Judged.WORST)
GROWTH_TARGET = Target(1.0, Judged.WORST)


def run(scratch: Scratch) -> Iterator[Row]:
    """Everything through the daemon's two doors, in MB (10⁶ bytes)."""
    model = scratch.llama(MEGABYTES)
    with our_daemon(scratch.home("cycles"), {"model": model}) as daemon:
        memory = [_cycle(daemon) for _ in range(CYCLES)]
    above_base = [(each["footprint"] - each["base"]) / 1e6 for each in memory]
    growth = [after - before for before, after in pairwise(above_base)]
    yield alone("active after an unload", "MB", [each["active"] / 1e6 for each in memory], ACTIVE_TARGET)
    yield alone("cache after an unload", "MB", [each["cache"] / 1e6 for each in memory])
    each_one = "after each: " + ", ".join(f"{value:.1f}" for value in above_base)
    yield alone("footprint - base after an unload", "MB", above_base, ABOVE_BASE_TARGET, each_one)
    yield alone(f"growth a cycle, cycles 2 to {CYCLES}", "MB", growth, GROWTH_TARGET)


def _cycle(daemon: RunningDaemon) -> dict[str, int]:
    daemon.load("model")
    chat(daemon.api, "model", "Hello", 8)
    daemon.unload("model")
    return dict(daemon.status()["memory"])
