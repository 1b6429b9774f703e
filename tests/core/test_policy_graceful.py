"""The graceful policy: a table for each rung, and properties over any pool."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.core.memory import MemoryReading, Policy
from omlxd.core.policy import (
    AbortRequests,
    Action,
    CancelLoad,
    Decision,
    DropCache,
    Outcome,
    Park,
    TrimPrefixCaches,
    Unload,
    decide,
)
from omlxd.core.snapshot import EntrySnapshot, Limits, RequestSnapshot, Snapshot, WantedBlock
from omlxd.core.states import EntryState

MIB = 1024 * 1024
NOW_S = 1000.0
SOFT = Limits(soft_bytes=400 * MIB, hard_bytes=10_000 * MIB, policy=Policy.GRACEFUL)
TIGHT = replace(SOFT, hard_bytes=450 * MIB)
MIN_AVAILABLE = replace(SOFT, min_available_bytes=1024 * MIB)
WANTED = WantedBlock("a", 16 * MIB, 6 * MIB, "the soft limit 400 MiB (max_memory)")


def model(name: str, mib: int = 100, *, used_s: float = 0.0, **more: object) -> EntrySnapshot:
    return EntrySnapshot(name, EntryState.LOADED, weights_bytes=mib * MIB, last_used_s=used_s, **more)  # type: ignore[arg-type]


def busy(
    name: str, *requests: RequestSnapshot, waiting: int = 0, mib: int = 100, pinned: bool = False
) -> EntrySnapshot:
    """A model whose `requests` the engine has; those that it has not begun wait as well."""
    count, running = len(requests) + waiting, sum(each.begun for each in requests)
    kv_bytes = sum(each.frees_bytes for each in requests)
    return model(
        name,
        mib,
        used_s=NOW_S,
        running=running,
        waiting=count - running,
        leases=count,
        kv_bytes=kv_bytes,
        requests=tuple(sorted(requests, key=lambda each: each.order)),
        pinned=pinned,
    )


def request(order: int, mib: int = 10, parks: int = 0) -> RequestSnapshot:
    return RequestSnapshot(f"r{order}", order, mib * MIB, parks)


def standing(order: int) -> RequestSnapshot:
    """In the engine's line, and holding nothing yet."""
    return replace(request(order, 0), begun=False)


def loading(name: str, order: int = 1, **more: object) -> EntrySnapshot:
    return replace(model(name, leases=1, **more), state=EntryState.LOADING, loading_order=order)  # type: ignore[arg-type]


def at(used_mib: int, *entries: EntrySnapshot, cache_mib: int = 0, at_rest: bool = True) -> Snapshot:
    reading = MemoryReading(active_bytes=used_mib * MIB, cache_bytes=cache_mib * MIB, at_rest=at_rest)
    return Snapshot(NOW_S, reading, entries)


def wanting(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, wanted=WANTED)


def short_system(*entries: EntrySnapshot, cache_mib: int = 0) -> Snapshot:
    """100 MiB less than there should be."""
    reading = MemoryReading(
        active_bytes=300 * MIB,
        cache_bytes=cache_mib * MIB,
        system_total_bytes=8192 * MIB,
        system_available_bytes=924 * MIB,
    )
    return Snapshot(NOW_S, reading, entries)


