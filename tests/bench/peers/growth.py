"""Memory that grows at a steady rate until somebody acts, watched each millisecond; it knows nothing but MLX.

For the children of the bench of enforcers, one of which runs in a peer's environment.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

BYTES_PER_S = 1_000_000_000
PIECE_BYTES = 10_000_000
WATCH_S = 0.001
DEADLINE_S = 20.0


@dataclass(slots=True)
class Seen:
    """Milliseconds from the crossing of the soft limit to the action and to the memory, and bytes above it."""

    action_ms: float
    back_ms: float
    overshoot_bytes: int
    lost: int = 0
    past_hard: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Growth:
    """Takes 1 GB/s in pieces of 10 MB from `start` until `acted`, and holds all of it until `release`.

    Args:
        soft_bytes: the limit whose crossing counts.
    """

    def __init__(self, soft_bytes: int) -> None:
        self.soft_bytes = soft_bytes
        self.crossed_s = self.acted_s = self.back_s = 0.0
        self.peak_bytes = 0
        self._held: list[Any] = []
        self._stop = threading.Event()
        self.back = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._take, self._watch)]

    def start(self) -> None:
        """Begin to take."""
        for thread in self._threads:
            thread.start()

    def acted(self) -> None:
        """Somebody unloads a model; called by him, when he begins."""
        if not self.acted_s:
            self.acted_s = time.perf_counter()
            self._stop.set()

    def release(self) -> Seen:
        """Give all back; what was seen. To be called when `back` is set, or nobody is expected to act any more."""
        self._stop.set()
        self.back.set()
        for thread in self._threads:
            thread.join()
        self._held.clear()
        if not self.crossed_s:  # he acted before, or nobody had to
            return Seen(0.0, 0.0, 0)
        now_s = time.perf_counter()
        return Seen(
            1000 * max(0.0, (self.acted_s or now_s) - self.crossed_s),
            1000 * ((self.back_s or now_s) - self.crossed_s),
            self.peak_bytes - self.soft_bytes,
        )

    def _take(self) -> None:
        import mlx.core as mx
        import numpy as np

        piece, began_s = np.ones(PIECE_BYTES // 4, dtype=np.float32), time.perf_counter()
        while not self._stop.is_set() and time.perf_counter() < began_s + DEADLINE_S:
            if len(self._held) * PIECE_BYTES < BYTES_PER_S * (time.perf_counter() - began_s):
                self._held.append(mx.array(piece))  # a copy, made at once: no stream is asked for it
            else:
                time.sleep(WATCH_S)

    def _watch(self) -> None:
        import mlx.core as mx

        while not self.back.is_set():
            active, now_s = mx.get_active_memory(), time.perf_counter()
            self.peak_bytes = max(self.peak_bytes, active)
            if active > self.soft_bytes:
                self.crossed_s = self.crossed_s or now_s
            elif self.acted_s:
                self.back_s = now_s
                self.back.set()
            time.sleep(WATCH_S)
