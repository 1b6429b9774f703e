"""How large models are and how far they reach, by their files, before a load says it."""

from __future__ import annotations

import asyncio

from omlxd.core.errors import OmlxError
from omlxd.daemon.app import Daemon
from omlxd.daemon.entry import EnginePoolEntry


async def know_sizes(daemon: Daemon) -> None:
    """Look into the folders of the models that nobody has looked at yet, so that `status` and `models` show them."""
    for entry in tuple(daemon.pool.entries.values()):
        if entry.weights_bytes is None or (entry.measured and entry.context_length is None):  # recalled, not loaded
            await _look_at(daemon, entry)


async def weights_of(daemon: Daemon, entry: EnginePoolEntry) -> int:
    """Its weights in bytes, measured or predicted from its files; 0 when the files cannot be read."""
    if entry.weights_bytes is None:
        await _look_at(daemon, entry)
    return entry.weights_bytes or 0


async def _look_at(daemon: Daemon, entry: EnginePoolEntry) -> None:
    """Fill in what its files say and no load has said yet; nothing where they cannot be read."""
    settings = entry.settings
    try:
        files = await asyncio.to_thread(daemon.pool.read_folder, settings)
    except OmlxError:
        return
    if entry.settings is not settings:
        return  # it has become another model meanwhile
    if entry.weights_bytes is None:
        entry.weights_bytes = files.weights_bytes
    if entry.context_length is None:
        bounds = [each for each in (settings.max_context, files.context_length) if each]
        entry.context_length = min(bounds, default=None)
