"""How many tokens of short prompts one step may read: by tables, and for any pool: never out of what was promised."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.core.admission import taken
from omlxd.core.group_budget import SIZES, group_tokens
from omlxd.core.ledger import Ledger
from omlxd.core.memory import MemoryReading
from omlxd.core.snapshot import EntrySnapshot, Limits, Snapshot
from omlxd.core.states import EntryState
from tests.fakes.costs import FakeCosts

MIB = 2**20
LIMITS = Limits(6000 * MIB, 6400 * MIB)  # of the hard limit a 64th stays free
COSTS = FakeCosts(token_bytes=0, chunk_token_bytes=MIB)


def seen(active_mib: int, **reading: object) -> Snapshot:
    entry = EntrySnapshot("m", EntryState.LOADED, weights_bytes=active_mib * MIB)
    return Snapshot(0.0, MemoryReading(active_bytes=active_mib * MIB, **reading), (entry,))  # type: ignore[arg-type]


def waiting(*prompts: int, costs: FakeCosts = COSTS) -> Ledger:
    """A model with so many prompts that are not read yet."""
    ledger = Ledger()
    ledger.reserve_weights("m", MIB)
    for number, tokens in enumerate(prompts):
        ledger.reserve("m", f"r{number}", costs, tokens, 256)
    return ledger


@pytest.mark.parametrize(
    ("limits", "active_mib", "prefix_mib", "costs", "tokens"),
    [
        (LIMITS, 1000, 0, COSTS, 1024),
        (LIMITS, 5276, 0, COSTS, 1024),
        (LIMITS, 5277, 0, COSTS, 512),
        (LIMITS, 5000, 276, COSTS, 1024),
        (LIMITS, 5000, 277, COSTS, 512),  # prefix caches may take it meanwhile
        (LIMITS, 6200, 0, COSTS, 64),  # what each of the two was promised for itself
        (LIMITS, 6200, 0, replace(COSTS, decode_bytes=130 * MIB), 256),  # a decode step of two was promised more
        (LIMITS, 6200, 0, replace(COSTS, chunk_token_bytes=2 * MIB), 64),
        (LIMITS, 1000, 0, replace(COSTS, certain=False), None),
        (replace(LIMITS, hard_bytes=0), 9000, 0, COSTS, 1024),
        (Limits(), 9000, 0, COSTS, 1024),
    ],
)
def test_a_step_reads_what_the_hard_limit_leaves(
    limits: Limits, active_mib: int, prefix_mib: int, costs: FakeCosts, tokens: int | None
) -> None:
    sizes = group_tokens(seen(active_mib), limits, waiting(100, 100, costs=costs), prefix_mib * MIB)
    assert sizes.get("m") == tokens


def test_who_is_alone_or_already_read_needs_none() -> None:
    ledger = waiting(100, 50, 20)
    for read, left in (("r0", {"m": 1024}), ("r1", {}), ("r2", {})):
        ledger.prefilled("m", read)
        assert group_tokens(seen(1000), LIMITS, ledger, 0) == left


def test_nobody_does_more_at_once_while_other_programs_need_the_memory() -> None:
    short = seen(1000, system_total_bytes=16_000 * MIB, system_available_bytes=500 * MIB)
    limits = replace(LIMITS, min_available_bytes=1000 * MIB)
    assert group_tokens(short, limits, waiting(100, 100), 0) == {}


def test_what_was_granted_is_in_nobodys_way() -> None:
    ledger = waiting(100, 100)
    before = ledger.if_admitted("m", COSTS, 100, 256)
    ledger.grant_groups({"m": 1024})
    assert ledger.passing_bytes == 1024 * MIB
    assert (ledger.transient_bytes, ledger.if_admitted("m", COSTS, 100, 256)) == (100 * MIB, before)
    ledger.prefilled("m", "r0")
    assert ledger.passing_bytes == ledger.transient_bytes, "and it ends with the prompts"
    ledger.grant_groups({})
    ledger.reserve("m", "r3", COSTS, 10, 256)
    assert ledger.passing_bytes == ledger.transient_bytes


@given(
    active_mib=st.integers(0, 9000),
    prefix_mib=st.integers(0, 3000),
    prompts=st.lists(st.integers(1, 4000), max_size=5),
    soft_mib=st.integers(0, 8000),
    over_soft_mib=st.integers(0, 4000),
    decode_mib=st.integers(0, 500),
    at_rest=st.booleans(),
)
def test_whatever_is_seen_what_was_promised_still_fits_beside_such_a_step(
    active_mib: int,
    prefix_mib: int,
    prompts: list[int],
    soft_mib: int,
    over_soft_mib: int,
    decode_mib: int,
    at_rest: bool,
) -> None:
    ledger = waiting(*prompts, costs=FakeCosts(MIB // 4, MIB, decode_mib * MIB))
    limits = Limits(soft_mib * MIB, (soft_mib + over_soft_mib) * MIB)
    snapshot = seen(active_mib, at_rest=at_rest)
    sizes = group_tokens(snapshot, limits, ledger, prefix_mib * MIB)
    for tokens in sizes.values():
        assert tokens in SIZES
        step_bytes = ledger.group_transient_bytes("m", tokens)
        if limits.hard_bytes and step_bytes > ledger.transient_bytes:
            assert taken(snapshot, limits, ledger) + prefix_mib * MIB + step_bytes < limits.hard_bytes
