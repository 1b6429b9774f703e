"""What a look at memory says while buffers move between MLX's two gauges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from omlxd.engine.gauges import Gauges
from omlxd.engine.memory_sampler import TRIES, look

QUICK_S, SLOW_S = 5e-6, 5e-3


@dataclass
class Moving(Gauges):
    """Gauges whose figures change from one reading to the next, and a clock that each look takes so long on."""

    looks: Sequence[tuple[int, int, int, float]]
    _at: int = field(default=-1, init=False)
    _reading: int = field(default=0, init=False)

    def active_bytes(self) -> int:
        self._reading += 1
        return self._look[0 if self._reading == 1 else 2]

    def cache_bytes(self) -> int:
        return self._look[1]

    def clock_s(self) -> float:
        """Asked before a look and after it."""
        if self._reading == 0:
            self._at += 1
            return 0.0
        self._reading = 0
        return self._look[3]

    @property
    def _look(self) -> tuple[int, int, int, float]:
        return self.looks[min(self._at, len(self.looks) - 1)]


@pytest.mark.parametrize(
    ("looks", "active", "total"),
    [
        ([(10, 5, 10, QUICK_S)], 10, 15),
        ([(10, 8, 7, QUICK_S), (7, 8, 7, QUICK_S)], 7, 15),  # 3 were freed while it looked
        ([(10, 8, 10, SLOW_S), (10, 5, 10, QUICK_S)], 10, 15),  # 3 were freed, and others taken, in 5 ms
        ([(10, 8, 7, QUICK_S)], 10, 15),  # never at rest: no more than what is sure
    ],
)
def test_a_buffer_that_moves_is_counted_once(
    looks: Sequence[tuple[int, int, int, float]], active: int, total: int
) -> None:
    gauges = Moving(looks)
    assert look(gauges, gauges.clock_s) == (active, total)


def test_it_does_not_look_for_ever() -> None:
    gauges = Moving([(10, 8, 7, SLOW_S)] * (2 * TRIES))
    look(gauges, gauges.clock_s)
    assert gauges._at == TRIES - 1
