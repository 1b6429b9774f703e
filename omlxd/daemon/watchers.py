"""What watches a daemon beside the enforcer: time to live, stalls, pauses, sleep, memory, the manager's watchdog."""

from __future__ import annotations

from typing import Protocol

from omlxd.daemon.app import Daemon
from omlxd.daemon.awake_clock import PauseWatch
from omlxd.daemon.keep_awake import KeepAwake, SleepAssertion
from omlxd.daemon.notify import ServiceManager
from omlxd.daemon.stall_watch import StallWatch
from omlxd.daemon.ttl import IdleTimer
from omlxd.daemon.watchdog import Watchdog


class Watcher(Protocol):
    """A task of its own that looks at the daemon."""

    def start(self) -> None:
        """Begin; the second call does nothing."""
        ...

    async def stop(self) -> None:
        """End it; idempotent."""
        ...


def watchers_of(daemon: Daemon, manager: ServiceManager, assertion: SleepAssertion | None) -> tuple[Watcher, ...]:
    """All of them, not started.

    Args:
        daemon: what is watched.
        manager: whose watchdog is fed.
        assertion: what holds off sleep here, if the manifest wants it.
    """
    settings, pool, emit = daemon.manifest.daemon, daemon.pool, daemon.bus.emit
    return (
        IdleTimer(pool),
        StallWatch(pool.engine, settings.stall_timeout_s, emit),
        Watchdog(manager, pool.engine, daemon.enforcer),
        KeepAwake(pool, assertion if settings.keep_awake else None, emit),
        PauseWatch(emit),
        daemon.history,
    )
