"""From a manifest and the saved state to the daemon's parts, and the models that are loaded first."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from omlxd.core.errors import InvalidRequest, ManifestInvalid, OmlxError
from omlxd.core.events import Emit, Event, EventLevel, EventName
from omlxd.core.limits import Machine
from omlxd.core.manifest import Manifest, max_memory_bytes, min_available_bytes, prefix_cache_bytes
from omlxd.core.saved_state import LearnedSizes, SavedState
from omlxd.core.states import LimitOrigin
from omlxd.core.units import format_bytes, parse_limit
from omlxd.core.wording import dotted
from omlxd.daemon.app import Daemon, StopOrder
from omlxd.daemon.bus import EventBus
from omlxd.daemon.enforcer import EnforcerSettings, ProcessMemoryEnforcer
from omlxd.daemon.entry import EnginePoolEntry
from omlxd.daemon.flags import Flags
from omlxd.daemon.home import Home
from omlxd.daemon.machine import find_machine
from omlxd.daemon.manifest_source import placed
from omlxd.daemon.memory_history import MemoryHistory
from omlxd.daemon.monitor import MemoryMonitor
from omlxd.daemon.pool import EnginePool
from omlxd.daemon.restoring import keep_what_is_loaded, wanted_first
from omlxd.daemon.sizes import know_sizes, weights_of
from omlxd.daemon.state_file import StateFile
from omlxd.engine.protocol import Engine


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
    settings = enforcer_settings(manifest, machine, saved, flags, bus.emit)
    enforcer = ProcessMemoryEnforcer(pool, **_arguments(settings), clock=pool.clock)
    daemon = Daemon(
        manifest=manifest,
        machine=machine,
        bus=bus,
        pool=pool,
        enforcer=enforcer,
        monitor=MemoryMonitor(pool, enforcer),
        state_file=state_file,
        stop=stop,
        flags=flags,
        history=MemoryHistory(lambda: pool.engine.read().pressure_bytes(pool.limits.policy)),
    )
    bus.add_sink(daemon.tallies.count)
    for entry in pool.entries.values():
        recall(entry, saved)
    await _check_pins(daemon)
    _learn(daemon)
    keep_what_is_loaded(daemon)
    return daemon


async def load_first(daemon: Daemon) -> None:
    """Load the pinned models, then the preloads, then what was loaded before, as the policy of restoring says."""
    wanted = wanted_first(daemon)  # before the first load, which writes down anew what is loaded
    await know_sizes(daemon)
    await load_these(daemon, wanted)


async def load_these(daemon: Daemon, entries: Iterable[EnginePoolEntry]) -> None:
    """Load these models, the pinned ones first, one after the other; what does not fit stays unloaded."""
    for entry in sorted(entries, key=lambda entry: not entry.pinned):
        load = daemon.pool.load if entry.pinned else daemon.pool.preload
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


def enforcer_settings(
    manifest: Manifest, machine: Machine, saved: SavedState, flags: Flags, emit: Emit
) -> EnforcerSettings:
    """With the limit of the command line, else the one set at run time, else the manifest's.

    Raises:
        ManifestInvalid: the manifest's `hard_limit` contradicts its `max_memory` or this machine.
        InvalidRequest: the command line's limits do not make sense.
    """
    settings = manifest.daemon
    hard = flags.hard_limit if flags.hard_limit is not None else settings.hard_limit

    def with_limit(max_memory: str | int, origin: LimitOrigin) -> EnforcerSettings:
        made = EnforcerSettings(
            max_memory_bytes(max_memory, machine),
            settings.poll_interval_s,
            settings.prefill_memory_guard,
            None if hard is None else parse_limit(hard, ram_bytes=machine.ram_bytes),
            min_available_bytes(settings.min_available, machine, sys.platform),
            settings.policy,
            origin,
        )
        made.limits(machine)
        return made

    if flags.max_memory is not None:
        return with_limit(flags.max_memory, LimitOrigin.COMMAND_LINE)
    if saved.limit is not None and (run_time := saved.max_memory(str(settings.max_memory))) is not None:
        try:
            return with_limit(run_time, saved.limit.origin)
        except InvalidRequest as error:  # the manifest's `hard_limit` has come down since
            told = {"message": f"the saved limit `{run_time}` no longer holds: {error.message}"}
            emit(Event(EventName.LIMIT_WARNING, EventLevel.WARNING, fields=told))
    try:
        return with_limit(settings.max_memory, LimitOrigin.MANIFEST)
    except InvalidRequest as error:
        if flags.hard_limit is not None:
            raise
        raise ManifestInvalid(
            f"the limits in `{manifest.path}` contradict each other or this machine",
            problems=placed([f"daemon.hard_limit: {error.message}"], manifest.path),
            hint=error.hint,
        ) from None


def recall(entry: EnginePoolEntry, saved: SavedState) -> None:
    """What outlived the last daemon: whether it is pinned, and what was learned of it."""
    entry.pinned = saved.pinned(entry.name, entry.settings.pin)
    if (known := saved.learned.get(entry.name)) is not None:
        # Holds only for the files it was measured on: a load compares the fingerprint.
        entry.weights_bytes, entry.measured, entry.fingerprint = known.weights_bytes, True, known.fingerprint
        entry.learned = known.costs


async def pin_problems(daemon: Daemon, pinned: Iterable[EnginePoolEntry], soft_bytes: int) -> list[str]:
    """Pins that can never be kept, since the model alone is over the limit."""
    return [
        pin_problem(entry.name, entry.weights_bytes or 0, soft_bytes)
        for entry in pinned
        if 0 < soft_bytes < await weights_of(daemon, entry)
    ]


def pin_problem(name: str, weights_bytes: int, soft_bytes: int) -> str:
    """`models.a.pin: pinned, and ...`."""
    weights = format_bytes(weights_bytes)
    what = f"pinned, and its weights ({weights}) are over the soft limit {format_bytes(soft_bytes)}"
    return f"{dotted(('models', name, 'pin'))}: {what}"


def pins_too_large(manifest: Manifest, problems: list[str]) -> ManifestInvalid:
    """The manifest pins what cannot be kept."""
    return ManifestInvalid(
        f"the manifest `{manifest.path}` pins more than the limit holds",
        problems=problems,
        hint="raise `daemon.max_memory` or remove `pin`",
    )


async def _check_pins(daemon: Daemon) -> None:
    """A pin of the manifest that can never be kept is the manifest's mistake; one set at run time only a warning."""
    soft_bytes, pinned = daemon.enforcer.limits.soft_bytes, [e for e in daemon.pool.entries.values() if e.pinned]
    if problems := await pin_problems(daemon, [entry for entry in pinned if entry.settings.pin], soft_bytes):
        raise pins_too_large(daemon.manifest, placed(problems, daemon.manifest.path))
    for entry in pinned:
        for problem in await pin_problems(daemon, [entry], soft_bytes):
            told = {"message": f"`{entry.name}` is {problem.partition(': ')[2]}"}
            daemon.bus.emit(Event(EventName.LIMIT_WARNING, EventLevel.WARNING, model=entry.name, fields=told))


def _arguments(settings: EnforcerSettings) -> dict[str, Any]:
    return {field.name: getattr(settings, field.name) for field in fields(settings)}


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