RUNGS: dict[str, tuple[Snapshot, Limits, Action | None, Outcome]] = {
    "overhead counts as used": (
        Snapshot(NOW_S, MemoryReading(active_bytes=300 * MIB, overhead_bytes=101 * MIB), (model("a"), model("b"))),
        SOFT,
        Unload("a"),
        Outcome.ACT,
    ),
    "usage equal to the limit is not over it": (at(400, model("a"), model("b")), SOFT, None, Outcome.WITHIN_LIMIT),
    "no limit is no pressure": (
        at(500, model("a"), model("b")),
        replace(SOFT, soft_bytes=0),
        None,
        Outcome.WITHIN_LIMIT,
    ),
    "1 the cache goes first, in a step too": (
        at(440, model("a"), model("b"), cache_mib=20, at_rest=False),
        TIGHT,
        DropCache(),
        Outcome.ACT,
    ),
    "1 within the hard limit the cache is nobody's concern": (
        at(390, model("a"), cache_mib=20),
        TIGHT,
        None,
        Outcome.WITHIN_LIMIT,
    ),
    "nothing else is decided in a step": (
        at(500, model("a"), busy("b", request(1)), at_rest=False),
        SOFT,
        None,
        Outcome.NOT_AT_REST,
    ),
    "nothing is freed twice": (
        at(500, model("a"), busy("b", request(1)), replace(model("c"), state=EntryState.UNLOADING)),
        SOFT,
        None,
        Outcome.UNLOADING,
    ),
    "2 prefix caches are trimmed just as far as needed": (
        at(410, model("a", prefix_bytes=20 * MIB), model("b", prefix_bytes=5 * MIB)),
        SOFT,
        TrimPrefixCaches(15 * MIB),
        Outcome.ACT,
    ),
    "2 they are emptied before a request is parked": (
        at(420, busy("a", request(1), request(2)), model("b", pinned=True, prefix_bytes=5 * MIB)),
        SOFT,
        TrimPrefixCaches(0),
        Outcome.ACT,
    ),
    "2 they are emptied when that spares a model": (
        at(510, model("a", prefix_bytes=5 * MIB), model("b", used_s=2, prefix_bytes=5 * MIB), model("c", used_s=3)),
        SOFT,
        TrimPrefixCaches(0),
        Outcome.ACT,
    ),
    "2 they are left alone when a model has to go all the same": (
        at(490, model("a"), model("b", used_s=2, prefix_bytes=5 * MIB)),
        SOFT,
        Unload("a"),
        Outcome.ACT,
    ),
    "2 they stand in no block's way": (
        wanting(at(390, busy("a", request(1), request(2)), model("b", pinned=True, prefix_bytes=50 * MIB))),
        SOFT,
        Park("a", "r2"),
        Outcome.ACT,
    ),
    "3 the least recently used idle model goes": (
        at(450, model("a", used_s=30), model("b", used_s=10), model("c", used_s=20)),
        SOFT,
        Unload("b"),
        Outcome.ACT,
    ),
    "3 a model that is not needed is spared": (
        at(490, model("small", 10, used_s=1), model("big", 100, used_s=2), model("c", used_s=3)),
        SOFT,
        Unload("big"),
        Outcome.ACT,
    ),
    "3 when all idle models do not suffice, they go all the same, least recently used first": (
        at(900, model("a", used_s=2), model("b", used_s=1), busy("c", request(1))),
        SOFT,
        Unload("b"),
        Outcome.ACT,
    ),
    "3 a pinned, a running, a waiting and a leased model are passed over": (
        at(
            450,
            model("pinned", pinned=True),
            busy("running", request(1)),
            busy("waiting", waiting=1),
            model("leased", leases=1),
            model("idle", used_s=999),
        ),
        SOFT,
        Unload("idle"),
        Outcome.ACT,
    ),
    "3 a tie goes by name": (at(450, model("b"), model("a")), SOFT, Unload("a"), Outcome.ACT),
    "3 of two idle models that would both be needed one stays": (
        at(550, model("a"), model("b", used_s=1)),
        SOFT,
        Unload("a"),
        Outcome.ACT,
    ),
    "3 the last model stays": (at(450, model("a")), SOFT, None, Outcome.UNACCOUNTED),
    "4 the newest load is stopped when no model is idle, and is tried again": (
        at(450, busy("a", request(1)), loading("b", 1), loading("c", 2)),
        SOFT,
        CancelLoad("c", retried=True),
        Outcome.ACT,
    ),
    "4 a pinned model's load is stopped like any other": (
        at(450, busy("a", request(1)), loading("b", 1, pinned=True)),
        SOFT,
        CancelLoad("b", retried=True),
        Outcome.ACT,
    ),
    "4 an idle model goes before a load": (
        at(450, busy("a", request(1)), model("b"), loading("c")),
        SOFT,
        Unload("b"),
        Outcome.ACT,
    ),
    "4b a model whose requests stand in the engine's line goes before anybody is parked": (
        at(450, busy("a", request(1), request(2)), busy("b", standing(3), waiting=1)),
        SOFT,
        Unload("b"),
        Outcome.ACT,
    ),
    "5 what stands in the engine's line does not take the place of the oldest that runs": (
        wanting(at(405, busy("a", standing(1), request(2)))),
        SOFT,
        None,
        Outcome.UNACCOUNTED,
    ),
    "4b a model whose requests all wait goes before a running request": (
        at(450, busy("a", request(1), request(2)), busy("b", waiting=2)),
        SOFT,
        Unload("b"),
        Outcome.ACT,
    ),
    "4b a pinned one stays": (
        at(405, busy("a", request(1), request(2)), busy("b", waiting=2, pinned=True)),
        SOFT,
        Park("a", "r2"),
        Outcome.ACT,
    ),
    "4b one that somebody else holds stays": (
        at(405, busy("a", request(1), request(2)), replace(busy("b", waiting=1), leases=2)),
        SOFT,
        Park("a", "r2"),
        Outcome.ACT,
    ),
    "4b one stays loaded when all only wait": (
        at(450, busy("a", waiting=1), busy("b", waiting=1)),
        SOFT,
        Unload("a"),
        Outcome.ACT,
    ),
    "5 the newest request over all models is parked": (
        at(405, busy("a", request(1), request(4)), busy("b", request(2), request(3))),
        SOFT,
        Park("a", "r4"),
        Outcome.ACT,
    ),
    "5 one that is not needed is spared": (
        at(430, busy("a", request(1, 50), request(2, 40), request(3, 5))),
        SOFT,
        Park("a", "r2"),
        Outcome.ACT,
    ),
    "5 one that would free nothing is passed over": (
        at(405, busy("a", request(1), request(2), request(3, 0))),
        SOFT,
        Park("a", "r2"),
        Outcome.ACT,
    ),
    "5 one that was parked often is passed over": (
        at(405, busy("a", request(1), request(2), request(3, parks=3))),
        SOFT,
        Park("a", "r2"),
        Outcome.ACT,
    ),
    "5 of those that were parked often the least often parked goes": (
        at(405, busy("a", request(1), request(2, parks=3), request(3, parks=4))),
        SOFT,
        Park("a", "r2"),
        Outcome.ACT,
    ),
    "5 one that was parked often goes before the oldest": (
        at(405, busy("a", request(1), request(2, parks=9))),
        SOFT,
        Park("a", "r2"),
        Outcome.ACT,
    ),
    "5 a pinned model's requests are parked like any others": (
        at(405, busy("a", request(1), pinned=True), busy("b", request(2), pinned=True)),
        SOFT,
        Park("b", "r2"),
        Outcome.ACT,
    ),
    "5 all others go even if they do not suffice": (
        at(490, busy("a", request(1), request(2), request(3))),
        SOFT,
        Park("a", "r3"),
        Outcome.ACT,
    ),
    "5 the oldest goes when even it alone does not fit": (
        at(405, busy("a", request(1))),
        SOFT,
        Park("a", "r1"),
        Outcome.ACT,
    ),
    "5 but not while that is tolerated": (
        at(405, busy("a", request(1))),
        replace(SOFT, tolerated_bytes=405 * MIB),
        None,
        Outcome.UNACCOUNTED,
    ),
    "5 what is tolerated ends at the hard limit": (
        at(451, busy("a", request(1))),
        replace(TIGHT, tolerated_bytes=460 * MIB),
        Park("a", "r1"),
        Outcome.ACT,
    ),
    "5 a request that would free nothing is never parked": (
        at(405, busy("a", request(1, 0))),
        SOFT,
        None,
        Outcome.UNACCOUNTED,
    ),
    "5 what nothing is known of counts by what its model holds": (
        at(405, replace(busy("a", request(1, 0), request(2, 0)), kv_bytes=20 * MIB)),
        SOFT,
        Park("a", "r2"),
        Outcome.ACT,
    ),
    "5 a block that is wanted counts before it is there": (
        wanting(at(390, busy("a", request(1), request(2)))),
        SOFT,
        Park("a", "r2"),
        Outcome.ACT,
    ),
    "5 the oldest does not give way to its own block": (
        wanting(at(390, busy("a", request(1)))),
        SOFT,
        None,
        Outcome.UNACCOUNTED,
    ),
    "5 nor to a younger one's": (
        wanting(at(390, busy("a", request(2, 0)), busy("b", request(1)))),
        SOFT,
        None,
        Outcome.UNACCOUNTED,
    ),
    "5b the last model goes when its weights alone are over the limit": (
        at(500, model("a", 401, waiting=1, leases=1)),
        SOFT,
        Unload("a"),
        Outcome.ACT,
    ),
    "5b not while its weights fit": (at(500, model("a", 400)), SOFT, None, Outcome.UNACCOUNTED),
    "5b not a pinned one": (at(500, model("a", 401, pinned=True)), SOFT, None, Outcome.ALL_PINNED),
    "5b not while something of it runs": (at(500, busy("a", request(1, 0), mib=401)), SOFT, None, Outcome.UNACCOUNTED),
    "6 between soft and hard nothing is aborted": (
        at(440, busy("a", request(1, 0), request(2, 0))),
        TIGHT,
        None,
        Outcome.UNACCOUNTED,
    ),
    "6 above hard, with nothing left, the requests that hold most are aborted": (
        at(460, model("a", running=1, leases=1, kv_bytes=5), model("b", running=1, leases=1, kv_bytes=9)),
        TIGHT,
        AbortRequests("b"),
        Outcome.ACT,
    ),
    "6 above hard a request is parked before any is aborted": (
        at(460, busy("a", request(1), request(2), pinned=True)),
        TIGHT,
        Park("a", "r2"),
        Outcome.ACT,
    ),
    "6 nothing is aborted for a block that is not there yet": (
        replace(at(390, busy("a", request(1))), wanted=replace(WANTED, short_bytes=60 * MIB)),
        TIGHT,
        None,
        Outcome.UNACCOUNTED,
    ),
    "7 all pinned": (
        at(500, model("a", pinned=True), model("b", pinned=True)),
        SOFT,
        None,
        Outcome.ALL_PINNED,
    ),
    "7 nothing is loaded": (at(500), SOFT, None, Outcome.UNACCOUNTED),
    "a short system takes a cache that suffices first": (
        short_system(model("a"), model("b"), cache_mib=100),
        MIN_AVAILABLE,
        DropCache(),
        Outcome.ACT,
    ),
    "a short system takes prefix caches": (
        short_system(busy("a", request(1)), model("b", pinned=True, prefix_bytes=130 * MIB)),
        MIN_AVAILABLE,
        TrimPrefixCaches(30 * MIB),
        Outcome.ACT,
    ),
    "a short system takes the idle model that suffices": (
        short_system(model("a", 10), model("b", used_s=1), busy("c", request(1))),
        MIN_AVAILABLE,
        Unload("b"),
        Outcome.ACT,
    ),
    "a short system takes a load": (
        short_system(busy("a", request(1)), loading("b")),
        MIN_AVAILABLE,
        CancelLoad("b", retried=True),
        Outcome.ACT,
    ),
    "a short system parks nothing and unloads nothing that is waited for": (
        short_system(busy("a", request(1), request(2)), busy("b", waiting=1)),
        MIN_AVAILABLE,
        None,
        Outcome.SYSTEM_SHORT,
    ),
}


