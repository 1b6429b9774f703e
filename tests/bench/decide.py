"""The enforcer's decision as a function of how many models it has to look at."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

from omlxd.core.memory import MemoryReading
from omlxd.core.policy import decide
from omlxd.core.snapshot import EntrySnapshot, Limits, Snapshot
from omlxd.core.states import EntryState
from tests.bench.report import Row, Target, alone
from tests.bench.scratch import Scratch

SIZES = (10, 100, 1_000, 10_000)
JUDGED_SIZE, TARGET = 1_000, Target(1.0)
MIB = 2**20


def run(scratch: Scratch) -> Iterator[Row]:
    """Over the limit with everything loaded: a victim to find, and the worst case, where all are pinned."""
    for what, pinned in (("one to unload", False), ("all pinned", True)):
        medians = []
        for size in SIZES:
            row = _measure(f"decide, {size} models, {what}", size, pinned, scratch.rounds(200, 20))
            medians.append(row.ours.median)
            yield row
        yield alone(f"log-log slope, {what}", "", [_slope(SIZES, medians)])


def _measure(figure: str, size: int, pinned: bool, rounds: int) -> Row:
    snapshot, limits = _snapshot(size, pinned), Limits(size * MIB // 2, size * MIB)
    times_ms = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        decide(snapshot, limits)
        times_ms.append(1000 * (time.perf_counter() - began_s))
    return alone(figure, "ms", times_ms, TARGET if size == JUDGED_SIZE else None)


def _snapshot(size: int, pinned: bool) -> Snapshot:
    entries = tuple(
        EntrySnapshot(
            f"model-{number:05d}",
            EntryState.LOADED,
            pinned=pinned,
            weights_bytes=MIB,
            last_used_s=float(number * 7919 % size),  # no order that a sort could profit from
        )
        for number in range(size)
    )
    return Snapshot(now_s=float(size), reading=MemoryReading(active_bytes=size * MIB), entries=entries)


def _slope(sizes: Sequence[int], times_ms: Sequence[float]) -> float:
    """Least squares through the logarithms: 1 is linear."""
    xs, ys = [math.log(size) for size in sizes], [math.log(value) for value in times_ms]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return covariance / sum((x - x_mean) ** 2 for x in xs)
