"""What a model that is loaded takes: predicted from its files, and measured when the engine has all of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from omlxd.core.errors import OmlxError
from omlxd.core.memory import MemoryReading
from omlxd.daemon.decisions import DecisionRecord
from omlxd.daemon.entry import EnginePoolEntry
from omlxd.daemon.load_ticket import LoadTicket
from omlxd.daemon.refusals import larger_than_predicted
from omlxd.engine.events import ModelInfo
from omlxd.engine.orders import LoadOrder

if TYPE_CHECKING:
    from omlxd.daemon.pool import EnginePool


async def predicted(pool: EnginePool, ticket: LoadTicket) -> LoadOrder:
    """Look at the files first: what can be known to fail costs nobody any memory.

    Raises:
        LoadFailed, NotPermitted: they make no model, or may not be read.
    """
    entry = ticket.entry
    pool.inherit(entry)
    try:
        files = await asyncio.to_thread(pool.read_folder, entry.settings)
    except OmlxError:
        entry.fingerprint = await asyncio.to_thread(pool.fingerprint, entry.settings)
        raise
    if entry.fingerprint != files.fingerprint:
        entry.learned, entry.measured = None, False
        entry.samples.clear()
    if not entry.measured:
        entry.weights_bytes = files.weights_bytes
    entry.files = files
    entry.costs = pool.costs_of(files, entry.learned, pool.dispatch.backend)
    entry.fingerprint, entry.context_length = files.fingerprint, files.context_length
    ticket.total_bytes = entry.weights_bytes or 0
    max_context = entry.settings.max_context
    return LoadOrder(ticket.order_id, entry.name, str(files.path), files.weights_bytes, max_context)


def measured(
    pool: EnginePool, entry: EnginePoolEntry, ticket: LoadTicket | None, info: ModelInfo, reading: MemoryReading
) -> None:
    """From the predicted to the measured size; when that passes the limit the newcomer goes, not the others."""
    predicted_bytes = entry.weights_bytes or 0
    entry.weights_bytes, entry.measured = info.weights_bytes, True
    pool.ledger.reserve_weights(entry.name, info.weights_bytes)
    if entry.files is not None:
        entry.costs = pool.costs_of(entry.files, entry.learned, pool.dispatch.backend)
    over = info.weights_bytes > predicted_bytes and 0 < pool.limits.soft_bytes < pool.ledger.committed_bytes
    if over and pool.door.guarded and ticket is not None and ticket.cancelled is None:
        ticket.cancelled = larger_than_predicted(entry.name, info.weights_bytes, predicted_bytes, pool.limits)
        ticket.too_large = reading


def record_too_large(
    pool: EnginePool, entry: EnginePoolEntry, error: OmlxError, before: MemoryReading, after: MemoryReading
) -> None:
    """The newcomer that passed the limit is gone again: one decision."""
    record = DecisionRecord(
        trigger="load",
        rung="settle",
        action="unload",
        victim=entry.name,
        reason=error.message,
        before=before,
        after=after,
        extra=error.details,
    )
    pool.decisions.add(record, pool.limits)
