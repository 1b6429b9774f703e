"""What a prefill step takes, from the last steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.core.step_time import UNKNOWN, StepTime, step_time


def test_a_line_through_steps_of_different_sizes_tells_the_fixed_part() -> None:
    found = step_time([(16, 0.108), (32, 0.116), (64, 0.132)])
    assert (found.fixed_s, found.token_s) == pytest.approx((0.1, 0.0005))
    assert found.of(128) == pytest.approx(0.164)


def test_without_a_step_a_guess() -> None:
    assert step_time([]) == UNKNOWN


def test_steps_of_one_size_say_what_that_size_takes_and_half_of_it_is_taken_to_be_fixed() -> None:
    found = step_time([(64, 0.1), (64, 0.3)])
    assert found.of(64) == pytest.approx(0.2)
    assert found.of(128) == pytest.approx(0.3)


def test_a_larger_step_that_took_less_is_noise() -> None:
    found = step_time([(16, 0.3), (32, 0.1)])
    assert found.of(24) == pytest.approx(0.2)
    assert found.fixed_s > 0


def test_the_work_left_counts_the_fixed_part_for_each_chunk() -> None:
    assert StepTime(0.1, 0.001).in_chunks(1000, 256) == pytest.approx(1.4)


@given(st.lists(st.tuples(st.integers(8, 8192), st.floats(1e-6, 100)), min_size=1, max_size=8))
def test_no_part_is_ever_negative_and_the_middle_is_kept(steps: list[tuple[int, float]]) -> None:
    found = step_time(steps)
    assert found.fixed_s >= 0
    assert found.token_s > 0
    middle_tokens = sum(tokens for tokens, _ in steps) / len(steps)
    middle_s = sum(took_s for _, took_s in steps) / len(steps)
    assert found.fixed_s + found.token_s * middle_tokens == pytest.approx(middle_s)
