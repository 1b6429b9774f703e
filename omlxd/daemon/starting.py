"""From a manifest and the saved state to the daemon's parts, and the models that are loaded first."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass

from omlxd.core.errors import InvalidRequest, ManifestInvalid, OmlxError
from omlxd.core.events import Event, EventLevel, EventName
from omlxd.core.limits import Machine
from omlxd.core.manifest import Manifest, max_memory_bytes, min_available_bytes, prefix_cache_bytes
from omlxd.core.units import format_bytes, parse_size
from omlxd.daemon.app import Daemon, StopOrder
from omlxd.daemon.bus import EventBus
from omlxd.daemon.enforcer import ProcessMemoryEnforcer
from omlxd.daemon.home import Home
from omlxd.daemon.machine import find_machine
from omlxd.daemon.memory_history import MemoryHistory
from omlxd.daemon.monitor import MemoryMonitor
from omlxd.daemon.pinning import weights_of
from omlxd.daemon.pool import EnginePool
from omlxd.daemon.state_file import LearnedSizes, SavedState, StateFile
from omlxd.engine.protocol import Engine


@dataclass(frozen=True, slots=True)
class Flags:
    """The command line's limits, as written; None where the run-time value or the manifest decides."""

    max_memory: str | None = None
    hard_limit: str | None = None


async def assemble(
    manifest: Manifest, home: Home, bus: EventBus, stop: StopOrder, engine: Engine | None, flags: Flags
) -> Daemon:
    """The parts of a daemon, with the limits and pins that hold; nothing runs yet.

    Raises:
        ManifestInvalid: a pinned model is larger than the limit, or `hard_limit` contradicts `max_memory`.
        InvalidRequest: the command line's limits do not make sense.
    """
    state_file = StateFile(home.state, bus.emit)
    saved = state_file.load()
    pool = _pool(manifest, bus, engine)
    machine = find_machine(pool.engine.device_cap())
    pool.prefix.wish_bytes = prefix_cache_bytes(manifest.daemon.prefix_cache, machine)
    enforcer = _enforcer(manifest, pool, machine, saved, flags)
    daemon = Daemon(
        manifest=manifest,
        machine=machine,
        bus=bus,
        pool=pool,
        enforcer=enforcer,
        monitor=MemoryMonitor(pool, enforcer),
        state_file=state_file,
        stop=stop,
        history=MemoryHistory(lambda: pool.engine.read().pressure_bytes(pool.limits.policy)),
    )
    bus.add_sink(daemon.tallies.count)
    _restore(daemon, saved)
    await _check_pins(daemon)
    _learn(daemon)
    return daemon


async def load_first(daemon: Daemon) -> None:
    """Load the pinned models, then the preloads, one after the other; what does not fit stays unloaded."""
    entries = list(daemon.pool.entries.values())
    for entry in entries:
        await weights_of(daemon, entry)  # so that `status` shows sizes before anything is loaded
    pinned = [entry for entry in entries if entry.pinned]
    preloads = [entry for entry in entries if entry.settings.preload and not entry.pinned]
    for load, those in ((daemon.pool.load, pinned), (daemon.pool.preload, preloads)):
        for entry in those:
            try:
                await load(entry.name)
            except OmlxError:
                pass  # the pool has told why, and `status` shows it


def _pool(manifest: Manifest, bus: EventBus, engine: Engine | None) -> EnginePool:
    settings, clock = manifest.daemon, asyncio.get_running_loop().time
    if engine is None:
        from omlxd.engine.thread import EngineThread  # brings numpy and psutil along: 30 ms

        engine = EngineThread(clock=clock)
    return EnginePool(
        manifest.models,
        engine=engine,
        clock=clock,
        emit=bus.emit,
        load_wait_s=settings.load_timeout_s,
        park_deadline_s=settings.park_deadline_s,
        fair_wait_s=settings.fair_wait_s,
        drain_timeout_s=settings.drain_timeout_s,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        max_batch=settings.max_batch,
        max_waiting=settings.max_waiting,
    )


