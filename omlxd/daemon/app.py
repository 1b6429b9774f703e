"""The assembled daemon: its parts, and what the routes ask of all of them together."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import omlxd
from omlxd.core.errors import OmlxError
from omlxd.core.limits import Machine, resolve_limits
from omlxd.core.manifest import Manifest, max_memory_bytes
from omlxd.core.states import DaemonState, LimitOrigin, StatusView, flat
from omlxd.daemon.bus import EventBus
from omlxd.daemon.enforcer import ProcessMemoryEnforcer
from omlxd.daemon.flags import Flags
from omlxd.daemon.memory_history import MemoryHistory
from omlxd.daemon.monitor import MemoryMonitor
from omlxd.daemon.planning import Surroundings, default_backend, limits_in_force, neighbours_of, planner_of
from omlxd.daemon.pool import EnginePool
from omlxd.daemon.state_file import StateFile
from omlxd.daemon.tallies import Tallies

if TYPE_CHECKING:
    from omlxd.daemon.log import EventLog
    from omlxd.daemon.reloading import Reloader


class StopOrder:
    """Who wants the daemon to end; `now` is set by who cannot wait, as a second signal says.

    `to_restart` says that its successor is to go on with what it had loaded; `asked_by` names the first who asked.
    """

    def __init__(self) -> None:
        self.wanted = asyncio.Event()
        self.now = asyncio.Event()
        self.to_restart = False
        self.asked_by: str | None = None

    def ask(self, by: str | None = None, *, now: bool = False) -> None:
        """Begin to drain, or join those who asked before; with `now`, end at once."""
        if not self.wanted.is_set():
            self.asked_by = by
        if now:
            self.now.set()
        self.wanted.set()

    def signalled(self, by: str) -> None:
        """Begin to drain; at a second signal end at once."""
        self.ask(by, now=self.wanted.is_set())


@dataclass
class Daemon:
    """The parts of one running daemon, as the routes use them."""

    manifest: Manifest
    machine: Machine
    bus: EventBus
    pool: EnginePool
    enforcer: ProcessMemoryEnforcer
    monitor: MemoryMonitor
    state_file: StateFile
    history: MemoryHistory
    stop: StopOrder = field(default_factory=StopOrder)
    flags: Flags = field(default_factory=Flags)
    log: EventLog | None = None
    reloader: Reloader | None = None
    state: DaemonState = DaemonState.STARTING
    api: str | None = None
    started_at: float = field(default_factory=time.time)
    tallies: Tallies = field(default_factory=Tallies)
    _background: set[asyncio.Task[Any]] = field(default_factory=set)
    _started_s: float = field(default_factory=time.monotonic)

    @property
    def run(self) -> str:
        """A name of this run of the daemon that no other run has: numbers of events begin anew with each."""
        return f"{self.started_at:.3f}-{os.getpid()}"

    def status(self) -> StatusView:
        """All that `omlxd status` knows; looks at memory only, never at the disk."""
        monitor = self.monitor
        return StatusView(
            version=omlxd.__version__,
            pid=os.getpid(),
            state=self.state,
            uptime_s=time.monotonic() - self._started_s,
            backend=monitor.backend(),
            manifest=self.manifest.path,
            memory=self.monitor.memory(),
            enforcer=monitor.enforcer(),
            models=monitor.models(),
            requests=monitor.requests(),
            recent_decisions=monitor.recent_decisions(),
            api=self.api,
            stalled_s=monitor.stalled_s() or None,
            log_trouble=None if self.log is None else self.log.trouble,
        )

    def surroundings(self, max_memory: str | None = None) -> Surroundings:
        """What a plan is made in now; with another soft limit where one is given. Raises InvalidRequest."""
        monitor = self.monitor
        memory = monitor.memory()
        limits = limits_in_force(flat(memory))
        if max_memory is not None:
            asked_bytes = max_memory_bytes(max_memory, self.machine)
            limits = resolve_limits(asked_bytes, None, self.machine, LimitOrigin.COMMAND_LINE)
        neighbours = neighbours_of([flat(view) for view in monitor.models()])
        return Surroundings(
            manifest=self.manifest,
            planner=planner_of(self.manifest, limits, neighbours, memory.unaccounted),
            state=self.state_file.state,
            backend=monitor.backend() or default_backend(),
            running=True,
        )

    def in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run what nobody waits for; its failures are events of their own."""
        task = asyncio.create_task(_quietly(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def end_background(self) -> None:
        """Cancel what still runs."""
        tasks = tuple(self._background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _quietly(work: Coroutine[Any, Any, Any]) -> None:
    try:
        await work
    except OmlxError:
        pass  # the pool has told it
