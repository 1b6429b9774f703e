"""Whose turn it is: the table of cases, and that every load gets its turn within the bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omlxd.core.room import Room, RoomKind
from omlxd.core.turnover import Holder, TurnKind, WaitingLoad, decide_turn

FAIR_S = 10.0
BUSY = Holder("a", held_bytes=600, busy=True, idle_since_s=90.0, turn_began_s=50.0, reload_s=1.0)
IDLE = replace(BUSY, busy=False)
LOAD = WaitingLoad("b", since_s=100.0, asked_s=100.0)


def evict(*victims: str) -> Room:
    return Room(RoomKind.EVICT, "it is idle", 600, 600, 1000, victims=victims, short_bytes=200)


def wait(short_bytes: int = 200) -> Room:
    return Room(RoomKind.WAIT, "it is in use", 600, 600, 1000, blockers=("a",), short_bytes=short_bytes)


@pytest.mark.parametrize(
    ("case", "now_s", "load", "holder", "kind", "until_s"),
    [
        ("idle before the load was asked for: it goes", 100.0, LOAD, IDLE, TurnKind.EVICT, None),
        (
            "just idle: kept for as long as its reload takes",
            104.0,
            LOAD,
            replace(IDLE, idle_since_s=103.5),
            TurnKind.WAIT,
            104.5,
        ),
        ("nobody came back in that time", 104.5, LOAD, replace(IDLE, idle_since_s=103.5), TurnKind.EVICT, None),
        (
            "a long reload is kept for two seconds at most",
            104.0,
            LOAD,
            replace(IDLE, idle_since_s=103.5, reload_s=60.0),
            TurnKind.WAIT,
            105.5,
        ),
        (
            "nor beyond the bound",
            109.8,
            LOAD,
            replace(IDLE, idle_since_s=109.5, reload_s=60.0),
            TurnKind.WAIT,
            110.0,
        ),
        (
            "a user's load waits for no linger",
            104.0,
            replace(LOAD, by_user=True),
            replace(IDLE, idle_since_s=104.0),
            TurnKind.EVICT,
            None,
        ),
        (
            "one that gave way goes when its last request ends",
            112.0,
            LOAD,
            replace(IDLE, idle_since_s=112.0, closed_s=100.0),
            TurnKind.EVICT,
            None,
        ),
        (
            "what a user has just loaded is kept for a turn",
            100.0,
            LOAD,
            replace(IDLE, idle_since_s=99.0, turn_began_s=99.0, kept=True),
            TurnKind.WAIT,
            108.0,
        ),
        (
            "but who has waited too long already waits for a moment only",
            100.0,
            replace(LOAD, since_s=60.0),
            replace(IDLE, idle_since_s=99.5, turn_began_s=99.5, kept=True),
            TurnKind.WAIT,
            100.5,
        ),
        ("in use: its turn lasts eight reloads", 107.9, LOAD, BUSY, TurnKind.WAIT, 108.0),
        ("then it takes nothing new", 108.0, LOAD, BUSY, TurnKind.CLOSE, None),
        ("no turn is longer than the bound", 109.0, LOAD, replace(BUSY, reload_s=30.0), TurnKind.WAIT, 110.0),
        ("a quick one has its fair share", 100.3, LOAD, replace(BUSY, reload_s=0.001), TurnKind.WAIT, 100 + 10 / 3),
        ("one that has begun lasts as long", 105.0, LOAD, replace(BUSY, turn_began_s=101.0), TurnKind.WAIT, 109.0),
        ("but not beyond the bound", 109.0, LOAD, replace(BUSY, turn_began_s=104.0), TurnKind.WAIT, 110.0),
        ("save for its fair share of it", 110.0, LOAD, replace(BUSY, turn_began_s=108.0), TurnKind.WAIT, 108 + 10 / 3),
        (
            "which is smaller when more models wait",
            110.0,
            replace(LOAD, rivals=3),
            replace(BUSY, turn_began_s=109.0),
            TurnKind.WAIT,
            111.0,
        ),
        (
            "those who had gathered for it have their first token before it ends",
            112.0,
            LOAD,
            replace(BUSY, turn_began_s=108.0, gathered=True),
            TurnKind.WAIT,
            118.0,
        ),
        ("or the bound passed", 118.0, LOAD, replace(BUSY, turn_began_s=108.0, gathered=True), TurnKind.CLOSE, None),
        ("its door is closed once", 120.0, LOAD, replace(BUSY, closed_s=100.0), TurnKind.WAIT, None),
        ("what it runs may end", 119.9, LOAD, replace(BUSY, closed_s=110.0, parkable=True), TurnKind.WAIT, 120.0),
        ("or is parked then", 120.0, LOAD, replace(BUSY, closed_s=110.0, parkable=True), TurnKind.EVICT, None),
        (
            "but not in its prefill",
            120.0,
            LOAD,
            replace(BUSY, closed_s=110.0, parkable=True, prefills_since_s=112.0),
            TurnKind.WAIT,
            122.0,
        ),
        (
            "unless that takes longer than the bound itself",
            122.0,
            LOAD,
            replace(BUSY, closed_s=110.0, parkable=True, prefills_since_s=112.0),
            TurnKind.EVICT,
            None,
        ),
        ("nobody gives way when nobody waits", 500.0, replace(LOAD, wanted=False), BUSY, TurnKind.WAIT, None),
    ],
)  # fmt: skip
def test_one_model_in_the_way(
    case: str, now_s: float, load: WaitingLoad, holder: Holder, kind: TurnKind, until_s: float | None
) -> None:
    room = wait() if holder.busy else evict("a")
    turn = decide_turn(now_s, load, room, [holder], FAIR_S)
    assert (turn.kind, turn.until_s) == (kind, pytest.approx(until_s)), case
    assert turn.models == (("a",) if kind in (TurnKind.CLOSE, TurnKind.EVICT) else ())


def test_idle_models_and_the_longest_turns_go_first_and_nobody_more_than_needed() -> None:
    old = replace(BUSY, name="old", turn_began_s=10.0, held_bytes=300)
    new = replace(BUSY, name="new", turn_began_s=80.0, held_bytes=300)
    idle = replace(IDLE, name="idle", held_bytes=100)
    assert decide_turn(200.0, LOAD, wait(350), [new, old, idle], FAIR_S).models == ("old",)
    assert decide_turn(200.0, LOAD, wait(500), [new, old, idle], FAIR_S).models == ("old", "new")
    big = replace(BUSY, name="big", turn_began_s=90.0, held_bytes=900)
    assert decide_turn(200.0, LOAD, wait(750), [big, old, new, idle], FAIR_S).models == ("big",)


def test_no_door_is_closed_when_that_would_not_make_room() -> None:
    turn = decide_turn(200.0, LOAD, wait(short_bytes=601), [BUSY], FAIR_S)
    assert (turn.kind, turn.models) == (TurnKind.WAIT, ())


def test_a_model_that_gives_way_already_is_not_spared_for_another() -> None:
    leaving = replace(BUSY, name="leaving", turn_began_s=95.0, closed_s=100.0)
    assert decide_turn(200.0, LOAD, wait(500), [BUSY, leaving], FAIR_S).kind is TurnKind.WAIT


holders = st.builds(
    Holder,
    name=st.sampled_from("acdefgh"),
    held_bytes=st.integers(1, 500),
    busy=st.booleans(),
    idle_since_s=st.floats(50, 100),
    turn_began_s=st.floats(0, 50),
    reload_s=st.floats(0, 100),
    kept=st.booleans(),
    closed_s=st.none() | st.floats(90, 100),
    parkable=st.booleans(),
    gathered=st.booleans(),
    prefills_since_s=st.none() | st.floats(50, 100),
)


@settings(max_examples=200)
@given(
    st.lists(holders, min_size=1, max_size=7, unique_by=lambda each: each.name),
    st.integers(1, 3500),
    st.floats(90, 100),
    st.floats(0, 30),
)
def test_whatever_stands_in_the_way_is_told_to_go_within_the_bound(
    pool: list[Holder], short_bytes: int, since_s: float, fair_wait_s: float
) -> None:
    """Follow one load while nothing changes by itself: each look names a later time, or ends the wait."""
    load, now_s, looks = WaitingLoad("b", since_s, since_s), 100.0, 0
    free = [each for each in pool if not each.busy]
    if sum(each.held_bytes for each in free) >= short_bytes:
        room = evict(*(each.name for each in free))
        bound_s = max(now_s, since_s + fair_wait_s, *(each.turn_began_s + 2.0 for each in free))
    elif sum(each.held_bytes for each in pool) >= short_bytes:
        room, bound_s = wait(short_bytes), max(now_s, since_s + fair_wait_s, 100.0 + max(fair_wait_s, 2.0))
    else:
        assert decide_turn(now_s, load, wait(short_bytes), pool, fair_wait_s).kind is TurnKind.WAIT
        return
    while (turn := decide_turn(now_s, load, room, pool, fair_wait_s)).kind is TurnKind.WAIT and turn.until_s:
        assert turn.until_s > now_s
        now_s, looks = turn.until_s, looks + 1
    assert now_s <= bound_s
    assert looks <= 1
    assert turn == decide_turn(now_s, load, room, pool[::-1], fair_wait_s)
    named = {each.name: each for each in pool}
    if room.kind is RoomKind.EVICT:
        assert turn.kind is TurnKind.EVICT
    elif turn.kind is TurnKind.CLOSE:
        assert all(named[name].busy and not named[name].closed for name in turn.models)
    elif turn.kind is TurnKind.EVICT:
        assert all(named[name].busy and named[name].closed and named[name].parkable for name in turn.models)
    else:  # enough is on its way already
        leaving = sum(each.held_bytes for each in pool if each.closed or not each.busy)
        assert leaving >= short_bytes