@pytest.mark.parametrize("rung", RUNGS)
def test_the_graceful_policy_follows(rung: str) -> None:
    snapshot, limits, action, outcome = RUNGS[rung]
    decision = decide(snapshot, limits)
    assert (decision.action, decision.outcome) == (action, outcome)
    assert decision.reason


def test_an_unload_says_what_was_seen_who_was_considered_and_why() -> None:
    snapshot = at(
        590,
        model("tiny", 10, used_s=900),
        model("code", used_s=940),
        model("docs", used_s=950),
        model("last", used_s=980),
        model("big", pinned=True),
        busy("chat", request(1)),
    )
    decision = decide(snapshot, SOFT)
    assert decision.reason == (
        "used memory 590 MiB is 190 MiB over the soft limit 400 MiB (max_memory);"
        " `code` is idle (unused for 60.0 s), and unloading it spares `tiny`"
    )
    assert [(each.model, each.chosen, each.why) for each in decision.candidates] == [
        ("big", False, "pinned"),
        ("tiny", False, "older, but not needed: `code`, `docs` are enough together"),
        ("code", True, "idle, and enough together with `docs`"),
        ("docs", False, "next, should this not suffice"),
        ("last", False, "used more recently"),
        ("chat", False, "busy"),
    ]


def test_a_parking_names_the_requests_that_were_considered_and_why() -> None:
    snapshot = at(
        430,
        busy("chat", request(1, 50), request(4, 0), request(6, 25)),
        busy("code", request(2, 20), request(3, 10, parks=3), request(5, 20)),
    )
    decision = decide(snapshot, SOFT)
    assert decision.reason == (
        "used memory 430 MiB is 30.0 MiB over the soft limit 400 MiB (max_memory);"
        " request r6 to `chat` is parked and goes on when it fits (it is the newest, and frees 25.0 MiB)"
    )
    assert [(each.model, each.request, each.chosen, each.why) for each in decision.candidates] == [
        ("chat", "r6", True, "the newest, and frees 25.0 MiB"),
        ("code", "r5", False, "next, should this not suffice"),
        ("code", "r2", False, "older"),
        ("code", "r3", False, "was parked 3 times"),
        ("chat", "r4", False, "parking it frees nothing"),
        ("chat", "r1", False, "the oldest goes last"),
    ]
    assert [each.frees_bytes for each in decision.candidates[:3]] == [25 * MIB, 20 * MIB, 20 * MIB]


