"""What a pool's prefix caches may hold: worked out for every plan, so that whatever a plan brings finds its room."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from omlxd.core.prefix_budget import prefix_budget
from omlxd.core.snapshot import Snapshot

if TYPE_CHECKING:
    from omlxd.daemon.pool import EnginePool

TRIMMED_FOR_S: Final = 30.0
"""After they had to give way, prefix caches stay that small for so long: else they would fill the room again."""


class PrefixBudget:
    """The prefix caches' share of one pool's memory.

    Args:
        pool: whose ledger, limits and readings decide.
        wish_bytes: what the user allows all of them together; None for `auto`.
    """

    def __init__(self, pool: EnginePool, wish_bytes: int | None) -> None:
        self.wish_bytes = wish_bytes
        self._pool = pool
        self._trimmed_to_bytes: int | None = None
        self._trimmed_until_s = 0.0

    def bytes_now(self, snapshot: Snapshot) -> int:
        """What they may hold by the next plan."""
        pool = self._pool
        budget_bytes = prefix_budget(snapshot, pool.limits, pool.ledger, self.wish_bytes)
        if self._trimmed_to_bytes is None or pool.clock() >= self._trimmed_until_s:
            self._trimmed_to_bytes = None
            return budget_bytes
        return min(budget_bytes, self._trimmed_to_bytes)

    async def trim(self, keep_bytes: int) -> None:
        """Shrink them to `keep_bytes`, least recently used first, and keep them there for a while.

        Returns when the engine has obeyed, or does not get to it.
        """
        self._trimmed_to_bytes = max(0, keep_bytes)
        self._trimmed_until_s = self._pool.clock() + TRIMMED_FOR_S
        self._pool.link.changed()
        await self._pool.read_rest()
