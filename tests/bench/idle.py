"""What a daemon costs while nobody uses it: memory, processor time, threads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.bench.report import Row, Target, alone
from tests.bench.scratch import Scratch
from tests.bench.servers import cpu_s, our_daemon

MEMORY_TARGET = Target(60.0)
CPU_TARGET = Target(0.1)


def run(scratch: Scratch) -> Iterator[Row]:
    """Without a model, and again after one was used and unloaded."""
    window_s = scratch.rounds(10, 3)
    with our_daemon(scratch.home("idle"), {"chat": scratch.llama(5)}) as daemon:
        daemon.status()
        cpu_percent = _cpu_percent(daemon.process, window_s)
        yield alone("RSS, no model yet", "MB", [daemon.process.memory_info().rss / 1e6], MEMORY_TARGET)
        yield alone(f"CPU over {window_s} s, no model yet", "% of a core", [cpu_percent], CPU_TARGET)
        yield alone("threads, no model yet", "", [daemon.process.num_threads()])
        daemon.load("chat")
        yield alone(f"CPU over {window_s} s, a model loaded", "% of a core", [_cpu_percent(daemon.process, window_s)])
        daemon.unload("chat")
        yield alone("RSS after a first load and unload", "MB", [daemon.process.memory_info().rss / 1e6])
        yield alone("threads, MLX started", "", [daemon.process.num_threads()])


def _cpu_percent(process: psutil.Process, window_s: float) -> float:
    time.sleep(1.0)  # what the start and the last request left to do
    before_s, began_s = _fine_cpu_s(process), time.perf_counter()
    time.sleep(window_s)
    return 100 * (_fine_cpu_s(process) - before_s) / (time.perf_counter() - began_s)


def _fine_cpu_s(process: psutil.Process) -> float:
    """The scheduler's nanoseconds for the threads that live, since a tick of 10 ms is 0.1 % of 10 s."""
    tasks = list(Path(f"/proc/{process.pid}/task").glob("*/schedstat"))
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9 if tasks else cpu_s(process)
