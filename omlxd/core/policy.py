"""The enforcer's mind: from what is seen to the one next action, as a ladder of pure rungs.

A rung looks at the case and either says what to do (or that nothing is to be done) or passes it on with None. A policy
is a tuple of rungs, cheapest first; `decide` returns the first answer. It proposes one action only: after it the memory
is read again, at rest, and the ladder is walked again, so that one action too many never happens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from heapq import nsmallest
from typing import Final

from omlxd.core.memory import MemoryReading, Policy
from omlxd.core.snapshot import Candidate, EntrySnapshot, Limits, Snapshot, WantedBlock
from omlxd.core.states import EntryState
from omlxd.core.units import format_bytes

MAX_CANDIDATES: Final = 20  # of the models considered, how many a decision names


@dataclass(frozen=True, slots=True)
class DropCache:
    """Give MLX's freed buffers back; costs nothing."""


@dataclass(frozen=True, slots=True)
class Unload:
    """Abort the model's running requests and unload it; its waiting requests survive."""

    model: str


@dataclass(frozen=True, slots=True)
class CancelLoad:
    """Stop the load at its next slice."""

    model: str


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """Abort the model's running requests, so that their KV caches are freed, and keep it loaded."""

    model: str


@dataclass(frozen=True, slots=True)
class TrimPrefixCaches:
    """Shrink the prefix caches of all models together to `keep_bytes`, least recently used first."""

    keep_bytes: int


@dataclass(frozen=True, slots=True)
class Park:
    """Take a running request out, free its KV cache, keep its tokens, and run it again when it fits."""

    model: str
    request: str


Action = DropCache | Unload | CancelLoad | AbortRequests | TrimPrefixCaches | Park


class Outcome(StrEnum):
    """What a decision amounts to."""

    WITHIN_LIMIT = "within_limit"
    ACT = "act"
    NOT_AT_REST = "not_at_rest"
    UNLOADING = "unloading"
    ALL_PINNED = "all_pinned"
    UNACCOUNTED = "unaccounted"
    SYSTEM_SHORT = "system_short"


@dataclass(frozen=True, slots=True)
class Decision:
    """The next action, if any, and its reason in plain words with numbers.

    `candidates` holds those considered in the order of choice, at most `MAX_CANDIDATES`.
    """

    rung: str
    action: Action | None
    candidates: tuple[Candidate, ...]
    reason: str
    pressure_bytes: int
    soft_bytes: int
    outcome: Outcome

    @property
    def exhausted(self) -> bool:
        """Over the limit with nothing left to do (R9)."""
        return self.outcome in (Outcome.ALL_PINNED, Outcome.UNACCOUNTED)


