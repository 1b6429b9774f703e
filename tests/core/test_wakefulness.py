"""When the machine is kept awake, over all courses of requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omlxd.core.wakefulness import Wakefulness

LINGER_S = 30.0
STEPS = st.lists(st.tuples(st.floats(0.0, 100.0), st.booleans()), max_size=40)


@given(STEPS)
def test_it_is_held_while_requests_run_and_for_the_linger_after_the_last_and_never_else(
    steps: list[tuple[float, bool]],
) -> None:
    now_s, seen, ended_s = 0.0, Wakefulness(), None
    for passed_s, busy in steps:
        now_s += passed_s
        was_busy = seen.held and seen.idle_since_s is None
        seen = seen.look(busy, now_s, LINGER_S)
        if busy:
            ended_s = None
        elif was_busy:
            ended_s = now_s
        lingers = ended_s is not None and now_s - ended_s < LINGER_S
        assert seen.held == (busy or lingers)
        if not seen.held:
            ended_s = None


@given(st.floats(0.0, 1e6), st.floats(0.0, LINGER_S, exclude_max=True))
def test_whoever_waits_for_what_is_left_finds_it_let_go(began_s: float, passed_s: float) -> None:
    held = Wakefulness().look(True, began_s, LINGER_S)
    assert held.left_s(began_s, LINGER_S) is None
    idle = held.look(False, began_s, LINGER_S)
    left_s = idle.left_s(began_s + passed_s, LINGER_S)
    assert left_s is not None
    assert not idle.look(False, began_s + passed_s + left_s + 1e-3, LINGER_S).held
    assert Wakefulness().left_s(began_s, LINGER_S) is None