def _enforcer(
    manifest: Manifest, pool: EnginePool, machine: Machine, saved: SavedState, flags: Flags
) -> ProcessMemoryEnforcer:
    """With the limit of the command line, else the one set at run time, else the manifest's."""
    settings = manifest.daemon
    hard = flags.hard_limit if flags.hard_limit is not None else settings.hard_limit

    def with_limit(max_memory: str | int) -> ProcessMemoryEnforcer:
        return ProcessMemoryEnforcer(
            pool,
            max_memory_bytes(max_memory, machine),
            settings.poll_interval_s,
            settings.prefill_memory_guard,
            hard_limit=None if hard is None else parse_size(hard, ram_bytes=machine.ram_bytes),
            min_available=min_available_bytes(settings.min_available, machine, sys.platform),
            policy=settings.policy,
            clock=pool.clock,
        )

    if flags.max_memory is not None:
        return with_limit(flags.max_memory)
    if (run_time := saved.max_memory(str(settings.max_memory))) is not None:
        try:
            return with_limit(run_time)
        except InvalidRequest as error:  # the manifest's `hard_limit` has come down since
            fields = {"message": f"the saved limit `{run_time}` no longer holds: {error.message}"}
            pool.emit(Event(EventName.LIMIT_WARNING, EventLevel.WARNING, fields=fields))
    try:
        return with_limit(settings.max_memory)
    except InvalidRequest as error:
        if flags.hard_limit is not None:
            raise
        raise ManifestInvalid(
            f"the limits in `{manifest.path}` contradict each other or this machine",
            problems=[f"daemon.hard_limit: {error.message}"],
            hint=error.hint,
        ) from None


def _restore(daemon: Daemon, saved: SavedState) -> None:
    for name, entry in daemon.pool.entries.items():
        entry.pinned = saved.pinned(name, entry.settings.pin)
        if (known := saved.learned.get(name)) is not None:
            # Holds only for the files it was measured on: a load compares the fingerprint.
            entry.weights_bytes, entry.measured, entry.fingerprint = known.weights_bytes, True, known.fingerprint
            entry.learned = known.costs


async def _check_pins(daemon: Daemon) -> None:
    """A pin of the manifest that can never be kept is the manifest's mistake; one set at run time only a warning."""
    soft_bytes = daemon.enforcer.limits.soft_bytes
    if soft_bytes <= 0:
        return
    problems = []
    for name, entry in daemon.pool.entries.items():
        if not entry.pinned or await weights_of(daemon, entry) <= soft_bytes:
            continue
        weights = format_bytes(entry.weights_bytes or 0)
        what = f"pinned, and its weights ({weights}) are over the soft limit {format_bytes(soft_bytes)}"
        if entry.settings.pin:
            problems.append(f"models.{name}.pin: {what}")
        else:
            fields = {"message": f"`{name}` is {what}"}
            daemon.bus.emit(Event(EventName.LIMIT_WARNING, EventLevel.WARNING, model=name, fields=fields))
    if problems:
        raise ManifestInvalid(
            f"the manifest `{daemon.manifest.path}` pins more than the limit holds",
            problems=problems,
            hint="raise `daemon.max_memory` or remove `pin`",
        )


def _learn(daemon: Daemon) -> None:
    """Keep each size that a load has measured, and what prompts were measured to take."""

    def remember(event: Event) -> None:
        if event.event not in (EventName.LOAD_FINISHED, EventName.COSTS_LEARNED) or event.model is None:
            return
        entry = daemon.pool.entries[event.model]
        if entry.fingerprint is None or entry.weights_bytes is None:
            return
        learned = LearnedSizes(entry.fingerprint, entry.weights_bytes, entry.learned)
        if daemon.state_file.state.learned.get(entry.name) != learned:
            daemon.in_background(daemon.state_file.change(lambda state: state.with_learned(entry.name, learned)))

    daemon.bus.add_sink(remember)
