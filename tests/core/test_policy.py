"""The reference policy: one table row per rule, and properties over any pool."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.core.memory import MemoryReading, Policy
from omlxd.core.policy import AbortRequests, Action, CancelLoad, Decision, DropCache, Outcome, Unload, decide
from omlxd.core.snapshot import EntrySnapshot, Limits, Snapshot, WantedBlock
from omlxd.core.states import EntryState

MIB = 1024 * 1024
NOW_S = 1000.0


def model(name: str, *, used_s: float = 0.0, state: EntryState = EntryState.LOADED, **more: object) -> EntrySnapshot:
    values = {"weights_bytes": 100 * MIB, "last_used_s": used_s, **more}
    if values.get("running") or values.get("waiting"):
        values["last_used_s"] = NOW_S
    return EntrySnapshot(name=name, state=state, **values)  # type: ignore[arg-type]


def loading(name: str, order: int = 1) -> EntrySnapshot:
    return model(name, state=EntryState.LOADING, loading_order=order, leases=1)


def over(*entries: EntrySnapshot, active_mib: int = 500, at_rest: bool = True, cache_mib: int = 0) -> Snapshot:
    reading = MemoryReading(active_bytes=active_mib * MIB, cache_bytes=cache_mib * MIB, at_rest=at_rest)
    return Snapshot(NOW_S, reading, entries)


SOFT = Limits(soft_bytes=400 * MIB, hard_bytes=10_000 * MIB, policy=Policy.REFERENCE)

WANTED = WantedBlock("a", 16 * MIB, 6 * MIB, "the soft limit 400 MiB (max_memory)")
MIN_AVAILABLE = replace(SOFT, min_available_bytes=1024 * MIB)


def short_system(*entries: EntrySnapshot, cache_mib: int = 0, at_rest: bool = True) -> Snapshot:
    reading = MemoryReading(
        active_bytes=300 * MIB,
        cache_bytes=cache_mib * MIB,
        system_total_bytes=8192 * MIB,
        system_available_bytes=1000 * MIB,
        at_rest=at_rest,
    )
    return Snapshot(NOW_S, reading, entries)


RULES: dict[str, tuple[Snapshot, Limits, Action | None, Outcome]] = {
    "R1 the reference compares active memory alone, not what else the process holds": (
        Snapshot(NOW_S, MemoryReading(active_bytes=300 * MIB, overhead_bytes=900 * MIB), (model("a"), model("b"))),
        SOFT,
        None,
        Outcome.WITHIN_LIMIT,
    ),
    "R2 a limit of 0 enforces nothing": (
        over(model("a"), model("b")),
        replace(SOFT, soft_bytes=0, hard_bytes=0),
        None,
        Outcome.WITHIN_LIMIT,
    ),
    "R3 active and cache over the hard limit drop the cache": (
        over(model("a"), active_mib=300, cache_mib=200),
        replace(SOFT, hard_bytes=420 * MIB),
        DropCache(),
        Outcome.ACT,
    ),
    "R3 the cache is dropped inside a step too": (
        over(model("a"), model("b"), active_mib=500, cache_mib=1, at_rest=False),
        replace(SOFT, hard_bytes=420 * MIB),
        DropCache(),
        Outcome.ACT,
    ),
    "R6 a block that is wanted counts before it is there": (
        replace(over(model("a", running=1), model("b"), active_mib=390), wanted=WANTED),
        SOFT,
        Unload("b"),
        Outcome.ACT,
    ),
    "R7 a block that is wanted counts before it is there": (
        replace(over(model("a", running=1), active_mib=390), wanted=WANTED),
        SOFT,
        AbortRequests("a"),
        Outcome.ACT,
    ),
    "R7 small requests are let through once aborting has not helped": (
        over(model("a", running=1), active_mib=500),
        replace(SOFT, tolerated_bytes=516 * MIB),
        None,
        Outcome.UNACCOUNTED,
    ),
    "R7 but only as far as that": (
        over(model("a", running=1), active_mib=517),
        replace(SOFT, tolerated_bytes=516 * MIB),
        AbortRequests("a"),
        Outcome.ACT,
    ),
    "a short system takes a cache that suffices first": (
        short_system(model("a"), model("b"), cache_mib=24),
        MIN_AVAILABLE,
        DropCache(),
        Outcome.ACT,
    ),
    "a short system takes idle models, least recently used first": (
        short_system(model("a", used_s=5), model("b", used_s=7), model("c", running=1), cache_mib=23),
        MIN_AVAILABLE,
        Unload("a"),
        Outcome.ACT,
    ),
    "a short system takes no busy, pinned or last model": (
        short_system(model("a", running=1), model("b", pinned=True)),
        MIN_AVAILABLE,
        None,
        Outcome.SYSTEM_SHORT,
    ),
    "a short system takes the newest load when no model is idle": (
        short_system(model("a", running=1), loading("new")),
        MIN_AVAILABLE,
        CancelLoad("new"),
        Outcome.ACT,
    ),
    "a short system decides at rest only": (
        short_system(model("a"), model("b"), at_rest=False),
        MIN_AVAILABLE,
        None,
        Outcome.SYSTEM_SHORT,
    ),
    "a system that has what it needs is left alone": (
        short_system(model("a"), model("b")),
        replace(SOFT, min_available_bytes=1000 * MIB),
        None,
        Outcome.WITHIN_LIMIT,
    ),
    "R4 usage equal to the limit is not over it": (
        over(model("a"), model("b"), active_mib=400),
        SOFT,
        None,
        Outcome.WITHIN_LIMIT,
    ),
    "R4 a byte more is": (
        Snapshot(NOW_S, MemoryReading(active_bytes=400 * MIB + 1), (model("a", used_s=1), model("b", used_s=2))),
        SOFT,
        Unload("a"),
        Outcome.ACT,
    ),
    "R6 the least recently used goes": (
        over(model("a", used_s=30), model("b", used_s=10), model("c", used_s=20)),
        SOFT,
        Unload("b"),
        Outcome.ACT,
    ),
    "R6 an idle one goes before a busy one that was used earlier": (
        over(model("a", used_s=1, running=1), model("b", used_s=900)),
        SOFT,
        Unload("b"),
        Outcome.ACT,
    ),
    "R6 a busy one goes when all are busy, by name": (
        over(model("b", running=1), model("a", running=1)),
        SOFT,
        Unload("a"),
        Outcome.ACT,
    ),
    "R6 a waiting request makes a model as busy as a running one": (
        over(model("a", used_s=1, waiting=1), model("b", used_s=999)),
        SOFT,
        Unload("b"),
        Outcome.ACT,
    ),
    "R6 a reading inside a step costs nobody anything": (
        over(model("a"), model("b"), at_rest=False),
        SOFT,
        None,
        Outcome.NOT_AT_REST,
    ),
    "R6 nothing more goes while memory is on its way back": (
        over(model("a"), model("b"), model("c", state=EntryState.UNLOADING)),
        SOFT,
        None,
        Outcome.UNLOADING,
    ),
    "R7 the only model stays and its requests end": (
        over(model("a", running=2)),
        SOFT,
        AbortRequests("a"),
        Outcome.ACT,
    ),
    "R7 even a pinned only model's requests end": (
        over(model("a", running=2, pinned=True)),
        SOFT,
        AbortRequests("a"),
        Outcome.ACT,
    ),
    "R8 nothing to unload and a load in progress: it is cancelled": (
        over(model("a"), loading("b")),
        SOFT,
        CancelLoad("b"),
        Outcome.ACT,
    ),
    "R8 the newest load goes first": (
        over(loading("a", order=2), loading("b", order=1)),
        SOFT,
        CancelLoad("a"),
        Outcome.ACT,
    ),
    "R8 an idle model goes before a load is cancelled": (
        over(model("a"), model("c"), loading("b")),
        SOFT,
        Unload("a"),
        Outcome.ACT,
    ),
    "R9 all pinned": (
        over(model("a", pinned=True), model("b", pinned=True)),
        SOFT,
        None,
        Outcome.ALL_PINNED,
    ),
    "R9 the only model is idle": (over(model("a")), SOFT, None, Outcome.UNACCOUNTED),
    "R9 nothing is loaded": (over(), SOFT, None, Outcome.UNACCOUNTED),
    "R9 failed and unloaded models count for nothing": (
        over(model("a", state=EntryState.FAILED), model("b", state=EntryState.UNLOADED)),
        SOFT,
        None,
        Outcome.UNACCOUNTED,
    ),
    "R10 a pinned model is passed over": (
        over(model("a", used_s=1, pinned=True), model("b", used_s=9)),
        SOFT,
        Unload("b"),
        Outcome.ACT,
    ),
    "R10 requests of pinned models are left alone between soft and hard": (
        over(model("a", pinned=True, running=1), model("b", pinned=True, running=1)),
        SOFT,
        None,
        Outcome.ALL_PINNED,
    ),
    "beyond R9, above hard, the busiest pinned one's requests end": (
        over(
            model("a", pinned=True, running=1, kv_bytes=5),
            model("b", pinned=True, running=1, kv_bytes=9),
            active_mib=500,
        ),
        replace(SOFT, hard_bytes=450 * MIB),
        AbortRequests("b"),
        Outcome.ACT,
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_reference_policy_follows(rule: str) -> None:
    snapshot, limits, action, outcome = RULES[rule]
    decision = decide(snapshot, limits)
    assert (decision.action, decision.outcome) == (action, outcome)
    assert decision.reason


def test_a_decision_says_what_was_seen_who_was_considered_and_why() -> None:
    snapshot = over(model("chat", used_s=990, running=1), model("code", used_s=940), model("big", pinned=True))
    decision = decide(snapshot, SOFT)
    assert decision.reason == (
        "active memory 500 MiB is 100 MiB over the soft limit 400 MiB (max_memory);"
        " `code` is the least recently used model that is not pinned (unused for 60.0 s)"
    )
    assert [(each.model, each.chosen, each.why) for each in decision.candidates] == [
        ("big", False, "pinned"),
        ("code", True, "least recently used and not pinned"),
        ("chat", False, "busy"),
    ]


def test_the_victim_is_found_behind_more_pinned_models_than_a_decision_names() -> None:
    pinned = [model(f"p{n:02}", used_s=n, pinned=True) for n in range(50)]
    decision = decide(over(*pinned, model("z", used_s=900)), SOFT)
    assert decision.action == Unload("z")
    assert sum(candidate.chosen for candidate in decision.candidates) == 1


entries = st.builds(
    EntrySnapshot,
    name=st.sampled_from([f"m{n}" for n in range(8)]),
    state=st.sampled_from(list(EntryState)),
    pinned=st.booleans(),
    weights_bytes=st.integers(0, 1000),
    kv_bytes=st.integers(0, 300),
    running=st.integers(0, 3),
    waiting=st.integers(0, 2),
    leases=st.integers(0, 2),
    last_used_s=st.integers(0, 5).map(float),
    loading_order=st.none() | st.integers(1, 9),
)
pools = st.lists(entries, max_size=8, unique_by=lambda entry: entry.name).map(tuple)
limits_of_any_kind = st.builds(
    Limits, soft_bytes=st.integers(0, 4000), hard_bytes=st.integers(0, 4000), policy=st.just(Policy.REFERENCE)
)


class Memory:
    """What a pool would hold after each action; unaccounted bytes stay."""

    def __init__(self, pool: tuple[EntrySnapshot, ...], leak_bytes: int, cache_bytes: int) -> None:
        self.pool = {entry.name: entry for entry in pool if entry.state is not EntryState.UNLOADING}
        self.leak_bytes, self.cache_bytes = leak_bytes, cache_bytes

    def snapshot(self) -> Snapshot:
        active = self.leak_bytes + sum(entry.committed_bytes for entry in self.pool.values())
        return Snapshot(10.0, MemoryReading(active_bytes=active, cache_bytes=self.cache_bytes), (*self.pool.values(),))

    def do(self, action: Action) -> None:
        match action:
            case DropCache():
                assert self.cache_bytes
                self.cache_bytes = 0
            case Unload(model=name):
                assert not self.pool[name].pinned
                loaded = [entry for entry in self.pool.values() if entry.state is EntryState.LOADED]
                assert len(loaded) > 1
                self.pool[name] = replace(self.pool[name], state=EntryState.UNLOADED, kv_bytes=0, running=0)
            case AbortRequests(model=name):
                assert self.pool[name].running
                self.pool[name] = replace(self.pool[name], kv_bytes=0, running=0)
            case CancelLoad(model=name):
                assert self.pool[name].state is EntryState.LOADING
                self.pool[name] = replace(self.pool[name], state=EntryState.UNLOADED)


@given(pools, limits_of_any_kind, st.integers(0, 5000), st.integers(0, 5000))
def test_acting_and_looking_again_always_ends_and_never_takes_more_than_it_must(
    pool: tuple[EntrySnapshot, ...], limits: Limits, leak_bytes: int, cache_bytes: int
) -> None:
    memory = Memory(pool, leak_bytes, cache_bytes)
    for _ in range(3 * len(pool) + 2):
        decision = decide(memory.snapshot(), limits)
        if decision.action is None:
            break
        memory.do(decision.action)
    else:
        raise AssertionError("the ladder does not end")
    assert decision.outcome is not Outcome.ACT
    if decision.exhausted:
        assert 0 < limits.soft_bytes < decision.pressure_bytes


@given(pools, limits_of_any_kind, st.integers(0, 5000), st.booleans(), st.randoms(use_true_random=False))
def test_the_same_pool_in_any_order_gives_the_same_decision(
    pool: tuple[EntrySnapshot, ...], limits: Limits, active: int, at_rest: bool, random: object
) -> None:
    reading = MemoryReading(active_bytes=active, at_rest=at_rest)
    shuffled = list(pool)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    first = decide(Snapshot(10.0, reading, pool), limits)
    second = decide(Snapshot(10.0, reading, tuple(shuffled)), limits)
    assert _essence(first) == _essence(second)


def _essence(decision: Decision) -> tuple[object, ...]:
    return (decision.rung, decision.action, decision.candidates, decision.outcome)


@given(pools, limits_of_any_kind, st.integers(0, 5000))
def test_inside_a_step_nothing_but_the_cache_is_ever_taken(
    pool: tuple[EntrySnapshot, ...], limits: Limits, active: int
) -> None:
    snapshot = Snapshot(10.0, MemoryReading(active_bytes=active, cache_bytes=10, at_rest=False), pool)
    assert decide(snapshot, limits).action in (None, DropCache())
