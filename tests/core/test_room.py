"""Room for a load: who goes, who stays, and what is known to be impossible before anybody goes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omlxd.core.admission import Ask, decide_request
from omlxd.core.ledger import Ledger
from omlxd.core.memory import MemoryReading
from omlxd.core.room import Room, RoomKind, make_room
from omlxd.core.snapshot import EntrySnapshot, Limits, Snapshot
from omlxd.core.states import EntryState
from omlxd.core.units import format_bytes
from omlxd.engine.orders import MIB
from tests.fakes.costs import FakeCosts

LIMITS = Limits(soft_bytes=1000, hard_bytes=2000)


def entry(name: str, size: int, used_s: float = 0.0, **more: object) -> EntrySnapshot:
    values: dict[str, object] = {"state": EntryState.LOADED, **more}
    return EntrySnapshot(name=name, weights_bytes=size, last_used_s=used_s, **values)  # type: ignore[arg-type]


def room(need: int, *entries: EntrySnapshot, active: int | None = None, limits: Limits = LIMITS) -> Room:
    held = sum(each.committed_bytes for each in entries) if active is None else active
    return make_room(Snapshot(100.0, MemoryReading(active_bytes=held), entries), limits, "new", need)


def test_it_fits_up_to_the_last_byte() -> None:
    assert room(400, entry("a", 600)).kind is RoomKind.FITS
    assert room(401, entry("a", 600)).kind is RoomKind.EVICT


def test_the_shortest_prefix_of_the_least_recently_used_goes() -> None:
    answer = room(500, entry("new-ish", 300, 9), entry("old", 300, 1), entry("older", 300, 0))
    assert answer.victims == ("older", "old")
    assert answer.short_bytes == 400


def whys(answer: Room) -> dict[str, str]:
    return {each.model: each.why for each in answer.candidates}


def test_an_older_model_that_is_not_needed_is_spared_and_nobody_is_said_to_be_older() -> None:
    answer = room(500, entry("small", 50, 1), entry("big", 600, 2), entry("last", 300, 3))
    assert answer.victims == ("big",)
    assert answer.why.endswith("; `big` is idle, and enough alone")
    assert whys(answer) == {
        "small": "older, but not needed: `big` is enough",
        "big": "idle, and enough alone",
        "last": "used more recently",
    }


def test_of_several_that_go_each_has_a_true_reason() -> None:
    answer = room(800, entry("old", 400, 1), entry("small", 50, 2), entry("big", 400, 3), entry("twin", 50, 3))
    assert answer.victims == ("old", "big")
    assert answer.why.endswith("; `old`, `big` are idle, and enough together")
    assert whys(answer) == {
        "old": "idle and least recently used",
        "small": "older, but not needed: `old`, `big` are enough together",
        "big": "idle, and enough together with `old`",
        "twin": "not needed: `old`, `big` are enough together",
    }


def test_idle_models_that_would_not_do_are_not_said_to_be_spared() -> None:
    answer = room(900, entry("idle", 100, 1), entry("busy", 500, 2, running=1))
    assert answer.kind is RoomKind.WAIT
    assert whys(answer) == {"idle": "idle, but not enough", "busy": "busy"}


def test_busy_leased_and_pinned_models_stay() -> None:
    answer = room(
        600,
        entry("busy", 200, 1, running=1),
        entry("waiting", 200, 2, waiting=1),
        entry("leased", 200, 3, leases=1),
        entry("pinned", 200, 4, pinned=True),
    )
    assert answer.kind is RoomKind.WAIT
    assert answer.blockers == ("busy", "waiting", "leased")
    assert answer.short_bytes == 400


def test_more_is_missing_than_is_needed_only_because_the_limit_was_passed_before() -> None:
    needs = entry("a", 300), entry("busy", 600, running=1)
    assert "`new` needs 400 B and 300 B are missing" in room(400, *needs).why
    passed = room(400, *needs, active=1200).why
    assert "`new` needs 400 B; 600 B must be freed for it, since 200 B are already over the limit" in passed


def test_a_prompt_that_comes_when_the_limit_is_passed_is_told_so() -> None:
    snapshot = Snapshot(100.0, MemoryReading(active_bytes=1200 * MIB), (entry("a", 900 * MIB),))
    ask = Ask("a", 100, 256, FakeCosts())
    answer = decide_request(snapshot, Limits(1000 * MIB, 4000 * MIB), Ledger(), ask)
    need, short = format_bytes(answer.need_bytes), format_bytes(answer.need_bytes + 200 * MIB)
    assert f"needs {need}; {short} must be freed for it, since 200 MiB are already over the soft limit" in answer.why


def test_nobody_is_evicted_when_all_who_may_go_do_not_suffice() -> None:
    answer = room(800, entry("idle", 100, 1), entry("busy", 600, 2, running=1))
    assert (answer.kind, answer.victims, answer.blockers) == (RoomKind.WAIT, (), ("busy",))


def test_larger_than_the_soft_limit_never_fits() -> None:
    answer = room(1001)
    assert (answer.kind, answer.binding) == (RoomKind.NEVER, "max_memory")
    assert "`new` needs 1001 B, more than the soft limit 1000 B (max_memory)" in answer.why


def test_the_part_that_binds_is_named() -> None:
    assert room(1001, limits=Limits(soft_bytes=1000, binding="metal")).binding == "metal"


def test_beside_pinned_models_it_may_never_fit() -> None:
    answer = room(700, entry("keep", 400, pinned=True), entry("idle", 100))
    assert (answer.kind, answer.binding) == (RoomKind.NEVER, "pinned")


def test_a_pinned_model_that_is_not_loaded_blocks_nobody() -> None:
    assert room(700, entry("keep", 400, pinned=True, state=EntryState.UNLOADED)).kind is RoomKind.FITS


def test_loading_and_unloading_models_count_in_full() -> None:
    loading = entry("coming", 500, state=EntryState.LOADING, leases=1)
    unloading = entry("going", 400, state=EntryState.UNLOADING)
    answer = room(200, loading, unloading, active=0)
    assert (answer.kind, answer.used_bytes, answer.blockers) == (RoomKind.WAIT, 900, ("coming", "going"))


def test_what_the_gauge_shows_beyond_the_promises_counts_too() -> None:
    answer = room(200, active=900)
    assert (answer.kind, answer.blockers, answer.short_bytes) == (RoomKind.WAIT, (), 100)


def test_without_a_soft_limit_only_the_hard_one_refuses() -> None:
    unlimited = Limits(soft_bytes=0, hard_bytes=2000)
    assert room(1900, entry("a", 1900), limits=unlimited).kind is RoomKind.FITS
    assert room(2001, limits=unlimited).kind is RoomKind.NEVER
    assert room(10**15, limits=Limits()).kind is RoomKind.FITS


entries = st.builds(
    EntrySnapshot,
    name=st.sampled_from([f"m{n}" for n in range(8)]),
    state=st.sampled_from(list(EntryState)),
    pinned=st.booleans(),
    weights_bytes=st.integers(0, 600),
    running=st.integers(0, 1),
    waiting=st.integers(0, 1),
    leases=st.integers(0, 1),
    last_used_s=st.integers(0, 5).map(float),
)


@given(st.lists(entries, max_size=8, unique_by=lambda each: each.name), st.integers(0, 1200), st.integers(0, 2000))
def test_victims_are_idle_and_unpinned_suffice_and_none_of_them_is_needless(
    pool: list[EntrySnapshot], need: int, active: int
) -> None:
    answer = room(need, *pool, active=active)
    by_name = {each.name: each for each in pool}
    victims = [by_name[name] for name in answer.victims]
    assert bool(victims) == (answer.kind is RoomKind.EVICT)
    assert all(each.state is EntryState.LOADED and not each.pinned and not each.busy for each in victims)
    freed = sum(each.committed_bytes for each in victims)
    if answer.kind is RoomKind.EVICT:
        assert answer.used_bytes - freed + need <= LIMITS.soft_bytes
        assert all(freed - each.committed_bytes < answer.short_bytes for each in victims)
    if answer.kind is RoomKind.FITS:
        assert answer.used_bytes + need <= LIMITS.soft_bytes
    left = [each for each in answer.candidates if not each.chosen and not by_name[each.model].pinned]
    oldest_left_s = min((each.last_used_s for each in left if not by_name[each.model].busy), default=float("inf"))
    newest_s = max((each.last_used_s for each in victims), default=0.0)
    for each in answer.candidates:
        if each.chosen:
            assert ("least recently used" in each.why) == (each.last_used_s <= oldest_left_s)
    assert ("least recently used" in answer.why) == (bool(victims) and newest_s <= oldest_left_s)
