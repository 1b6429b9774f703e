"""How much memory prefix caches may hold: only what nobody else has been promised, so that they keep nobody out."""

from __future__ import annotations

from typing import Final

from omlxd.core.admission import taken
from omlxd.core.ledger import Ledger
from omlxd.core.memory import Policy
from omlxd.core.snapshot import Limits, Snapshot

UNLIMITED_BYTES: Final = 512 * 2**20
"""What `auto` stands for where no limit is set."""
AUTO_SHARE: Final = 8
MARGIN_SHARE: Final = 64
"""A limit's 64th stays free, so that a gauge that swings does not turn a full cache into pressure."""


def prefix_budget(snapshot: Snapshot, limits: Limits, ledger: Ledger, wish_bytes: int | None) -> int:
    """What all prefix caches may hold together from now on, in bytes.

    Under `reference` there are none: its ladder would unload models for them.

    Args:
        wish_bytes: what the user allows; None for `auto`, an eighth of the limit.
    """
    bound_bytes = limits.soft_bytes if limits.soft_bytes > 0 else max(0, limits.hard_bytes)
    if not bound_bytes:
        return UNLIMITED_BYTES if wish_bytes is None else max(0, wish_bytes)
    if limits.policy is Policy.REFERENCE or limits.system_short(snapshot.reading):
        return 0
    wish_bytes = bound_bytes // AUTO_SHARE if wish_bytes is None else wish_bytes
    taken_bytes = taken(snapshot, limits, ledger)
    left_bytes = bound_bytes - bound_bytes // MARGIN_SHARE - taken_bytes
    if limits.hard_bytes > 0:  # nor may the largest step in flight pass the hard limit because of them
        hard_bytes = limits.hard_bytes - limits.hard_bytes // MARGIN_SHARE
        left_bytes = min(left_bytes, hard_bytes - taken_bytes - ledger.transient_bytes)
    return max(0, min(wish_bytes, left_bytes))
