"""Looks at memory inside steps too, from a thread of its own, while there is work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from omlxd.engine.gauges import Gauges
from omlxd.engine.protocol import Sampled

ONE_MOMENT_S: Final = 50e-6
TRIES: Final = 20


class MemorySampler:
    """Looks at `active` and `active + cache` a hundred times a second while there is work, inside steps too.

    Attributes:
        peak_active_bytes: the highest `active` seen.
        peak_total_bytes: the highest `active + cache` seen.
        sampled: how often it looked, and what it saw above the hard limit; replaced, never changed.
    """

    def __init__(self, gauges: Gauges, interval_s: float = 0.01) -> None:
        self.peak_active_bytes = 0
        self.peak_total_bytes = 0
        self.sampled = Sampled()
        self.hard_bytes = 0
        self._gauges = gauges
        self._interval_s = interval_s
        self._working = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="omlxd-sampler", daemon=True)

    def start(self) -> None:
        """Begin; it sleeps until `work(True)`."""
        self._thread.start()

    def work(self, working: bool) -> None:
        """Whether the engine has work; an idle engine is not sampled."""
        if working:
            self._working.set()
        else:
            self._working.clear()

    def stop(self) -> None:
        """End the thread; idempotent."""
        self._ended.set()
        self._working.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            self._working.wait()
            if self._ended.wait(self._interval_s):
                return
            active, total = look(self._gauges)
            self.peak_active_bytes = max(self.peak_active_bytes, active)
            self.peak_total_bytes = max(self.peak_total_bytes, total)
            seen, over_bytes = self.sampled, total - self.hard_bytes if self.hard_bytes else 0
            self.sampled = Sampled(
                seen.samples + 1, seen.over_hard_samples + (over_bytes > 0), max(seen.over_hard_bytes, over_bytes)
            )


def look(gauges: Gauges, clock_s: Callable[[], float] = time.perf_counter) -> tuple[int, int]:
    """`active`, and `active + cache`, of one moment, in bytes.

    The two gauges are read one after the other, and a buffer that is freed in between is in both: this thread may be
    kept waiting for milliseconds there, in which steps go on. A look counts when it took no longer than a step of MLX
    needs to use a buffer, and `active` was the same before and after it. Where none of `TRIES` was like that, the
    smaller `active` is taken of the last.
    """
    for _ in range(TRIES):
        began_s = clock_s()
        before, cache, after = gauges.active_bytes(), gauges.cache_bytes(), gauges.active_bytes()
        took_s = clock_s() - began_s
        if before == after and took_s <= ONE_MOMENT_S:
            break
    return max(before, after), min(before, after) + cache
