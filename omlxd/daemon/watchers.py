"""What watches a daemon beside the enforcer: time to live, stalls, pauses, sleep, memory, the manager's watchdog."""

from __future__ import annotations

from dataclasses import dataclass

from omlxd.core.manifest import DaemonSettings
from omlxd.daemon.app import Daemon
from omlxd.daemon.awake_clock import PauseWatch
from omlxd.daemon.keep_awake import KeepAwake, SleepAssertion
from omlxd.daemon.memory_history import MemoryHistory
from omlxd.daemon.notify import ServiceManager
from omlxd.daemon.stall_watch import StallWatch
from omlxd.daemon.ttl import IdleTimer
from omlxd.daemon.watchdog import Watchdog
from omlxd.daemon.watcher import Watcher


@dataclass(frozen=True, slots=True)
class Watchers:
    """All of them."""

    idle_timer: IdleTimer
    stall_watch: StallWatch
    watchdog: Watchdog
    keep_awake: KeepAwake
    pause_watch: PauseWatch
    history: MemoryHistory

    def start(self) -> None:
        """Begin; those that watch already go on."""
        for watcher in self._each():
            watcher.start()

    async def stop(self) -> None:
        """End them; idempotent."""
        for watcher in self._each():
            await watcher.stop()

    def configure(self, settings: DaemonSettings) -> None:
        """Take over what another manifest says."""
        self.stall_watch.timeout_s = settings.stall_timeout_s
        self.keep_awake.wanted = settings.keep_awake

    def _each(self) -> tuple[Watcher, ...]:
        return self.idle_timer, self.stall_watch, self.watchdog, self.keep_awake, self.pause_watch, self.history


def watchers_of(daemon: Daemon, manager: ServiceManager, assertion: SleepAssertion | None) -> Watchers:
    """All of them, not started.

    Args:
        daemon: what is watched.
        manager: whose watchdog is fed.
        assertion: what holds off sleep here, if the manifest wants it.
    """
    settings, pool, emit = daemon.manifest.daemon, daemon.pool, daemon.bus.emit
    watchers = Watchers(
        IdleTimer(pool),
        StallWatch(pool.engine, settings.stall_timeout_s, emit),
        Watchdog(manager, pool.engine, daemon.enforcer),
        KeepAwake(pool, assertion, emit),
        PauseWatch(emit),
        daemon.history,
    )
    watchers.keep_awake.wanted = settings.keep_awake
    return watchers
