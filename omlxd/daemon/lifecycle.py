"""The life of one daemon: lock, manifest, limits, sockets, ready; then pins and preloads; then drain and end.

`serve` is the whole daemon as a function: tests run it with an engine of their own.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import omlxd
from omlxd.core.errors import StartFailed
from omlxd.core.events import Event, EventLevel, EventName
from omlxd.core.manifest import ApiSettings, ListenAddress, Manifest, Restore
from omlxd.core.memory import Policy
from omlxd.core.states import DaemonState
from omlxd.daemon.api_key import KEY_VARIABLE, api_key_of
from omlxd.daemon.app import Daemon, StopOrder
from omlxd.daemon.bus import EventBus
from omlxd.daemon.doors import front_door
from omlxd.daemon.files import require_regular
from omlxd.daemon.flags import Flags
from omlxd.daemon.front_door import FrontDoor, TcpRules
from omlxd.daemon.home import Home
from omlxd.daemon.keep_awake import SleepAssertion, sleep_assertion
from omlxd.daemon.lock import HomeLock
from omlxd.daemon.log import EventLog, libraries_to
from omlxd.daemon.log_console import Console
from omlxd.daemon.manifest_file import read_manifest
from omlxd.daemon.model_check import warnings_of_missing
from omlxd.daemon.notify import ServiceManager
from omlxd.daemon.reloading import Parts, Reloader
from omlxd.daemon.restoring import note_the_end, note_the_start, note_what_is_loaded, wanted_first
from omlxd.daemon.server import HttpServer
from omlxd.daemon.signals import Hangup, signals_to, stacks_on_request
from omlxd.daemon.sockets import bind_tcp, bind_unix, prepare_home, remove_socket, written
from omlxd.daemon.starting import assemble, load_first
from omlxd.daemon.watchers import Watchers, watchers_of
from omlxd.engine.protocol import Engine

ENGINE_CLOSE_S = 10.0
ENGINE_CLOSE_NOW_S = 2.0
AFTER_DRAIN_S = 30.0  # what the end may take beyond the drain: the engine's, and the last writes


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """What the command line decides; None where the manifest does.

    Attributes:
        home: the daemon's directory.
        manifest: the file with models and settings; by default the home's.
        max_memory, hard_limit: as the manifest takes them.
        policy: how pressure is answered.
        restore: what is loaded at the start.
        restarted: it takes the place of a daemon that was stopped for it.
    """

    home: Home
    manifest: Path | None = None
    max_memory: str | None = None
    hard_limit: str | None = None
    policy: Policy | None = None
    restore: Restore | None = None
    restarted: bool = False

    @property
    def flags(self) -> Flags:
        """The command line's word, for as long as the daemon lives."""
        return Flags(self.max_memory, self.hard_limit, self.policy, self.restore, self.restarted)

    @property
    def manifest_path(self) -> Path:
        """The manifest to read."""
        return self.manifest or self.home.manifest


@dataclass(frozen=True, slots=True)
class Ready:
    """Both sockets answer; the models in `loading` come next."""

    pid: int
    socket: str
    api: str | None
    warnings: tuple[str, ...]
    loading: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The line on `--ready-fd`."""
        where = {"pid": self.pid, "socket": self.socket, "api": self.api}
        return {"ready": True, **where, "warnings": list(self.warnings), "loading": list(self.loading)}


@dataclass(frozen=True, slots=True)
class Ended:
    """How the daemon ended: drained or cut short, and whether the engine's thread is gone."""

    cut_short: bool
    engine_gone: bool


