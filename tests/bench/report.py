"""Rows of a benchmark: what was measured, against what, whether the target is met; and how they are printed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle and the ends of some measurements of one thing."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(median(values), min(values), max(values), len(values))


class Judged(StrEnum):
    """Which number a target is about."""

    MEDIAN = "median"
    WORST = "worst"
    RATIO = "ratio"


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on our median, on our worst (for at most: highest) value, or on the ratio to the peer."""

    bound: float
    judged: Judged = Judged.MEDIAN
    at_most: bool = True

    def __str__(self) -> str:
        return f"{self.judged} {'≤' if self.at_most else '≥'} {number(self.bound)}"

    def is_met(self, row: Row) -> bool | None:
        """None when the row has no ratio to judge."""
        if self.judged is Judged.RATIO:
            value = None if row.ratio is None else row.ratio.median
        elif self.judged is Judged.WORST:
            value = row.ours.high if self.at_most else row.ours.low
        else:
            value = row.ours.median
        return None if value is None else (value <= self.bound if self.at_most else value >= self.bound)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        figure: what was measured, in plain words.
        unit: of `ours` and `peer`.
        ours, peer: the measurements.
        peer_name: what it is compared with; without `peer` it could not be measured, and `note` says why.
        ratio: ours / peer, round by round, so that noise which both saw cancels out.
        target: None for a figure that only informs.
        note: what a reader should know about this run of it.
        load_average: of the machine over the last minute, when the row was made.
    """

    figure: str
    unit: str
    ours: Spread
    peer_name: str = ""
    peer: Spread | None = None
    ratio: Spread | None = None
    target: Target | None = None
    note: str = ""
    load_average: float = field(default_factory=lambda: os.getloadavg()[0])

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        return self.target.is_met(self) if self.target else None

    def to_json(self) -> dict[str, Any]:
        """The row with its verdict."""
        target = str(self.target) if self.target else None
        return {**asdict(self), "target": target, "met": self.met}


def alone(figure: str, unit: str, values: Sequence[float], target: Target | None = None, note: str = "") -> Row:
    """A figure without a peer."""
    return Row(figure, unit, Spread.of(values), target=target, note=note)


def against(
    figure: str,
    unit: str,
    ours: Sequence[float],
    peer_name: str,
    peer: Sequence[float],
    target: Target | None = None,
    note: str = "",
) -> Row:
    """A figure beside a peer's; the nth values of both come from the same round."""
    ratio = Spread.of([mine / theirs for mine, theirs in zip(ours, peer, strict=True)])
    return Row(figure, unit, Spread.of(ours), peer_name, Spread.of(peer), ratio, target, note)


def beside(
    figure: str,
    unit: str,
    ours: Sequence[float],
    peer_name: str,
    peer: Sequence[float],
    target: Target | None = None,
    note: str = "",
) -> Row:
    """A figure beside a peer's where a ratio says nothing: counts, either of which may be 0."""
    return Row(figure, unit, Spread.of(ours), peer_name, Spread.of(peer), target=target, note=note)


def unable(figure: str, unit: str, ours: Sequence[float], peer_name: str, why: str) -> Row:
    """A figure that a peer has none of."""
    return Row(figure, unit, Spread.of(ours), peer_name, note=why)


def percentile_95(values: Sequence[float]) -> float:
    """The value that 95 % are not above."""
    return sorted(values)[int(0.95 * (len(values) - 1))]


def format_row(row: Row) -> str:
    """`figure | ours | peer | ratio | target | met`, with the range of each in brackets, and the note below."""
    verdict = {True: "met", False: "NOT MET", None: ""}[row.met]
    cells = [
        f"{row.figure:<46}",
        f"{_spread(row.ours)} {row.unit}".ljust(34),
        (f"{row.peer_name} {_spread(row.peer) if row.peer else '–'}" if row.peer_name else "").ljust(44),
        (f"ratio {_spread(row.ratio)}" if row.ratio else "").ljust(26),
        (str(row.target) if row.target else "").ljust(16),
        f"{verdict:<8}load {row.load_average:.1f}",
    ]
    note = f"\n      {row.note}" if row.note else ""
    return "  " + " ".join(cells) + note


def _spread(spread: Spread) -> str:
    if spread.count == 1:
        return number(spread.median)
    return f"{number(spread.median)} [{number(spread.low)}, {number(spread.high)}]"


def number(value: float) -> str:
    """Three digits that count, without an exponent."""
    if value == 0:
        return "0"
    magnitude = abs(value)
    digits = next((count for count, above in ((0, 100), (1, 10), (2, 1), (3, 0.1)) if magnitude >= above), 5)
    return f"{value:.{digits}f}"