def test_a_request_that_is_spared_is_said_to_be_newer_and_who_is_enough() -> None:
    others = request(1, 50), request(2, 25), request(3, 25), request(4, 10)
    one = decide(at(420, busy("a", *others)), SOFT)
    assert [(each.request, each.why) for each in one.candidates] == [
        ("r3", "the newest that frees enough, and frees 25.0 MiB"),
        ("r4", "newer, but not needed: r3 is enough"),
        ("r2", "older"),
        ("r1", "the oldest goes last"),
    ]
    two = decide(at(445, busy("a", *others)), SOFT)
    assert [(each.request, each.why) for each in two.candidates] == [
        ("r3", "the newest of those that free enough together, and frees 25.0 MiB"),
        ("r4", "newer, but not needed: 2 others are enough together"),
        ("r2", "next, should this not suffice"),
        ("r1", "the oldest goes last"),
    ]


def test_an_action_that_changed_nothing_is_followed_by_the_next_best() -> None:
    snapshot = at(405, busy("a", request(1), request(2), request(3)), model("b", pinned=True, prefix_bytes=1))
    futile: frozenset[Action] = frozenset()
    actions = []
    while (action := decide(snapshot, SOFT, futile).action) is not None:
        actions.append(action)
        futile |= {action}
    assert actions == [TrimPrefixCaches(0), Park("a", "r3"), Park("a", "r2"), Park("a", "r1")]


