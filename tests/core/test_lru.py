"""The order of last use, sorted in whichever way is quick."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omlxd.core.case import lru_first, lru_key, lru_order
from omlxd.core.snapshot import EntrySnapshot
from omlxd.core.states import EntryState

SNAPSHOTS = st.builds(
    EntrySnapshot,
    st.text("abc", min_size=1, max_size=3),
    st.just(EntryState.LOADED),
    last_used_s=st.sampled_from([0.0, 1.0, 2.0, 3.5]),
    running=st.integers(0, 1),
)


@given(st.lists(SNAPSHOTS, max_size=30, unique_by=lambda each: each.name), st.integers(1, 30))
def test_the_first_of_it_are_those_of_the_whole_order(entries: list[EntrySnapshot], count: int) -> None:
    order = sorted(entries, key=lru_key)
    assert lru_order(entries) == order
    assert lru_first(entries, count) == order[:count]
