"""`omlxd limit`: a new soft limit, in force and obeyed before the call answers, and saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from omlxd.core.manifest import max_memory_bytes
from omlxd.core.saved_state import SavedLimit, SavedState
from omlxd.core.states import Level
from omlxd.daemon.app import Daemon
from omlxd.daemon.pinning import require_room_for


@dataclass(frozen=True, slots=True)
class LimitChange:
    """What a new limit led to: the models that were unloaded for it, and what the user should know."""

    evicted: tuple[str, ...]
    warnings: tuple[str, ...]


async def change_limit(daemon: Daemon, max_memory: str | int, *, force: bool = False) -> LimitChange:
    """Set the soft limit, let the enforcer act, and save it.

    Args:
        max_memory: as the manifest takes it: `6G`, `75%`, `auto`, bytes; 0 means no enforcement.
        force: accept a limit below the pinned models' weights.

    Raises:
        InvalidRequest: it does not parse, or is above an explicit hard limit.
        DoesNotFit: the pinned models' weights are larger.
    """
    asked_bytes = max_memory_bytes(max_memory, daemon.machine)
    if not force:
        pinned = [entry for entry in daemon.pool.entries.values() if entry.pinned]
        await require_room_for(daemon, pinned, asked_bytes, f"the limit `{max_memory}`")

    saved = SavedLimit(str(max_memory), str(daemon.manifest.daemon.max_memory))
    done = await put_in_force(daemon, lambda: daemon.enforcer.set_limit(asked_bytes, saved.origin))
    daemon.flags = replace(daemon.flags, max_memory=None)  # said later than the command line was

    def with_limit(state: SavedState) -> SavedState:
        return replace(state, limit=saved, start={k: v for k, v in state.start.items() if k != "max_memory"})

    unsaved = await daemon.state_file.change(with_limit)
    return replace(done, warnings=(*done.warnings, *unsaved))


async def put_in_force(daemon: Daemon, change: Callable[[], None]) -> LimitChange:
    """Change the enforcer's limits, and let it act until they hold or nothing is left to do."""
    decisions_before = daemon.pool.decisions.count
    change()
    await daemon.enforcer.settle()
    return LimitChange(_evicted_since(daemon, decisions_before), _warnings(daemon))


def _evicted_since(daemon: Daemon, decisions_before: int) -> tuple[str, ...]:
    # The enforcer's own task may have acted before `settle` did; the decision log knows in both cases.
    new = daemon.pool.decisions.count - decisions_before
    recent = daemon.pool.decisions.recent[-new:] if new else ()
    return tuple(each["victim"] for each in recent if each["action"] == "unload" and each["trigger"] == "limit")


def _warnings(daemon: Daemon) -> tuple[str, ...]:
    warnings = daemon.enforcer.limits.warnings
    view = daemon.enforcer.view()
    return (*warnings, view.reason) if view.level is not Level.OK and view.reason else warnings
