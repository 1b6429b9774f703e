"""What decisions look at: the pool's models that hold memory or are about to, however many there are besides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from omlxd.core.memory import MemoryReading
from omlxd.core.snapshot import RequestSnapshot, Snapshot
from omlxd.core.states import EntryState

if TYPE_CHECKING:
    from omlxd.daemon.pool import EnginePool

_AT_REST: Final = (EntryState.UNLOADED, EntryState.FAILED)
_NO_REQUESTS: Final[dict[str, tuple[RequestSnapshot, ...]]] = {}


def snapshot_of(pool: EnginePool, reading: MemoryReading) -> Snapshot:
    """All that a decision may depend on; models without memory and without promises are left out."""
    return _snapshot(pool, reading, pool.dispatch.running(), None)


def holdings_of(pool: EnginePool, reading: MemoryReading, asked: str | None = None) -> Snapshot:
    """The same without the single requests that the engine has, which may be very many: who is admitted does not
    depend on them.

    Args:
        asked: a model that is looked at even if it holds nothing.
    """
    return _snapshot(pool, reading, _NO_REQUESTS, asked)


def _snapshot(
    pool: EnginePool, reading: MemoryReading, running: dict[str, tuple[RequestSnapshot, ...]], asked: str | None
) -> Snapshot:
    now_s, promised = pool.clock(), pool.ledger.committed_by_model()
    kv_bytes, prefix_bytes = pool.engine.kv_bytes(), pool.engine.prefix_bytes()
    entries = tuple(
        entry.snapshot(
            now_s, kv_bytes.get(name, 0), promised.get(name, 0), prefix_bytes.get(name, 0), running.get(name, ())
        )
        for name, entry in pool.entries.items()
        if entry.state not in _AT_REST or name in promised or name == asked
    )
    return Snapshot(now_s, reading, entries)
