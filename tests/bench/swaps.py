"""Two models that do not fit together and clients of both: how often they are swapped, and how long anybody waits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

from omlxd.core.turnover import LEAST_SWAP_S, TURN_RELOADS
from tests.bench.report import Judged, Row, Target, beside
from tests.bench.scratch import CHECKOUT, Scratch

MEGABYTES: Final = 50
REQUESTS: Final = 100
FAIR_WAIT_S: Final = 10.0
TIMEOUT_S: Final = 600.0
NAIVE = "without turns"


def run(scratch: Scratch) -> Iterator[Row]:
    """In-process pools in processes of their own, the same clients with turns and without."""
    models = [scratch.tiny("llama", MEGABYTES, seed=seed) for seed in (0, 1)]
    for clients in (2, 8):
        yield from _rows(models, clients, scratch.rounds(3, quick=1), scratch.rounds(REQUESTS, quick=20))


def _rows(models: list[Path], clients: int, rounds: int, requests: int) -> Iterator[Row]:
    ours, naive = [], []
    for _ in range(rounds):
        ours.append(_child(models, clients, requests, str(FAIR_WAIT_S)))
        naive.append(_child(models, clients, requests, "none"))
    who = f"{clients} clients: "
    loads_s = median(load_s for each in ours for load_s in each["load_s"])
    turn_s = min(FAIR_WAIT_S, TURN_RELOADS * max(loads_s, LEAST_SWAP_S))
    note = f"a load takes {1000 * loads_s:.0f} ms, so a turn {turn_s:.1f} s at most; the bound is {FAIR_WAIT_S:.0f} s"
    swaps = [[100 * each["swaps"] / requests for each in runs] for runs in (ours, naive)]
    yield beside(who + "swaps per 100 requests", "", swaps[0], NAIVE, swaps[1], Target(25.0), note)
    failed = [[float(each["failed"]) for each in runs] for runs in (ours, naive)]
    yield beside(who + "requests lost", "", failed[0], NAIVE, failed[1], Target(0.0, Judged.WORST))
    waits = [[max(each["waits_s"]) for each in runs] for runs in (ours, naive)]
    yield beside(
        who + "longest wait for a first token", "s", waits[0], NAIVE, waits[1], Target(FAIR_WAIT_S, Judged.WORST)
    )
    for name, share in (("p50", 50), ("p95", 95)):
        latencies = [[quantiles(each["latencies_s"], n=100)[share - 1] for each in runs] for runs in (ours, naive)]
        yield beside(who + f"{name} of an answer", "s", latencies[0], NAIVE, latencies[1])
    took = [[requests / each["took_s"] for each in runs] for runs in (ours, naive)]
    yield beside(who + "answers per second", "1/s", took[0], NAIVE, took[1])


def _child(models: list[Path], clients: int, requests: int, fair_wait: str) -> dict[str, Any]:
    arguments = [*map(str, models), str(clients), str(requests), fair_wait]
    command = [sys.executable, "-m", "tests.bench.swaps_child", *arguments]
    done = subprocess.run(command, cwd=CHECKOUT, check=True, stdout=subprocess.PIPE, timeout=TIMEOUT_S)
    found: dict[str, Any] = json.loads(done.stdout)
    return found
