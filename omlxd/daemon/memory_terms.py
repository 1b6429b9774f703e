"""What a plan says of memory: what was promised, and what is lent of the rest, anew for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from omlxd.core.group_budget import group_tokens
from omlxd.core.snapshot import Limits
from omlxd.daemon.snapshots import holdings_of

if TYPE_CHECKING:
    from omlxd.daemon.pool import EnginePool


@dataclass(frozen=True, slots=True)
class MemoryTerms:
    """The part of a `Plan` that is about memory; there each field is explained."""

    promised_bytes: int = 0
    transient_bytes: int = 0
    group_tokens: Mapping[str, int] = field(default_factory=dict)
    prefix_cache_bytes: int = 0


def memory_terms(pool: EnginePool) -> MemoryTerms:
    """Those of the next plan. Without the guard, or limits, nothing is promised, and what is lent has no bound."""
    snapshot, ledger, is_bound = holdings_of(pool, pool.engine.read()), pool.ledger, pool.growth.is_bound
    prefix_cache_bytes = pool.prefix.bytes_now(snapshot)
    sizes = group_tokens(snapshot, pool.limits if is_bound else Limits(), ledger, prefix_cache_bytes)
    ledger.grant_groups(sizes)
    promised = (ledger.committed_bytes, ledger.passing_bytes) if is_bound else (0, 0)
    return MemoryTerms(*promised, sizes, prefix_cache_bytes)
