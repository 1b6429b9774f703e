"""How often something took how long, in fixed classes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts values by class; cheap enough for every step, and may be read from another thread at any time.

    Args:
        bounds: the upper bounds of the classes, rising; one more class takes what is above.

    Attributes:
        counts: values in each class, the last one for those above all bounds.
        total: the sum of all values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """One more value; a bound belongs to the class below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound, values up to it), the last bound `+Inf`: as Prometheus counts."""
        counted, rows = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), list(self.counts), strict=True):
            counted += count
            rows.append((bound, counted))
        return rows