@dataclass(frozen=True, slots=True)
class Case:
    """What every rung needs, worked out once per decision."""

    limits: Limits
    reading: MemoryReading
    pressure_bytes: int
    now_s: float
    loaded: tuple[EntrySnapshot, ...]
    loading: tuple[EntrySnapshot, ...]
    unloading: tuple[EntrySnapshot, ...]
    wanted: WantedBlock | None = None

    @property
    def over_text(self) -> str:
        """`active memory 5.0 GiB is 1.0 GiB over the soft limit 4.0 GiB (max_memory)`."""
        if self.wanted is not None:
            return (
                f"the next block of `{self.wanted.model}`'s KV cache ({format_bytes(self.wanted.need_bytes)})"
                f" would be {format_bytes(self.wanted.short_bytes)} over {self.wanted.limit}"
            )
        gauge = "active memory" if self.limits.policy is Policy.REFERENCE else "used memory"
        over = format_bytes(self.pressure_bytes - self.limits.soft_bytes)
        soft = format_bytes(self.limits.soft_bytes)
        return (
            f"{gauge} {format_bytes(self.pressure_bytes)} is {over} over the soft limit {soft} ({self.limits.binding})"
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
        return Decision(rung, action, candidates, reason, self.pressure_bytes, self.limits.soft_bytes, outcome)


Rung = Callable[[Case], Decision | None]


def decide(snapshot: Snapshot, limits: Limits) -> Decision:
    """The one next action for this snapshot, or a decision with `action=None` that says why there is none."""
    by_state: dict[EntryState, list[EntrySnapshot]] = {state: [] for state in EntryState}
    for entry in snapshot.entries:
        by_state[entry.state].append(entry)
    case = Case(
        limits=limits,
        reading=snapshot.reading,
        pressure_bytes=_pressure_bytes(snapshot, limits),
        now_s=snapshot.now_s,
        loaded=tuple(by_state[EntryState.LOADED]),
        loading=tuple(by_state[EntryState.LOADING]),
        unloading=tuple(by_state[EntryState.UNLOADING]),
        wanted=snapshot.wanted,
    )
    for rung in LADDERS[limits.policy]:
        if (decision := rung(case)) is not None:
            return decision
    raise AssertionError("a ladder ends with a rung that always answers")


def _pressure_bytes(snapshot: Snapshot, limits: Limits) -> int:
    """What is compared with the soft limit: what was read, or what it would be with the block that is wanted."""
    read_bytes = snapshot.reading.pressure_bytes(limits.policy)
    return max(read_bytes, limits.soft_bytes + snapshot.wanted_bytes) if snapshot.wanted_bytes > 0 else read_bytes


def _drop_cache(case: Case) -> Decision | None:
    """Rung 1: freed buffers go first, since nobody misses them; the only action a reading inside a step may cause."""
    both_bytes, hard_bytes = case.reading.active_bytes + case.reading.cache_bytes, case.limits.hard_bytes
    if not hard_bytes or not case.reading.cache_bytes or both_bytes <= hard_bytes:
        return None
    reason = (
        f"active and cache memory {format_bytes(both_bytes)} are over the hard limit {format_bytes(hard_bytes)};"
        f" the cache holds {format_bytes(case.reading.cache_bytes)}"
    )
    return case.answer("drop_cache", DropCache(), reason)


def _within_limit(case: Case) -> Decision | None:
    """R2, R4: no limit is no pressure, and usage equal to the limit is not over it."""
    soft_bytes = case.limits.soft_bytes
    if soft_bytes <= 0:
        return case.answer("within_limit", None, "no limit is enforced", Outcome.WITHIN_LIMIT)
    if case.pressure_bytes > soft_bytes:
        return None
    text = f"{format_bytes(case.pressure_bytes)} is within the soft limit {format_bytes(soft_bytes)}"
    return case.answer("within_limit", None, text, Outcome.WITHIN_LIMIT)


def _system_short(case: Case) -> Decision | None:
    """Other programs leave the system too little: what costs nobody anything goes; running requests stay."""
    if case.pressure_bytes > case.limits.soft_bytes > 0 or not case.limits.system_short(case.reading):
        return None
    reason = (
        f"the system has {format_bytes(case.reading.system_available_bytes)} available,"
        f" less than `min_available` {format_bytes(case.limits.min_available_bytes)} (system)"
    )
    missing_bytes = case.limits.min_available_bytes - case.reading.system_available_bytes
    if case.reading.cache_bytes >= missing_bytes:
        return case.answer("system_cache", DropCache(), reason)
    if not case.reading.at_rest or case.unloading:
        return case.answer("system_short", None, reason, Outcome.SYSTEM_SHORT)
    order = nsmallest(MAX_CANDIDATES, case.loaded, key=_lru_key)
    idle = [entry for entry in case.loaded if not entry.pinned and not entry.busy]
    if idle and len(case.loaded) > 1:
        victim = min(idle, key=_lru_key)
        reason = f"{reason}; `{victim.name}` is idle ({_unused_for(victim, case.now_s)})"
        return case.answer("system_unload", Unload(victim.name), reason, candidates=_candidates(order, victim))
    if case.loading:
        newest = max(case.loading, key=lambda entry: (entry.loading_order or 0, entry.name))
        return case.answer("system_cancel_load", CancelLoad(newest.name), reason)
    return case.answer("system_short", None, reason, Outcome.SYSTEM_SHORT)


def _only_at_rest(case: Case) -> Decision | None:
    """A step in flight holds memory that it gives back by itself; it costs nobody anything."""
    if case.reading.at_rest:
        return None
    return case.answer("not_at_rest", None, f"{case.over_text}, but a step is in flight", Outcome.NOT_AT_REST)


def _await_unloading(case: Case) -> Decision | None:
    """Memory that is on its way back is not freed twice."""
    if not case.unloading:
        return None
    names = ", ".join(f"`{entry.name}`" for entry in case.unloading[:3])
    return case.answer("unloading", None, f"{case.over_text}, and {names} is being unloaded", Outcome.UNLOADING)


def _unload_lru(case: Case) -> Decision | None:
    """R6, R10: the least recently used model that is not pinned, while more than one is loaded."""
    if len(case.loaded) < 2 or all(entry.pinned for entry in case.loaded):
        return None
    order = nsmallest(MAX_CANDIDATES, case.loaded, key=_lru_key)
    victim = next((entry for entry in order if not entry.pinned), None)
    if victim is None:
        victim = min((entry for entry in case.loaded if not entry.pinned), key=_lru_key)
        order[-1] = victim
    idle = "it has requests, which are aborted" if victim.busy else _unused_for(victim, case.now_s)
    reason = f"{case.over_text}; `{victim.name}` is the least recently used model that is not pinned ({idle})"
    return case.answer("unload", Unload(victim.name), reason, candidates=_candidates(order, victim))


def _abort_single(case: Case) -> Decision | None:
    """R7: the only loaded model stays; aborting its requests frees their KV caches."""
    if len(case.loaded) != 1 or not case.loaded[0].running:
        return None
    if case.wanted is None and case.pressure_bytes <= case.limits.tolerated_bytes:
        return None  # aborting has not helped before; what is small is let through (R9)
    only = case.loaded[0]
    reason = (
        f"{case.over_text}; `{only.name}` is the only loaded model and stays,"
        f" its requests are aborted (KV cache {format_bytes(only.kv_bytes)})"
    )
    chosen = Candidate(only.name, True, "the only loaded model", only.weights_bytes, only.last_used_s)
    return case.answer("abort_requests", AbortRequests(only.name), reason, candidates=(chosen,))


def _cancel_load(case: Case) -> Decision | None:
    """R8: nothing can be unloaded and a load is in progress: the newest is stopped at its next slice."""
    if not case.loading:
        return None
    newest = max(case.loading, key=lambda entry: (entry.loading_order or 0, entry.name))
    reason = f"{case.over_text}; nothing can be unloaded, so the load of `{newest.name}` is cancelled"
    chosen = Candidate(newest.name, True, "the newest load", newest.weights_bytes, newest.last_used_s)
    return case.answer("cancel_load", CancelLoad(newest.name), reason, candidates=(chosen,))


def _abort_pinned(case: Case) -> Decision | None:
    """Beyond R9, above the *hard* limit only: the process dies of an allocation that the machine cannot give
    (a signal on the CPU, an uncatchable abort on Metal), and then every request is lost; aborting some is cheaper."""
    hard_bytes = case.limits.hard_bytes
    busy = [entry for entry in case.loaded if entry.running]
    if not hard_bytes or case.pressure_bytes <= hard_bytes or not busy:
        return None
    busiest = min(busy, key=lambda entry: (-entry.kv_bytes, -entry.running, entry.name))
    reason = (
        f"{case.over_text} and over the hard limit {format_bytes(hard_bytes)}; all loaded models are pinned,"
        f" so the requests of `{busiest.name}` are aborted (KV cache {format_bytes(busiest.kv_bytes)})"
    )
    chosen = Candidate(busiest.name, True, "pinned, with the largest KV cache", busiest.weights_bytes, case.now_s)
    return case.answer("abort_pinned", AbortRequests(busiest.name), reason, candidates=(chosen,))


def _report(case: Case) -> Decision:
    """R9: nothing is left to do; say which of the two it is."""
    if case.loaded and all(entry.pinned for entry in case.loaded):
        candidates = _candidates(nsmallest(MAX_CANDIDATES, case.loaded, key=_lru_key), None)
        count = "the only loaded model is" if len(case.loaded) == 1 else f"all {len(case.loaded)} loaded models are"
        reason = f"{case.over_text}, and {count} pinned"
        return case.answer("report", None, reason, Outcome.ALL_PINNED, candidates)
    known_bytes = sum(entry.held_bytes for entry in case.loaded)
    what = f"`{case.loaded[0].name}` is the only loaded model and is idle" if case.loaded else "no model is loaded"
    if known_bytes > case.limits.soft_bytes:
        rest = f"its weights alone ({format_bytes(case.loaded[0].weights_bytes)}) are more than the limit"
    else:
        rest = f"{format_bytes(max(0, case.pressure_bytes - known_bytes))} are unaccounted for"
    reason = f"{case.over_text}; {what}, and {rest}"
    return case.answer("report", None, reason, Outcome.UNACCOUNTED)


_REFERENCE: Final[tuple[Rung, ...]] = (
    _drop_cache,
    _system_short,
    _within_limit,
    _only_at_rest,
    _await_unloading,
    _unload_lru,
    _abort_single,
    _cancel_load,
    _abort_pinned,
    _report,
)

LADDERS: Final[Mapping[Policy, tuple[Rung, ...]]] = {Policy.REFERENCE: _REFERENCE, Policy.GRACEFUL: _REFERENCE}


def _lru_key(entry: EntrySnapshot) -> tuple[float, bool, str]:
    """Least recently used first; at the same instant the idle one, then by name, so that a tie has one answer."""
    return (entry.last_used_s, entry.busy, entry.name)


def _unused_for(entry: EntrySnapshot, now_s: float) -> str:
    return f"unused for {max(0.0, now_s - entry.last_used_s):.1f} s"


def _candidates(order: list[EntrySnapshot], victim: EntrySnapshot | None) -> tuple[Candidate, ...]:
    def why(entry: EntrySnapshot) -> str:
        if entry is victim:
            return "least recently used and not pinned"
        if entry.pinned:
            return "pinned"
        return "busy" if entry.busy else "used more recently"

    return tuple(
        Candidate(entry.name, entry is victim, why(entry), entry.weights_bytes, entry.last_used_s) for entry in order
    )
