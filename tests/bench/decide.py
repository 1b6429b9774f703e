"""The enforcer's decision as a function of how many models it has to look at."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from omlxd.core.memory import MemoryReading, Policy
from omlxd.core.policy import decide
from omlxd.core.snapshot import EntrySnapshot, Limits, RequestSnapshot, Snapshot
from omlxd.core.states import EntryState
from tests.bench.report import Row, Target, alone
from tests.bench.scratch import Scratch

SIZES = (10, 100, 1_000, 10_000)
JUDGED_SIZE, TARGET = 1_000, Target(1.0)
MIB = 2**20


def run(scratch: Scratch) -> Iterator[Row]:
    """Over the limit with everything loaded, for both policies: a victim to find, all pinned, all with requests."""
    for policy in Policy:
        for what, entry in (("one to unload", _idle), ("all pinned", _pinned), ("all busy", _busy)):
            medians = []
            for size in SIZES:
                row = _measure(f"decide {policy}, {size} models, {what}", policy, entry, size, scratch.rounds(200, 20))
                medians.append(row.ours.median)
                yield row
            yield alone(f"log-log slope {policy}, {what}", "", [slope(SIZES, medians)])


def _measure(figure: str, policy: Policy, entry: Callable[[int, int], EntrySnapshot], size: int, rounds: int) -> Row:
    limits = Limits(size * MIB // 2, size * MIB, policy=policy)
    reading = MemoryReading(active_bytes=size * MIB)
    snapshot = Snapshot(float(size), reading, tuple(entry(number, size) for number in range(size)))
    times_ms = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        decide(snapshot, limits)
        times_ms.append(1000 * (time.perf_counter() - began_s))
    return alone(figure, "ms", times_ms, TARGET if size == JUDGED_SIZE else None)


def _idle(number: int, size: int) -> EntrySnapshot:
    return EntrySnapshot(
        f"model-{number:05d}",
        EntryState.LOADED,
        weights_bytes=MIB,
        last_used_s=float(number * 7919 % size),  # no order that a sort could profit from
    )


def _pinned(number: int, size: int) -> EntrySnapshot:
    return replace(_idle(number, size), pinned=True)


def _busy(number: int, size: int) -> EntrySnapshot:
    order = number * 7919 % size
    requests = (RequestSnapshot(f"r{order}", order, MIB),)
    return replace(_idle(number, size), last_used_s=float(size), running=1, leases=1, requests=requests)


def slope(sizes: Sequence[int], times_ms: Sequence[float]) -> float:
    """Least squares through the logarithms: 1 is linear."""
    xs, ys = [math.log(size) for size in sizes], [math.log(value) for value in times_ms]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return covariance / sum((x - x_mean) ** 2 for x in xs)
