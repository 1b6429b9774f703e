"""What a plan lends of memory that nobody has been promised: worked out anew for each, so that it keeps nobody out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from omlxd.daemon.snapshots import holdings_of

if TYPE_CHECKING:
    from omlxd.daemon.pool import EnginePool


@dataclass(frozen=True, slots=True)
class SpareRoom:
    """The part of a `Plan` that is lent.

    Attributes:
        prefix_cache_bytes: what the prefix caches may hold.
        group_tokens: by model, the tokens of a step that reads several short prompts at once.
        transient_bytes: what such a step may hold in passing.
    """

    prefix_cache_bytes: int = 0
    group_tokens: Mapping[str, int] = field(default_factory=dict)
    transient_bytes: int = 0


def spare_room(pool: EnginePool) -> SpareRoom:
    """What the next plan may lend."""
    snapshot = holdings_of(pool, pool.engine.read())
    prefix_cache_bytes = pool.prefix.bytes_now(snapshot)
    sizes = pool.growth.lend_groups(snapshot, prefix_cache_bytes)
    return SpareRoom(prefix_cache_bytes, sizes, pool.ledger.passing_bytes if sizes else 0)
