"""`omlxd limit`: a new soft limit, in force and obeyed before the call answers, and saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from omlxd.core.manifest import max_memory_bytes
from omlxd.core.memory import Policy
from omlxd.core.saved_state import SavedLimit, SavedState
from omlxd.core.states import Level
from omlxd.daemon.app import Daemon
from omlxd.daemon.pinning import require_room_for


@dataclass(slots=True)
class LimitChange:
    """What a new limit led to, and what the user should know.

    Attributes:
        evicted: models that were unloaded.
        parked, aborted: by model, requests that go on later, and those that ended.
        postponed, cancelled: models whose load is tried again by itself, and those whose load is not.
        warnings: sentences.
    """

    evicted: list[str] = field(default_factory=list)
    parked: dict[str, list[str]] = field(default_factory=dict)
    aborted: dict[str, list[str]] = field(default_factory=dict)
    postponed: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    warnings: tuple[str, ...] = ()

    def effects(self) -> dict[str, Any]:
        """What it cost whom, JSON-ready."""
        return {
            "evicted": self.evicted,
            "parked": self.parked,
            "aborted": self.aborted,
            "postponed": self.postponed,
            "cancelled": self.cancelled,
        }


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
    # The enforcer's own task may act before `settle` does; the decision log knows in both cases.
    with daemon.pool.decisions.gathered() as decisions:
        change()
        await daemon.enforcer.settle()
    done = LimitChange(warnings=_warnings(daemon))
    for decision in decisions:
        if decision["trigger"] == "limit":
            _note(decision, done)
    return done


def _note(decision: Mapping[str, Any], done: LimitChange) -> None:
    action, model, graceful = decision["action"], decision["victim"], decision["policy"] == Policy.GRACEFUL
    if action == "unload":
        done.evicted.append(model)
    elif action == "cancel_load":
        (done.postponed if graceful else done.cancelled).append(model)
    if requests := decision["requests"]:
        goes_on = action == "park" or (action == "unload" and graceful)
        (done.parked if goes_on else done.aborted).setdefault(model, []).extend(requests)


def _warnings(daemon: Daemon) -> tuple[str, ...]:
    warnings = daemon.enforcer.limits.warnings
    view = daemon.enforcer.view()
    return (*warnings, view.reason) if view.level is not Level.OK and view.reason else warnings