class Memory:
    """What a pool would hold after each action; unaccounted bytes stay. Checks that each action is allowed."""

    def __init__(self, pool: tuple[EntrySnapshot, ...], leak_bytes: int, cache_bytes: int) -> None:
        self.pool = {entry.name: entry for entry in pool}
        self.leak_bytes, self.cache_bytes = leak_bytes, cache_bytes

    @property
    def loaded(self) -> list[EntrySnapshot]:
        return [entry for entry in self.pool.values() if entry.state is EntryState.LOADED]

    def snapshot(self, *, at_rest: bool = True) -> Snapshot:
        entries = self.pool.values()
        active = self.leak_bytes + sum(entry.committed_bytes + entry.prefix_bytes for entry in entries)
        reading = MemoryReading(active_bytes=active, cache_bytes=self.cache_bytes, at_rest=at_rest)
        return Snapshot(10.0, reading, tuple(entries))

    def is_oldest(self, action: Action) -> bool:
        """Whether it parks the oldest request, which is not a matter of sparing others."""
        running = [(each.order, each.request) for entry in self.loaded for each in entry.requests]
        return isinstance(action, Park) and action.request == min(running)[1]

    def do(self, action: Action, limits: Limits) -> None:
        short_bytes = self.snapshot().reading.active_bytes - limits.soft_bytes
        idle = [each for each in self.loaded if not each.pinned and not each.busy]
        spare = len(self.loaded) > 1
        loads = [each for each in self.pool.values() if each.state is EntryState.LOADING]
        waited_for = [each for each in self.loaded if _only_waited_for(each)]
        running = [(each.order, name.name, each) for name in self.loaded for each in name.requests]
        useful = [each for each in running if each[2].frees_bytes]
        match action:
            case DropCache():
                assert self.cache_bytes
                self.cache_bytes = 0
            case TrimPrefixCaches(keep_bytes=keep):
                kept_bytes = sum(entry.prefix_bytes for entry in self.loaded)
                assert kept_bytes - keep == min(kept_bytes, short_bytes) > 0
                for entry in self.loaded:
                    self._change(entry.name, prefix_bytes=min(entry.prefix_bytes, keep))
                    keep -= min(entry.prefix_bytes, keep)
            case Unload(model=name):
                entry = self.pool[name]
                assert not entry.pinned
                assert not entry.running
                assert spare or entry.weights_bytes > limits.soft_bytes, "the last model stays while its weights fit"
                assert sum(each.prefix_bytes for each in self.loaded) < short_bytes, "trimming would have done"
                if entry.busy:
                    assert not (idle and spare)
                    assert not loads
                if not spare:
                    assert not running
                self._change(name, state=EntryState.UNLOADED, kv_bytes=0, promised_bytes=0, prefix_bytes=0)
            case CancelLoad(model=name):
                assert self.pool[name] in loads
                assert not (idle and spare)
                self._change(name, state=EntryState.UNLOADED, promised_bytes=0)
            case Park(model=name, request=parked):
                assert not any(entry.prefix_bytes for entry in self.loaded)
                assert not (idle and spare)
                assert not loads
                assert not (waited_for and spare)
                self._park(name, parked, useful)
            case AbortRequests():
                raise AssertionError("nothing is aborted while anything can be parked, and then nothing is left to")

    def _park(self, name: str, parked: str, useful: list[tuple[int, str, RequestSnapshot]]) -> None:
        entry = self.pool[name]
        gone = next(each for each in entry.requests if each.request == parked)
        assert gone.frees_bytes
        oldest = min(order for entry in self.loaded for order in (each.order for each in entry.requests))
        if gone.order == oldest:
            assert [each[0] for each in useful] == [oldest], "the oldest last, and only when it alone does not fit"
        rest = tuple(each for each in entry.requests if each is not gone)
        self._change(
            name,
            requests=rest,
            running=len(rest),
            waiting=entry.waiting + 1,
            kv_bytes=entry.kv_bytes - gone.frees_bytes,
            promised_bytes=max(0, entry.promised_bytes - gone.frees_bytes),
        )

    def _change(self, name: str, **fields: object) -> None:
        self.pool[name] = replace(self.pool[name], **fields)  # type: ignore[arg-type]


