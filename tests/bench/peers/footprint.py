"""The memory that the system charges a server with all its processes, looked at from outside every 10 ms.

It is the sum of their resident sets (RSS): what a user sees in `top`. Pages of libraries that several processes share
count for each of them; figures are growth above a base, in which those pages are counted alike.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Final, Self

import psutil

EVERY_S: Final = 0.01
LOOK_FOR_CHILDREN_EVERY: Final = 50
SETTLE_S: Final = 0.5


def tree(process: psutil.Process) -> list[psutil.Process]:
    """The process and all below it; empty when it is gone."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def resident_bytes(processes: list[psutil.Process]) -> int:
    """The sum of their resident sets; those that have ended take nothing."""
    total = 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.Error:
            pass
    return total


def at_rest(process: psutil.Process) -> int:
    """Bytes of the whole tree when a pause has passed: the system's books lag behind."""
    time.sleep(SETTLE_S)
    return resident_bytes(tree(process))


class Sampler:
    """Looks every 10 ms while the block runs.

    Attributes:
        peak_bytes: the highest that was seen.
        samples: how often it looked.
    """

    def __init__(self, process: psutil.Process) -> None:
        self.peak_bytes = 0
        self.samples = 0
        self._process = process
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="footprint", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        processes: list[psutil.Process] = []
        while not self._over.wait(EVERY_S):
            if self.samples % LOOK_FOR_CHILDREN_EVERY == 0:
                processes = tree(self._process)
            self.peak_bytes = max(self.peak_bytes, resident_bytes(processes))
            self.samples += 1