async def serve(
    config: DaemonConfig,
    *,
    engine: Engine | None = None,
    on_ready: Callable[[Ready], None] = lambda ready: None,
    manager: ServiceManager | None = None,
    assertion: SleepAssertion | None = None,
    stop: StopOrder | None = None,
    console: Console | None = None,
    handle_signals: bool = False,
    keep_lock: bool = False,
) -> Ended:
    """Run a daemon until it is told to stop.

    Args:
        config: home, manifest and the command line's word.
        engine: what runs models; by default MLX on a thread of its own.
        on_ready: called once, when both sockets answer.
        manager: is told when it is ready and when it drains, and whose watchdog is fed.
        assertion: holds off the machine's sleep while requests are in flight; by default this system's.
        stop: ends the daemon from the same process.
        console: where events are shown beside the log file.
        keep_lock: hold the home until the process is gone, and not only until this returns.
        handle_signals: SIGTERM and SIGINT drain; a second one ends at once. SIGHUP reloads the manifest, SIGUSR1 writes
            down the stacks.

    Raises:
        OmlxError: why it cannot start; nothing is left behind then.
    """
    stop = stop or StopOrder()
    prepare_home(config.home)
    async with AsyncExitStack() as stack:
        lock = HomeLock(config.home.lock)
        if not keep_lock:
            stack.callback(lock.release)
        manifest = config.flags.over(await asyncio.to_thread(read_manifest, config.manifest_path))
        log = _event_log(config, manifest, console)
        stack.callback(log.close)
        bus = EventBus(sinks=(log.write,))
        _emit_start(bus, config)
        hangup = Hangup(stop)
        if handle_signals:
            hangup = stack.enter_context(signals_to(stop))
            stack.enter_context(stacks_on_request(config.home.stacks))
        daemon = await assemble(manifest, config.home, bus, stop, engine, config.flags)
        watchers = watchers_of(daemon, manager := manager or ServiceManager(), assertion or sleep_assertion())
        return await _run(daemon, config, log, on_ready, manager, watchers, hangup)


async def _run(
    daemon: Daemon,
    config: DaemonConfig,
    log: EventLog,
    on_ready: Callable[[Ready], None],
    manager: ServiceManager,
    watchers: Watchers,
    hangup: Hangup,
) -> Ended:
    engine_gone, listen, cut = True, daemon.manifest.api.address, Counter[str]()
    door = front_door(daemon, None if listen is None else _tcp_rules(daemon.manifest.api, listen))
    daemon.log = log
    reloader = daemon.reloader = Reloader(daemon, config.manifest_path, Parts(door, watchers, log))
    try:
        async with _open_doors(daemon, config.home, door):
            daemon.enforcer.start()
            watchers.start()
            hangup.reload_with(reloader.on_signal)
            manager.ready()
            await daemon.state_file.try_writing()
            await note_the_start(daemon, config.manifest_path, config.home)
            missing = await asyncio.to_thread(warnings_of_missing, daemon.manifest)
            warnings = (*daemon.enforcer.limits.warnings, *daemon.state_file.warnings, *missing)
            loading = tuple(entry.name for entry in wanted_first(daemon))
            on_ready(Ready(os.getpid(), str(config.home.socket), daemon.api, warnings, loading))
            daemon.in_background(_become_ready(daemon))
            await daemon.stop.wanted.wait()
            manager.stopping(within_s=daemon.manifest.daemon.drain_timeout_s + AFTER_DRAIN_S)
            was_ready = daemon.state is DaemonState.READY
            cut = await _drain(daemon)
            await daemon.end_background()
            await note_the_end(daemon, was_ready=was_ready)
            await reloader.stop()
            # The pool ends before the server does: what still waits gets its one error over an open connection.
            engine_gone = await daemon.pool.close(ENGINE_CLOSE_NOW_S if daemon.stop.now.is_set() else ENGINE_CLOSE_S)
            daemon.bus.close()
    finally:
        await daemon.end_background()
        await reloader.stop()
        await watchers.stop()
        await daemon.enforcer.stop()
        await daemon.state_file.flush()
        engine_gone = await daemon.pool.close(ENGINE_CLOSE_NOW_S) and engine_gone
    ended = Ended(cut_short=daemon.stop.now.is_set(), engine_gone=engine_gone)
    fields = {"cut_short": ended.cut_short, "engine_gone": ended.engine_gone, "cut": dict(cut)}
    level = EventLevel.WARNING if cut else EventLevel.INFO
    daemon.bus.emit(Event(EventName.DAEMON_STOPPED, level, fields=fields))
    return ended