def _only_the_oldest_is_called_so(decision: Decision, loaded: list[EntrySnapshot]) -> bool:
    idle_s = [each.last_used_s for each in loaded if not each.pinned and not each.busy]
    said = [each for each in decision.candidates if each.chosen and "least recently used" in each.why]
    return all(each.last_used_s <= min(idle_s) for each in said)


def _only_waited_for(entry: EntrySnapshot) -> bool:
    return not entry.pinned and not entry.running and 0 < entry.waiting == entry.leases


@st.composite
def pools(draw: st.DrawFn) -> tuple[EntrySnapshot, ...]:
    """Models in any state; only loaded ones have requests in the engine, and each request has its own place."""
    orders = iter(draw(st.permutations(range(24))))
    entries = []
    for number in range(draw(st.integers(0, 6))):
        state = draw(st.sampled_from([EntryState.LOADED] * 5 + [EntryState.LOADING, EntryState.UNLOADED]))
        loaded = state is EntryState.LOADED
        requests = tuple(
            sorted(
                (
                    RequestSnapshot(f"r{order}", order, draw(st.integers(0, 150)), draw(st.integers(0, 5)))
                    for order, _ in zip(orders, range(draw(st.integers(0, 4)) if loaded else 0), strict=False)
                ),
                key=lambda each: each.order,
            )
        )
        waiting = draw(st.integers(0, 2))
        kv_bytes = sum(each.frees_bytes for each in requests)
        weights_bytes = draw(st.integers(0, 1000))
        entries.append(
            EntrySnapshot(
                name=f"m{number}",
                state=state,
                pinned=draw(st.booleans()),
                weights_bytes=weights_bytes,
                kv_bytes=kv_bytes,
                running=len(requests),
                waiting=waiting,
                leases=len(requests) + waiting + draw(st.integers(0, 1)),
                last_used_s=float(draw(st.integers(0, 5))),
                loading_order=number + 1 if state is EntryState.LOADING else None,
                promised_bytes=weights_bytes + kv_bytes + draw(st.integers(0, 50)) if loaded else 0,
                prefix_bytes=draw(st.sampled_from([0, 0, 40, 200])) if loaded else 0,
                requests=requests,
            )
        )
    return tuple(entries)


