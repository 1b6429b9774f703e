"""Turns: who is next, how long it may take, and that nobody is starved whatever comes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from omlxd.core.step_time import UNKNOWN, StepTime
from omlxd.core.turns import (
    HOLD_S,
    LEAST_TOKENS,
    LONE_STEP_S,
    MOST_SLICE_BYTES,
    PATIENCE_S,
    QUIET_S,
    STEP_S,
    WORTH_MORE,
    Hold,
    Waiting,
    chunk_tokens,
    group_tokens,
    next_turn,
    slice_bytes,
)

MIB = 2**20


def prompt(left_s: float, still_s: float = 0.0) -> Waiting:
    return Waiting(left_s, still_s)


def load(left_s: float, still_s: float = 0.0) -> Waiting:
    return Waiting(left_s, still_s, is_load=True)


@pytest.mark.parametrize(
    ("waiting", "index", "budget_s"),
    [
        pytest.param([prompt(3)], 0, LONE_STEP_S, id="alone"),
        pytest.param([prompt(30), prompt(0.1)], 1, LONE_STEP_S, id="the short prompt passes the long one"),
        pytest.param([prompt(2), prompt(2)], 0, LONE_STEP_S, id="of equal ones the older"),
        pytest.param([load(1)], 0, LONE_STEP_S, id="the load alone"),
        pytest.param([prompt(0.5), load(0.1)], 0, LONE_STEP_S, id="a prompt before a load"),
        pytest.param([prompt(2.5), load(1)], 0, LONE_STEP_S, id="also one that needs somewhat longer"),
        pytest.param([prompt(60), load(1)], 1, STEP_S, id="but not one that needs a minute"),
        pytest.param([prompt(30, PATIENCE_S), prompt(0.1)], 0, STEP_S, id="the oldest has stood still too long"),
        pytest.param([prompt(0.2), prompt(30, 99), prompt(0.1)], 2, LONE_STEP_S, id="not the oldest: it waits"),
        pytest.param([prompt(0.1), load(9, PATIENCE_S)], 1, STEP_S, id="the load has stood still too long"),
        pytest.param([prompt(0.1, 2), load(9, 1)], 0, LONE_STEP_S, id="both have, the prompt longer"),
        pytest.param([prompt(9, 1), prompt(0.1), load(9, 2)], 2, STEP_S, id="both have, the load longer"),
    ],
)
def test_whose_turn_it_is(waiting: list[Waiting], index: int, budget_s: float) -> None:
    turn = next_turn(waiting, QUIET_S)
    assert turn is not None
    assert (turn.index, turn.budget_s) == (index, budget_s)


def test_nobody_waits() -> None:
    assert next_turn([], 0.0) is None


@pytest.mark.parametrize("quiet_s", [0.0, 0.9 * QUIET_S])
def test_while_answers_are_decoded_and_shortly_after_every_turn_is_short(quiet_s: float) -> None:
    for waiting in ([prompt(30)], [load(1)], [prompt(3), prompt(5)]):
        turn = next_turn(waiting, quiet_s)
        assert turn is not None
        assert turn.budget_s == STEP_S


def each(token_s: float) -> StepTime:
    return StepTime(0.0, token_s)


@pytest.mark.parametrize(
    ("granted", "time", "budget_s", "tokens"),
    [
        (256, each(0.001), 0.1, 64),
        (256, each(0.0001), 0.1, 256),
        (100, each(0.0001), 0.1, 100),
        (256, each(0.01), 0.1, 16),
        (256, each(10.0), 0.1, 16),
        (8, each(10.0), 0.1, 8),
        (2048, each(0.001), 0.5, 256),
        (256, UNKNOWN, STEP_S, 32),
        (256, UNKNOWN, LONE_STEP_S, 128),
        pytest.param(512, StepTime(0.1, 0.0005), 0.1, 64, id="a third more time for four times the tokens"),
    ],
)
def test_a_chunk_is_the_largest_that_fits_the_time_and_the_memory(
    granted: int, time: StepTime, budget_s: float, tokens: int
) -> None:
    assert chunk_tokens(granted, time, budget_s) == tokens


@given(st.integers(1, 8192), st.floats(0, 1), st.floats(1e-6, 10), st.sampled_from([STEP_S, LONE_STEP_S]))
def test_a_chunk_passes_neither_memory_nor_the_time_by_more_than_is_worth_it(
    granted: int, fixed_s: float, token_s: float, budget_s: float
) -> None:
    time = StepTime(fixed_s, token_s)
    tokens = chunk_tokens(granted, time, budget_s)
    assert 1 <= tokens <= granted
    assert time.of(tokens) <= max(budget_s, WORTH_MORE * time.of(LEAST_TOKENS))


@pytest.mark.parametrize(
    ("total_mib", "bytes_per_s", "budget_s", "expected_mib"),
    [
        (200, 10_000 * MIB, STEP_S, 64),
        (300, 10_000 * MIB, STEP_S, 75),
        (1600, 10_000 * MIB, STEP_S, 256),
        (8000, 10_000 * MIB, STEP_S, 256),
        (8000, 100 * MIB, STEP_S, 10),
        (8000, 100 * MIB, LONE_STEP_S, 50),
        (8000, None, STEP_S, 64),
    ],
)
def test_a_slice_is_what_fits_the_time_and_no_more_than_a_quarter(
    total_mib: int, bytes_per_s: float | None, budget_s: float, expected_mib: int
) -> None:
    assert slice_bytes(total_mib * MIB, bytes_per_s, budget_s) == expected_mib * MIB
    assert slice_bytes(total_mib * MIB, bytes_per_s, budget_s) <= MOST_SLICE_BYTES


@dataclass(eq=False)
class Work:
    """A prompt or a load of the simulation; `due_s` is since when it may not stand still for long."""

    left_s: float
    is_load: bool
    moved_s: float
    due_s: float | None = None


class Simulation:
    """Work comes at any time and of any length; between two turns everybody's decode step takes 20 ms."""

    def __init__(self, coming: list[tuple[float, float, bool]]) -> None:
        self.now_s = self.next_s = 0.0
        self.coming = list(coming)
        self.waiting: list[Work] = []

    def arrive(self) -> None:
        while self.coming and self.next_s <= self.now_s:
            pause_s, left_s, is_load = self.coming.pop(0)
            is_load = is_load and not any(work.is_load for work in self.waiting)  # one at a time
            self.waiting.append(Work(left_s, is_load, self.now_s))
            self.next_s += pause_s

    def turn(self, quiet_s: float) -> None:
        seen = [Waiting(work.left_s, self.now_s - work.moved_s, work.is_load) for work in self.waiting]
        turn = next_turn(seen, quiet_s)
        if turn is None:
            self.now_s = self.next_s
            return
        work = self.waiting[turn.index]
        took_s = min(turn.budget_s, work.left_s)
        self.now_s += took_s + 0.02
        work.left_s -= took_s
        work.moved_s = self.now_s
        if work.left_s <= 0:
            self.waiting.remove(work)

    def stood_still_s(self) -> float:
        """The longest that the load, or the oldest prompt since it is the oldest, has stood still."""
        oldest = next((work for work in self.waiting if not work.is_load), None)
        longest_s = 0.0
        for work in self.waiting:
            if work.is_load or work is oldest:
                work.due_s = self.now_s if work.due_s is None else work.due_s
                longest_s = max(longest_s, self.now_s - max(work.moved_s, work.due_s))
        return longest_s