@asynccontextmanager
async def _open_doors(daemon: Daemon, home: Home, door: FrontDoor) -> AsyncIterator[None]:
    """Both sockets, answering; the Unix one's file goes away at the end, while the lock is still held."""
    listen = daemon.manifest.api.address
    bound: list[socket.socket] = [bind_unix(home.socket)]
    try:
        if listen is not None:
            bound.append(bind_tcp(listen, manifest=Path(daemon.manifest.path)))
            daemon.api = written(listen, bound[1].getsockname()[1])
        server = HttpServer(door, bound, daemon.bus.emit)
        with libraries_to(daemon.bus.emit):
            await server.start()
            daemon.bus.emit(Event(EventName.API_LISTENING, fields={"socket": str(home.socket), "api": daemon.api}))
            try:
                yield
            finally:
                await server.stop()
    finally:
        for each in bound:
            each.close()
        remove_socket(home.socket)


def _tcp_rules(api: ApiSettings, listen: ListenAddress) -> TcpRules:
    key = api_key_of(api)
    if key is None and not listen.is_loopback:  # the manifest is refused before; a library's caller is not
        raise StartFailed(
            f"`{written(listen)}` is open to other machines and there is no key",
            hint=f"set `api.api_key`, `api.api_key_file` or `{KEY_VARIABLE}`",
        )
    return TcpRules(listen, key, frozenset(api.allow_origins))


async def _become_ready(daemon: Daemon) -> None:
    await load_first(daemon)
    if daemon.state is DaemonState.STARTING:
        daemon.state = DaemonState.READY
        loaded = [entry.name for entry in daemon.pool.entries.values() if entry.loaded]
        daemon.bus.emit(Event(EventName.DAEMON_READY, fields={"loaded": loaded}))
        await note_what_is_loaded(daemon)


async def _drain(daemon: Daemon) -> Counter[str]:
    """Take nothing new, serve what is there for `drain_timeout`, less when somebody asks again.

    Returns:
        How many requests of each model have not come to their end by then, and are cut.
    """
    daemon.state = DaemonState.DRAINING
    daemon.pool.stop_admitting(restarting=daemon.stop.to_restart)
    timeout_s = daemon.manifest.daemon.drain_timeout_s
    fields = {
        "asked_by": daemon.stop.asked_by,
        "requests": len(daemon.pool.generations),
        "drain_timeout_s": timeout_s,
        "now": daemon.stop.now.is_set(),
    }
    daemon.bus.emit(Event(EventName.DAEMON_DRAINING, fields=fields))
    draining = asyncio.create_task(daemon.pool.drain(timeout_s))
    hurried = asyncio.create_task(daemon.stop.now.wait())
    await asyncio.wait({draining, hurried}, return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, hurried):
        task.cancel()
    aborted, _ = await asyncio.gather(draining, hurried, return_exceptions=True)
    left = [generation.model for generation in daemon.pool.generations]
    return Counter([*left, *(aborted if isinstance(aborted, list) else ())])


def _event_log(config: DaemonConfig, manifest: Manifest, console: Console | None) -> EventLog:
    settings = manifest.daemon
    require_regular(config.home.log)
    return EventLog(
        config.home.log,
        max_bytes=settings.log_max_size_bytes,
        kept=settings.log_backups,
        least=EventLevel(settings.log_level),
        console=console,
    )


def _emit_start(bus: EventBus, config: DaemonConfig) -> None:
    fields = {
        "version": omlxd.__version__,
        "pid": os.getpid(),
        "home": str(config.home.root),
        "manifest": str(config.manifest_path),
    }
    bus.emit(Event(EventName.DAEMON_STARTING, fields=fields))