limits_of_any_kind = st.builds(
    lambda soft, above: Limits(soft_bytes=soft, hard_bytes=soft + above, policy=Policy.GRACEFUL),
    st.integers(0, 4000),
    st.integers(0, 4000),
)


@given(pools(), limits_of_any_kind, st.integers(0, 3000), st.integers(0, 5000))
def test_acting_and_looking_again_always_ends_and_takes_nothing_while_anything_cheaper_is_left(
    pool: tuple[EntrySnapshot, ...], limits: Limits, leak_bytes: int, cache_bytes: int
) -> None:
    memory = Memory(pool, leak_bytes, cache_bytes)
    steps = 2 + 3 * len(pool) + sum(len(entry.requests) for entry in pool)
    decision = decide(memory.snapshot(), limits)
    for _ in range(steps):
        assert _only_the_oldest_is_called_so(decision, memory.loaded)
        if not isinstance(decision.action, AbortRequests):
            if decision.action is None:
                break
            memory.do(decision.action, limits)
        else:  # what nobody can park still runs, above the hard limit
            assert all(not request.frees_bytes for entry in memory.loaded for request in entry.requests)
            assert memory.snapshot().reading.active_bytes > limits.hard_bytes
            memory._change(decision.action.model, requests=(), running=0)
        decision = decide(memory.snapshot(), limits)
    else:
        raise AssertionError("the ladder does not end")
    if limits.soft_bytes and memory.snapshot().reading.active_bytes > limits.soft_bytes:
        assert decision.exhausted
        assert not any(request.frees_bytes for entry in memory.loaded for request in entry.requests)
        assert not any(entry.state is EntryState.LOADING for entry in memory.pool.values())
        leavable = [each for each in memory.loaded if _only_waited_for(each)]
        assert not leavable or len(memory.loaded) == 1


@given(pools(), limits_of_any_kind, st.integers(0, 3000))
def test_nothing_is_taken_that_the_rest_of_its_rung_makes_needless(
    pool: tuple[EntrySnapshot, ...], limits: Limits, leak_bytes: int
) -> None:
    """What one decision begins is still wanted after the others of its rung: each gives a part nobody else could."""
    memory = Memory(pool, leak_bytes, 0)
    before = decide(memory.snapshot(), limits)
    if not isinstance(before.action, Unload | Park):
        return
    freed, short_bytes = 0, memory.snapshot().reading.active_bytes - limits.soft_bytes
    rung, first_freed = before.rung, None
    while before.rung == rung and before.action is not None and not memory.is_oldest(before.action):
        held = memory.snapshot().reading.active_bytes
        memory.do(before.action, limits)
        freed += held - memory.snapshot().reading.active_bytes
        first_freed = freed if first_freed is None else first_freed
        before = decide(memory.snapshot(), limits)
    if freed >= short_bytes:
        assert freed - (first_freed or 0) < short_bytes


@given(pools(), limits_of_any_kind, st.integers(0, 5000), st.booleans(), st.randoms(use_true_random=False))
def test_the_same_pool_in_any_order_gives_the_same_decision(
    pool: tuple[EntrySnapshot, ...], limits: Limits, active: int, at_rest: bool, random: object
) -> None:
    reading = MemoryReading(active_bytes=active, at_rest=at_rest)
    shuffled = list(pool)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert _essence(decide(Snapshot(10.0, reading, pool), limits)) == _essence(
        decide(Snapshot(10.0, reading, tuple(shuffled)), limits)
    )


def _essence(decision: Decision) -> tuple[object, ...]:
    return (decision.rung, decision.action, decision.candidates, decision.outcome)


@given(pools(), limits_of_any_kind, st.integers(0, 3000), st.integers(0, 500))
def test_a_reading_inside_a_step_takes_nothing_but_the_cache(
    pool: tuple[EntrySnapshot, ...], limits: Limits, leak_bytes: int, cache_bytes: int
) -> None:
    snapshot = Memory(pool, leak_bytes, cache_bytes).snapshot(at_rest=False)
    assert decide(snapshot, limits).action in (None, DropCache())
