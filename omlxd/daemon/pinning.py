"""Pins set at run time: checked against the limit, put in force, and saved."""

from __future__ import annotations

from omlxd.core.errors import DoesNotFit
from omlxd.core.saved_state import SavedPin
from omlxd.core.units import format_bytes
from omlxd.daemon.app import Daemon
from omlxd.daemon.entry import EnginePoolEntry
from omlxd.daemon.sizes import weights_of


async def pin(daemon: Daemon, name: str, *, force: bool = False) -> tuple[str, ...]:
    """Pin the model and save it; the answer is what the user should know.

    Raises:
        UnknownModel: no such model.
        DoesNotFit: the pinned models' weights would pass the soft limit; `force` accepts that.
    """
    entry = daemon.pool.resolve(name)
    if not entry.pinned and not force:
        pinned = [each for each in daemon.pool.entries.values() if each.pinned]
        await require_room_for(daemon, [*pinned, entry], daemon.pool.limits.soft_bytes, f"pinning `{entry.name}`")
    daemon.pool.pin(entry.name)
    return await _save(daemon, entry)


async def unpin(daemon: Daemon, name: str) -> tuple[str, ...]:
    """Take the pin away and save that; the answer is what the user should know. Raises UnknownModel."""
    entry = daemon.pool.unpin(name)
    return await _save(daemon, entry)


async def require_room_for(daemon: Daemon, pinned: list[EnginePoolEntry], soft_bytes: int, what: str) -> None:
    """Refuse `what` when the weights of these models alone are over `soft_bytes` (0 = no limit); raises DoesNotFit."""
    if soft_bytes <= 0:
        return
    total_bytes = sum([await weights_of(daemon, entry) for entry in pinned])
    if total_bytes > soft_bytes:
        names = ", ".join(f"`{entry.name}`" for entry in pinned)
        raise DoesNotFit(
            f"{what} would leave pinned weights of {format_bytes(total_bytes)} ({names})"
            f" above the soft limit {format_bytes(soft_bytes)}",
            hint="unpin a model or raise the limit; `--force` does it all the same",
            details={"pinned_bytes": total_bytes, "limit_bytes": soft_bytes, "pinned": [each.name for each in pinned]},
        )


async def _save(daemon: Daemon, entry: EnginePoolEntry) -> tuple[str, ...]:
    saved = SavedPin(pinned=entry.pinned, manifest_pinned=entry.settings.pin)
    return await daemon.state_file.change(lambda state: state.with_pin(entry.name, saved))
