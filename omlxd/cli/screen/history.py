"""Memory used in the last minutes, for the line below the memory bar."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from omlxd.cli.memory_bar import compared_bytes

KEPT_S: Final = 180.0


class History:
    """Figures by their time, in seconds of a monotonic clock; what is older than `KEPT_S` is dropped."""

    def __init__(self) -> None:
        self._figures: deque[tuple[float, int]] = deque()

    def add(self, at_s: float, status: Mapping[str, Any]) -> None:
        """What the policy compared with the limits then."""
        self._figures.append((at_s, compared_bytes(status)))
        while self._figures[0][0] < at_s - KEPT_S:
            self._figures.popleft()

    def begin(self, now_s: float, ages_s: Sequence[float], used: Sequence[int]) -> None:
        """Figures that the daemon has taken before, oldest first."""
        told = zip(ages_s, used, strict=False)
        self._figures.extendleft(reversed([(now_s - age_s, int(figure)) for age_s, figure in told if age_s <= KEPT_S]))

    def columns(self, now_s: float, cells: int) -> list[int | None]:
        """The highest figure of each of so many equal parts of the last `KEPT_S`, oldest first; None for no figure."""
        highest: list[int | None] = [None] * cells
        for at_s, figure in self._figures:
            cell = cells - 1 - int((now_s - at_s) * cells / KEPT_S)
            if 0 <= cell < cells:
                before = highest[cell]
                highest[cell] = figure if before is None else max(before, figure)
        return highest
