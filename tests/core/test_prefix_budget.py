"""What prefix caches may hold: by tables, and for any pool: never anything that somebody was promised."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.core.admission import taken
from omlxd.core.ledger import Ledger
from omlxd.core.memory import MemoryReading, Policy
from omlxd.core.prefix_budget import UNLIMITED_BYTES, prefix_budget
from omlxd.core.room import RoomKind, make_room
from omlxd.core.snapshot import EntrySnapshot, Limits, Snapshot
from omlxd.core.states import EntryState
from tests.fakes.costs import FakeCosts

MIB = 2**20
SOFT = Limits(6400 * MIB, 12_800 * MIB, policy=Policy.GRACEFUL)


def seen(active_mib: float, prefix_mib: float = 0, weights_mib: float = 1000, **reading: object) -> Snapshot:
    """One loaded model, and what was read."""
    entry = EntrySnapshot(
        "m", EntryState.LOADED, weights_bytes=int(weights_mib * MIB), prefix_bytes=int(prefix_mib * MIB)
    )
    return Snapshot(0.0, MemoryReading(active_bytes=int(active_mib * MIB), **reading), (entry,))  # type: ignore[arg-type]


def ledger(weights_mib: float = 1000) -> Ledger:
    promised = Ledger()
    promised.reserve_weights("m", int(weights_mib * MIB))
    return promised


@pytest.mark.parametrize(
    ("limits", "active_mib", "prefix_mib", "committed_mib", "wish_mib", "budget_mib"),
    [
        (SOFT, 1000, 0, 1000, None, 800),  # an eighth of the limit
        (SOFT, 1000, 0, 1000, 300, 300),
        (SOFT, 1000, 0, 1000, 0, 0),
        (SOFT, 1000, 0, 1000, 10_000, 5300),  # a 64th of the limit stays free
        (SOFT, 6000, 0, 1000, 1000, 300),  # memory that nobody explains is in nobody's way twice
        (SOFT, 6000, 4000, 1000, 10_000, 4300),  # what they hold themselves does not count against them
        (SOFT, 1000, 0, 6000, None, 300),  # a load has been promised the rest
        (SOFT, 1000, 0, 7000, None, 0),
        (SOFT, 7000, 100, 1000, None, 0),
        (replace(SOFT, hard_bytes=6420 * MIB), 1000, 0, 6000, None, 300),
        (replace(SOFT, hard_bytes=6400 * MIB), 1000, 0, 6000, None, 300),
        (replace(SOFT, soft_bytes=0), 1000, 0, 1000, None, 1600),
        (replace(SOFT, soft_bytes=0, hard_bytes=0), 1000, 0, 1000, 300, 300),
        (replace(SOFT, policy=Policy.REFERENCE), 1000, 0, 1000, None, 0),
    ],
)
def test_they_hold_what_the_user_allows_and_nobody_else_was_promised(
    limits: Limits, active_mib: int, prefix_mib: int, committed_mib: int, wish_mib: int | None, budget_mib: int
) -> None:
    wish_bytes = None if wish_mib is None else wish_mib * MIB
    budget_bytes = prefix_budget(seen(active_mib, prefix_mib), limits, ledger(committed_mib), wish_bytes)
    assert budget_bytes == budget_mib * MIB


def test_without_limits_auto_is_a_fixed_size() -> None:
    assert prefix_budget(seen(1000), Limits(), ledger(), None) == UNLIMITED_BYTES


def test_nothing_is_kept_while_other_programs_need_the_memory() -> None:
    short = seen(1000, system_total_bytes=16_000 * MIB, system_available_bytes=500 * MIB)
    limits = replace(SOFT, min_available_bytes=1000 * MIB)
    assert prefix_budget(short, limits, ledger(), 300 * MIB) == 0


def test_a_model_that_fits_but_for_prefix_caches_is_loaded_and_nobody_is_evicted_for_it() -> None:
    full = seen(1000 + 5000, prefix_mib=5000)
    assert make_room(full, SOFT, "new", 5000 * MIB).kind is RoomKind.FITS
    assert make_room(replace(full, entries=()), SOFT, "new", 5000 * MIB).kind is not RoomKind.FITS


@given(
    active_mib=st.integers(0, 9000),
    prefix_mib=st.integers(0, 3000),
    wish_mib=st.none() | st.integers(0, 9000),
    prompts=st.lists(st.integers(1, 4000), max_size=5),
    soft_mib=st.integers(0, 8000),
    over_soft_mib=st.integers(0, 4000),
    at_rest=st.booleans(),
)
def test_whatever_is_seen_what_was_promised_still_fits_beside_them(
    active_mib: int,
    prefix_mib: int,
    wish_mib: int | None,
    prompts: list[int],
    soft_mib: int,
    over_soft_mib: int,
    at_rest: bool,
) -> None:
    promised = ledger()
    costs = FakeCosts(token_bytes=MIB // 4, chunk_token_bytes=MIB)
    for number, tokens in enumerate(prompts):
        promised.reserve("m", f"r{number}", costs, tokens, 256)
    limits = Limits(soft_mib * MIB, (soft_mib + over_soft_mib) * MIB, policy=Policy.GRACEFUL)
    snapshot = seen(active_mib, min(prefix_mib, active_mib), at_rest=at_rest)
    wish_bytes = None if wish_mib is None else wish_mib * MIB
    budget_bytes = prefix_budget(snapshot, limits, promised, wish_bytes)
    assert budget_bytes >= 0
    if wish_bytes is not None:
        assert budget_bytes <= wish_bytes
    if budget_bytes and limits.soft_bytes:
        assert taken(snapshot, limits, promised) + budget_bytes < limits.soft_bytes
    if budget_bytes and limits.hard_bytes:
        passing_bytes = taken(snapshot, limits, promised) + promised.transient_bytes
        assert passing_bytes + budget_bytes < limits.hard_bytes
