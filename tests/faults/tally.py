"""What a fault cost: a row of the campaign's table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

WIDTH = 58


@dataclass
class Tally:
    """Counts of one fault, each entry with its reason.

    Attributes:
        fault: what was done.
        times: how often.
        lost: requests that were neither wholly answered nor ended by a clear error, as policy says.
        wrong: texts other than the undisturbed greedy one; state, pins and log lines other than they should be.
        leaked: what was not back at its base: ledger, requests, memory, threads, descriptors.
        note: what a reader should know about this run of it.
    """

    fault: str
    times: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    note: str = ""

    @property
    def clean(self) -> bool:
        """Whether it happened at all, and cost nothing."""
        return self.times > 0 and not (self.lost or self.wrong or self.leaked)

    def __str__(self) -> str:
        counts = "".join(f"{len(each):>8}" for each in (self.lost, self.wrong, self.leaked))
        return "\n".join([f"{self.fault:<{WIDTH}}{self.times:>7}{counts}", *self._below()])

    def _below(self) -> Iterable[str]:
        if self.note:
            yield f"    {self.note}"
        for kind, reasons in (("lost", self.lost), ("wrong", self.wrong), ("leaked", self.leaked)):
            yield from (f"    {kind}: {reason}" for reason in reasons[:10])


HEAD = f"{'fault':<{WIDTH}}{'times':>7}{'lost':>8}{'wrong':>8}{'leaked':>8}"
