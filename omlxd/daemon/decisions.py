"""The record of decisions: one event each, with what was seen, who was considered, what was done and what it freed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from omlxd.core.case import MAX_CANDIDATES
from omlxd.core.events import Emit, Event, EventLevel, EventName
from omlxd.core.memory import MemoryReading
from omlxd.core.snapshot import Candidate, Limits

KEPT_DECISIONS = 20


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """One decision that was acted upon; bytes and seconds.

    Attributes:
        trigger: `limit` (the enforcer), `load`, `request` or `block` (room was made for one), `ttl` or `reload`.
        rung: the rung of the ladder that answered.
        action: what was done: unload, cancel_load, abort_requests, cut_short, park, drop_cache or trim_prefix_caches.
        victim: the model it was done to, None for the cache.
        reason: plain words with numbers.
        before, after: the readings around the action, at rest.
        candidates: the models that were considered, and why each was or was not chosen; of very many as many are told
            as a decision of the ladder names.
        duration_s: from the decision until the memory was read again.
        extra: numbers of this kind of decision.
        decision: the id that `begin` gave before the action, so that what it caused carries it too; None for a new one.
    """

    trigger: str
    rung: str
    action: str
    victim: str | None
    reason: str
    before: MemoryReading
    after: MemoryReading
    candidates: Sequence[Candidate] = ()
    duration_s: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    decision: str | None = None


class DecisionLog:
    """Numbers the decisions of one pool, tells them to `emit`, and keeps the last ones for `status`."""

    def __init__(self, emit: Emit, clock: Callable[[], float] = time.time) -> None:
        self._emit, self._clock = emit, clock
        self._recent: deque[dict[str, Any]] = deque(maxlen=KEPT_DECISIONS)
        self._ids = count(1)
        self._requests: dict[str, list[str]] = {}  # of the decisions that are being carried out
        self._gathering: list[list[Mapping[str, Any]]] = []
        self.count = 0

    @property
    def recent(self) -> tuple[dict[str, Any], ...]:
        """The last decisions as their events' fields, with the time (`ts`, seconds since the epoch), oldest first."""
        return tuple(self._recent)

    @contextmanager
    def gathered(self) -> Iterator[Sequence[Mapping[str, Any]]]:
        """All decisions from here to the end of the `with`, as `recent` has them, and however many they are."""
        found: list[Mapping[str, Any]] = []
        self._gathering.append(found)
        try:
            yield found
        finally:
            self._gathering = [each for each in self._gathering if each is not found]

    def begin(self) -> str:
        """The id of a decision that is about to be carried out; of one that comes to nothing it is not used again."""
        decision = f"d{next(self._ids)}"
        self._requests.clear()  # decisions are carried out one at a time; one that came to nothing leaves nothing
        self._requests[decision] = []
        return decision

    def cost(self, decision: str, request: str) -> None:
        """The request ended, or was parked, because of this decision."""
        if decision in self._requests:
            self._requests[decision].append(request)

    def add(self, record: DecisionRecord, limits: Limits) -> str:
        """Log the decision; returns its id."""
        self.count += 1
        decision = record.decision or f"d{next(self._ids)}"
        before_bytes = record.before.pressure_bytes(limits.policy)
        after_bytes = record.after.pressure_bytes(limits.policy)
        fields = {
            "trigger": record.trigger,
            "policy": limits.policy.value,
            "rung": record.rung,
            "action": record.action,
            "victim": record.victim,
            "reason": record.reason,
            "before_bytes": before_bytes,
            "after_bytes": after_bytes,
            "freed_bytes": before_bytes - after_bytes,
            "soft_limit_bytes": limits.soft_bytes,
            "hard_limit_bytes": limits.hard_bytes,
            "binding": limits.binding,
            "limit_origin": limits.origin.value,
            "duration_s": round(record.duration_s, 6),
            "seen": record.before.to_json(),
            "candidates": [asdict(candidate) for candidate in _named(record.candidates)],
            "requests": self._requests.pop(decision, []),
            **record.extra,
        }
        self._recent.append(told := {"decision": decision, "ts": self._clock(), **fields})
        for gathering in self._gathering:
            gathering.append(told)
        self._emit(Event(EventName.DECISION, EventLevel.INFO, model=record.victim, decision=decision, fields=fields))
        return decision


def _named(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """As many as a record has room for, those that were chosen first."""
    if len(candidates) <= MAX_CANDIDATES:
        return candidates
    chosen_first = sorted(range(len(candidates)), key=lambda index: not candidates[index].chosen)
    return [candidates[index] for index in sorted(chosen_first[:MAX_CANDIDATES])]
