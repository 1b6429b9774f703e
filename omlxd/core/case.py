"""What every rung of a ladder needs, worked out once per decision, and the words that all of them use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from operator import attrgetter
from typing import Final

from omlxd.core.decision import Action, Decision, Outcome
from omlxd.core.memory import MemoryReading, Policy
from omlxd.core.snapshot import Candidate, EntrySnapshot, Limits, Snapshot, WantedBlock
from omlxd.core.states import EntryState
from omlxd.core.units import format_bytes

_NAME, _BUSY, _USED = attrgetter("name"), attrgetter("busy"), attrgetter("last_used_s")  # faster than a lambda
MAX_CANDIDATES: Final = 20  # of the models or requests considered, how many a decision names


@dataclass(frozen=True, slots=True)
class Case:
    """The snapshot, sorted.

    Attributes:
        pressure_bytes: what is compared with the soft limit.
        futile: actions that have just been taken and changed nothing; not taken again.
        system_short_bytes: what the system lacks, when that is what is to be answered; 0 when it is the limit.
    """

    limits: Limits
    reading: MemoryReading
    pressure_bytes: int
    now_s: float
    loaded: tuple[EntrySnapshot, ...]
    loading: tuple[EntrySnapshot, ...]
    unloading: tuple[EntrySnapshot, ...]
    wanted: WantedBlock | None = None
    futile: frozenset[Action] = frozenset()
    system_short_bytes: int = 0

    @property
    def short_bytes(self) -> int:
        """How much must be freed."""
        return self.system_short_bytes or self.pressure_bytes - self.limits.soft_bytes

    @property
    def over_text(self) -> str:
        """`used memory 5.0 GiB is 1.0 GiB over the soft limit 4.0 GiB (max_memory)`."""
        if self.system_short_bytes:
            return (
                f"the system has {format_bytes(self.reading.system_available_bytes)} available,"
                f" less than `min_available` {format_bytes(self.limits.min_available_bytes)} (system)"
            )
        if self.wanted is not None:
            return (
                f"the next block of `{self.wanted.model}`'s KV cache ({format_bytes(self.wanted.need_bytes)})"
                f" would be {format_bytes(self.wanted.short_bytes)} over {self.wanted.limit}"
            )
        gauge = "active memory" if self.limits.policy is Policy.REFERENCE else "used memory"
        over = format_bytes(self.pressure_bytes - self.limits.soft_bytes)
        soft = format_bytes(self.limits.soft_bytes)
        return (
            f"{gauge} {format_bytes(self.pressure_bytes)} is {over} over the soft limit {soft} ({self.limits.set_by})"
        )

    def answer(
        self,
        rung: str,
        action: Action | None,
        reason: str,
        outcome: Outcome = Outcome.ACT,
        candidates: tuple[Candidate, ...] = (),
    ) -> Decision:
        """A decision with this case's numbers."""
        name = f"system_{rung}" if self.system_short_bytes else rung
        return Decision(name, action, candidates, reason, self.pressure_bytes, self.limits.soft_bytes, outcome)


Rung = Callable[[Case], Decision | None]
"""Says what to do, or that nothing is to be done, or passes the case on with None."""


def case_of(snapshot: Snapshot, limits: Limits, futile: frozenset[Action]) -> Case:
    """The snapshot, sorted by what can be done."""
    loaded_state = EntryState.LOADED
    loaded = [entry for entry in snapshot.entries if entry.state is loaded_state]
    others = [entry for entry in snapshot.entries if entry.state is not loaded_state]
    return Case(
        limits=limits,
        reading=snapshot.reading,
        pressure_bytes=_pressure_bytes(snapshot, limits),
        now_s=snapshot.now_s,
        loaded=tuple(loaded),
        loading=tuple(entry for entry in others if entry.state is EntryState.LOADING),
        unloading=tuple(entry for entry in others if entry.state is EntryState.UNLOADING),
        wanted=snapshot.wanted,
        futile=futile,
    )


def lru_key(entry: EntrySnapshot) -> tuple[float, bool, str]:
    """Least recently used first; at the same instant the idle one, then by name, so that a tie has one answer."""
    return (entry.last_used_s, entry.busy, entry.name)


def lru_order(entries: Iterable[EntrySnapshot]) -> list[EntrySnapshot]:
    """As sorted by `lru_key`, in stable sorts of its parts: a third of the time, since ties are rare."""
    order = list(entries)
    if len(set(map(_USED, order))) < len(order):
        order.sort(key=_NAME)
        order.sort(key=_BUSY)
    order.sort(key=_USED)
    return order


def lru_first(entries: Sequence[EntrySnapshot], count: int = MAX_CANDIDATES) -> list[EntrySnapshot]:
    """The first `count` of `lru_order`, without sorting the others."""
    if len(entries) <= count:
        return lru_order(entries)
    last_s = nsmallest(count, map(_USED, entries))[-1]
    return lru_order([entry for entry in entries if entry.last_used_s <= last_s])[:count]


def unused_for(entry: EntrySnapshot, now_s: float) -> str:
    """`unused for 12.0 s`."""
    return f"unused for {max(0.0, now_s - entry.last_used_s):.1f} s"


def _pressure_bytes(snapshot: Snapshot, limits: Limits) -> int:
    """What is compared with the soft limit: what was read, or what it would be with the block that is wanted."""
    read_bytes = snapshot.reading.pressure_bytes(limits.policy)
    return max(read_bytes, limits.soft_bytes + snapshot.wanted_bytes) if snapshot.wanted_bytes > 0 else read_bytes
