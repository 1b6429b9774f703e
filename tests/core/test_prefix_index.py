"""The index of kept prefixes: the longest shared beginning is found, and the least recently used goes first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.core.prefix_index import PrefixIndex, worth_copying

PLENTY = 1 << 40


def index_of(*entries: tuple[str, Sequence[int], bool], max_per_model: int = 8) -> PrefixIndex[str]:
    """Entries of 10 bytes, whose value is their model and length."""
    index = PrefixIndex[str](max_per_model)
    for model, tokens, cuttable in entries:
        assert index.add(model, tokens, 10, cuttable, lambda: f"{model}{len(tokens)}", PLENTY)  # noqa: B023
    return index


def found(index: PrefixIndex[str], model: str, tokens: Sequence[int]) -> tuple[str, int] | None:
    hit = index.find(model, tokens)
    return None if hit is None else (hit[0].value, hit[1])


@pytest.mark.parametrize(
    ("kept", "cuttable", "wanted", "shared"),
    [
        ([1, 2, 3], True, [1, 2, 3, 4, 5], 3),
        ([1, 2, 3], False, [1, 2, 3, 4, 5], 3),
        ([1, 2, 3], True, [1, 2, 3], 3),
        ([1, 2, 3, 9, 9], True, [1, 2, 3, 4], 3),
        ([1, 2, 3, 9, 9], True, [1, 2], 2),
        ([1, 2, 3, 9, 9], False, [1, 2, 3, 4], None),
        ([1, 2, 3], False, [1, 2], None),
        ([2, 2, 3], True, [1, 2, 3], None),
        ([258, 1], True, [2, 1], None),  # nothing is shared, though a byte of it is
    ],
)
def test_a_prompt_goes_on_from_all_of_what_is_kept_or_from_a_part_where_that_can_be_cut(
    kept: list[int], cuttable: bool, wanted: list[int], shared: int | None
) -> None:
    hit = found(index_of(("m", kept, cuttable)), "m", wanted)
    assert hit == (None if shared is None else (f"m{len(kept)}", shared))


def test_another_models_tokens_are_never_found() -> None:
    assert found(index_of(("a", [1, 2, 3], True)), "b", [1, 2, 3, 4]) is None


def test_the_longest_shared_beginning_wins() -> None:
    index = index_of(("m", [1, 2], False), ("m", [1, 2, 3, 4], False), ("m", [1, 2, 3, 8, 8], True))
    assert found(index, "m", [1, 2, 3, 4, 5]) == ("m4", 4)
    assert found(index, "m", [1, 2, 3, 7]) == ("m5", 3)


def test_what_can_be_cut_replaces_its_own_beginnings_and_the_rest_stays() -> None:
    index = index_of(("m", [1, 2], False), ("m", [7, 8], True), ("m", [1, 2, 3], True))
    assert index.nbytes == 20
    assert not index.add("m", [1, 2], 10, True, lambda: "never", PLENTY)
    assert found(index, "m", [1, 2, 9]) == ("m3", 2)


def test_what_cannot_be_cut_leaves_its_beginnings_where_they_are() -> None:
    index = index_of(("m", [1, 2], False), ("m", [1, 2, 3], False))
    assert index.nbytes == 20
    assert found(index, "m", [1, 2, 9]) == ("m2", 2)


def test_the_least_recently_used_goes_first_whichever_model_it_belongs_to() -> None:
    index = index_of(("a", [1, 2], False), ("b", [3, 4], False), ("a", [5, 6], False))
    hit = index.find("a", [1, 2, 3])
    assert hit is not None
    index.touch(hit[0])
    index.shrink(20)
    assert index.by_model() == {"a": 20}
    index.shrink(10)
    assert found(index, "a", [1, 2, 3]) == ("a2", 2)


def test_room_is_made_before_anything_new_is_kept_and_what_is_too_large_changes_nothing() -> None:
    index = index_of(("m", [1], False), ("m", [2], False), ("m", [3], False))
    held_when_made: list[int] = []
    assert index.add("m", [4], 15, False, lambda: held_when_made.append(index.nbytes) or "new", 30)  # type: ignore[func-returns-value]
    assert held_when_made == [10]
    assert not index.add("m", [5], 31, False, lambda: "never", 30)
    assert index.nbytes == 25


def test_a_model_keeps_a_bounded_number_and_can_be_forgotten() -> None:
    index = index_of(*(("m", [n], False) for n in range(20)), ("other", [1], True))
    assert index.by_model() == {"m": 80, "other": 10}
    assert found(index, "m", [11, 0]) is None
    index.drop("m")
    assert index.by_model() == {"other": 10}


TOKENS = st.lists(st.integers(0, 3) | st.just(300), min_size=1, max_size=12)


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), TOKENS, st.integers(1, 20), st.booleans(), st.integers(0, 60)), max_size=20
    )
)
def test_never_more_is_held_than_was_allowed_and_every_hit_is_a_shared_beginning(
    steps: list[tuple[str, list[int], int, bool, int]],
) -> None:
    index = PrefixIndex[tuple[str, list[int], bool]](4)
    for model, tokens, nbytes, cuttable, keep_bytes in steps:
        hit = index.find(model, tokens)
        if hit is not None:
            (owner, kept, cut), shared = hit[0].value, hit[1]
            assert owner == model
            assert kept[:shared] == tokens[:shared]
            assert len(kept[:shared]) == shared > 0
            assert cut or shared == len(kept)
        index.add(model, tokens, nbytes, cuttable, lambda: (model, tokens, cuttable), keep_bytes)  # noqa: B023
        index.shrink(keep_bytes)
        assert index.nbytes <= keep_bytes
        assert sum(index.by_model().values()) == index.nbytes


@pytest.mark.parametrize(
    ("token_s", "least"), [(0.0, 32), (1e-6, 32), (0.0005, 20), (0.001, 10), (0.0124, 4), (10.0, 4)]
)
def test_the_slower_a_model_runs_a_token_the_fewer_are_worth_a_copy(token_s: float, least: int) -> None:
    assert worth_copying(token_s) == least