arrivals = st.lists(st.tuples(st.floats(0, 2), st.floats(0.01, 5), st.booleans()), min_size=1, max_size=25)


@example([(0.0, 3.0, False), (0.0, 1.0, True), (2.0, 2.0, False), (0.0, 0.25, False)], QUIET_S)
@given(arrivals, st.sampled_from([0.0, QUIET_S]))
def test_neither_the_oldest_prompt_nor_the_load_stands_still_for_long_and_all_work_ends(
    coming: list[tuple[float, float, bool]], quiet_s: float
) -> None:
    simulation, longest_s = Simulation(coming), 0.0
    work_s = sum(left_s for _, left_s, _ in coming)
    for _ in range(10 + 2 * len(coming) + int(work_s / STEP_S)):
        simulation.arrive()
        longest_s = max(longest_s, simulation.stood_still_s())
        simulation.turn(quiet_s)
    assert not simulation.coming
    assert not simulation.waiting
    # The step that runs when its patience ends, and one of the other who has lost it too.
    assert longest_s <= PATIENCE_S + 2 * (LONE_STEP_S + 0.02) + 1e-6


def test_a_long_prompt_gets_on_beside_short_ones_that_never_end() -> None:
    now_s, moved_s, steps = 0.0, 0.0, 0
    for _ in range(700):
        turn = next_turn([prompt(100.0, now_s - moved_s), prompt(0.09)], 0.0)
        assert turn is not None
        now_s += STEP_S
        if turn.index == 0:
            steps, moved_s = steps + 1, now_s
    assert 100 <= steps <= 120  # a step each time its patience ends, and no more


@pytest.mark.parametrize(
    ("joining", "left_s", "holds"),
    [
        pytest.param(2, 0.1, True, id="the next prompt is read soon"),
        pytest.param(8, HOLD_S, True, id="just in time"),
        pytest.param(8, HOLD_S * 1.01, False, id="not in time"),
        pytest.param(1, 0.0, False, id="nobody joins with it"),
        pytest.param(2, float("inf"), False, id="all are read"),
    ],
)
def test_whether_answers_stand_still_for_those_that_join(joining: int, left_s: float, holds: bool) -> None:
    assert Hold().may_go_on(joining, left_s, 100.0) is holds
    assert Hold().goes_on(joining, left_s, 100.0) is holds


@pytest.mark.parametrize(
    ("granted", "time", "tokens"),
    [
        pytest.param(256, StepTime(0.0, 0.001), 256, id="what is reserved fits the time"),
        pytest.param(1024, StepTime(0.05, 0.00049), 510, id="as many as fit"),
        pytest.param(1024, StepTime(0.4, 0.001), 0, id="no step fits"),
        pytest.param(1024, StepTime(0.4, 0.0), 0, id="no step fits, whatever its size"),
    ],
)
def test_how_much_is_read_at_once(granted: int, time: StepTime, tokens: int) -> None:
    assert group_tokens(granted, time, 0.3) == tokens


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 1), st.floats(0.001, 0.2)), max_size=60))
def test_answers_never_stand_still_for_longer_than_the_hold_or_than_they_have_decoded(
    rounds: list[tuple[int, float, float]],
) -> None:
    """Whatever comes and however long each round takes: a hold is judged by estimates, which the last step may pass."""
    hold, now_s, held_s, decoded_s, last_hold_s = Hold(), 0.0, 0.0, float("inf"), 0.0
    for joining, left_s, took_s in rounds:
        if hold.goes_on(joining, left_s, now_s):
            if held_s == 0.0:
                assert decoded_s >= last_hold_s * 0.999
            assert held_s <= HOLD_S
            assert hold.left_s(now_s) == pytest.approx(HOLD_S - held_s)
            held_s += took_s
            decoded_s = 0.0
        else:
            if held_s:
                last_hold_s, held_s = held_s, 0.0
            decoded_s += took_s
        now_s += took_s
