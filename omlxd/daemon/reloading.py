"""`omlxd reload` and SIGHUP: the manifest is read again, checked as a whole, and only what differs is touched.

A manifest that cannot be used changes nothing. Reloads come one after the other; each reads what the file holds then.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from omlxd.core.errors import DoesNotFit, ManifestInvalid, OmlxError, StartFailed
from omlxd.core.events import Event, EventLevel, EventName
from omlxd.core.manifest import Manifest, ModelSettings, prefix_cache_bytes
from omlxd.core.manifest_diff import Change, Effect, ManifestDiff, diff_manifests, in_force, same_source
from omlxd.core.saved_state import SavedState
from omlxd.core.states import DaemonState
from omlxd.daemon.api_key import api_key_of
from omlxd.daemon.app import Daemon
from omlxd.daemon.enforcer import EnforcerSettings
from omlxd.daemon.entry import EnginePoolEntry
from omlxd.daemon.front_door import FrontDoor, TcpRules
from omlxd.daemon.limit_change import LimitChange, put_in_force
from omlxd.daemon.log import EventLog
from omlxd.daemon.manifest_file import read_manifest
from omlxd.daemon.manifest_source import placed
from omlxd.daemon.pinning import require_room_for
from omlxd.daemon.quiet_file import until_quiet
from omlxd.daemon.refusals import shutting_down
from omlxd.daemon.sizes import know_sizes
from omlxd.daemon.starting import enforcer_settings, load_these, pin_problems, recall
from omlxd.daemon.succession import Succession
from omlxd.daemon.watchers import Watchers

_EMPTIED_HINT: Final = "correct the file, then `omlxd reload`; if this is meant, `omlxd reload --force`"


@dataclass(frozen=True, slots=True)
class Parts:
    """What a reload changes beside the pool and the enforcer."""

    front_door: FrontDoor
    watchers: Watchers
    log: EventLog


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What a reload led to.

    Attributes:
        diff: what differed, and when each difference takes effect.
        limit: what another limit led to.
        pending: models that go, or are loaded again, once their requests have ended.
        warnings: what the user should know.
    """

    diff: ManifestDiff
    limit: LimitChange = field(default_factory=LimitChange)
    pending: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The answer of the route, and the event."""
        return {
            "changes": [change.to_json() for change in self.diff.changes],
            "added": list(self.diff.added),
            "removed": list(self.diff.removed),
            "restart": list(self.diff.restart_keys),
            **self.limit.effects(),
            "pending": list(self.pending),
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True, slots=True)
class _Checked:
    """What is put in force, worked out before anything is changed."""

    manifest: Manifest
    diff: ManifestDiff
    saved: SavedState
    enforcer: EnforcerSettings
    rules: TcpRules | None
    unreadable: dict[str, str]


class Reloader:
    """Reloads one daemon's manifest.

    Args:
        daemon: whose manifest it is.
        path: the file.
        parts: what else has settings.
    """

    def __init__(self, daemon: Daemon, path: Path, parts: Parts) -> None:
        self._daemon, self._path, self._parts = daemon, path, parts
        self._one_at_a_time = asyncio.Lock()
        self._signalled = False
        self._reloads: set[asyncio.Task[Reloaded]] = set()
        self._loads: set[asyncio.Task[None]] = set()
        self._succession = Succession(daemon.pool, lambda: daemon.manifest.daemon.drain_timeout_s)

    def on_signal(self) -> None:
        """SIGHUP: reload; what comes before the file is read is the same reload."""
        if not self._signalled:
            self._signalled = True
            self._daemon.in_background(self.reload())

    async def reload(self, *, force: bool = False) -> Reloaded:
        """Read, check, apply; what has to wait for requests goes on by itself (`settled`).

        Cancelling the call does not stop it half-way.

        Args:
            force: take a manifest without models also when there are some now; it may have been cut short.

        Raises:
            ManifestInvalid: it has problems, all of them listed, or no models; nothing was changed.
            DoesNotFit: its pinned models would be larger than its limit; nothing was changed.
            NotPermitted: it may not be read.
            ShuttingDown: the daemon is about to end.
        """
        task = asyncio.create_task(self._in_turn(force), name="omlxd-reload")
        self._reloads.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    async def settled(self) -> None:
        """Return when removed models are gone, changed ones loaded again, and new pins and preloads were tried."""
        while self._loads:
            await asyncio.wait(tuple(self._loads))
        await self._succession.settled()

    async def stop(self) -> None:
        """End what still goes on."""
        tasks = (*self._reloads, *self._loads)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._succession.stop()

    def _ended(self, task: asyncio.Task[Reloaded]) -> None:
        self._reloads.discard(task)
        if not task.cancelled():
            task.exception()  # it was told as an event; perhaps nobody else asks

    async def _in_turn(self, force: bool) -> Reloaded:
        async with self._one_at_a_time:
            try:
                return await self._reload(force)
            except OmlxError as error:
                if isinstance(error, ManifestInvalid | DoesNotFit) and error.hint != _EMPTIED_HINT:
                    first = "correct the file" if self._path.exists() else "put it back"
                    error.hint = f"{first}, then `omlxd reload`; until then what was in force goes on"
                fields = {"manifest": str(self._path), "error": error.to_json()}
                self._daemon.bus.emit(Event(EventName.MANIFEST_REJECTED, EventLevel.ERROR, fields=fields))
                raise

    async def _reload(self, force: bool) -> Reloaded:
        self._require_going_on()
        await until_quiet(self._path)
        self._signalled = False  # a signal from here on is about a file that may be newer
        asked = self._daemon.flags.over(await asyncio.to_thread(read_manifest, self._path))
        if not force:
            self._require_models(asked)
        checked = await self._checked(asked)
        self._require_going_on()
        done = await self._apply(checked)
        fields = {"manifest": str(self._path), **done.to_json()}
        self._daemon.bus.emit(Event(EventName.MANIFEST_RELOADED, fields=fields))
        return done

    def _require_models(self, asked: Manifest) -> None:
        """A file that was emptied or cut short is a manifest too, but hardly meant as one."""
        if (before := len(self._daemon.manifest.models)) and not asked.models:
            gone = "the model that is in force" if before == 1 else f"all {before} models that are in force"
            raise ManifestInvalid(
                f"the manifest has no models; {gone} would be removed",
                problems=[f"models: none in `{self._path}`"],
                hint=_EMPTIED_HINT,
            )

    def _require_going_on(self) -> None:
        if self._daemon.state is DaemonState.DRAINING:
            raise shutting_down()

    async def _checked(self, asked: Manifest) -> _Checked:
        """All that can be wrong with it on this machine; nothing is changed yet."""
        daemon = self._daemon
        manifest = in_force(daemon.manifest, asked)
        saved = daemon.state_file.state.without_outdated(manifest)
        enforcer = enforcer_settings(manifest, daemon.machine, saved, daemon.flags, daemon.bus.emit)
        soft_bytes = enforcer.limits(daemon.machine).soft_bytes
        entries = [self._as_asked(manifest, name) for name in manifest.models]
        pinned = [entry for entry in entries if saved.pinned(entry.name, entry.settings.pin)]
        rules, problems = self._rules(manifest)
        problems += await pin_problems(daemon, [entry for entry in pinned if entry.settings.pin], soft_bytes)
        if problems:
            raise ManifestInvalid(
                f"the manifest `{self._path}` cannot be used on this machine",
                problems=placed(problems, self._path),
            )
        before = {entry.name for entry in daemon.pool.entries.values() if entry.pinned and not entry.removed}
        before_bytes = daemon.enforcer.limits.soft_bytes
        if {entry.name for entry in pinned} - before or 0 < soft_bytes < (before_bytes or soft_bytes + 1):
            await require_room_for(daemon, pinned, soft_bytes, "this manifest")
        diff = self._with_key_file(diff_manifests(daemon.manifest, asked), rules)
        unreadable = await self._unreadable([manifest.models[name] for name in (*diff.added, *diff.reloaded)])
        return _Checked(manifest, diff, saved, enforcer, rules, unreadable)

    async def _unreadable(self, models: list[ModelSettings]) -> dict[str, str]:
        """What cannot be loaded, and why; a disk that is away is no mistake of the manifest."""
        found = {}
        for model in models:
            try:
                await asyncio.to_thread(self._daemon.pool.read_folder, model)
            except OmlxError as error:
                found[model.name] = error.message
        return found

    def _as_asked(self, manifest: Manifest, name: str) -> EnginePoolEntry:
        """The model as it would be; its size is known when it is the same model."""
        pool, settings = self._daemon.pool, manifest.models[name]
        entry, known = EnginePoolEntry(name, settings, pool.clock), pool.entries.get(name)
        if known is not None and same_source(known.settings, settings):
            entry.weights_bytes = known.weights_bytes
        return entry

    def _rules(self, manifest: Manifest) -> tuple[TcpRules | None, list[str]]:
        address = manifest.api.address
        if address is None:
            return None, []
        try:
            return TcpRules(address, api_key_of(manifest.api), frozenset(manifest.api.allow_origins)), []
        except StartFailed as error:
            return None, [f"api.api_key_file: {error.message}; {error.hint}"]

    def _with_key_file(self, diff: ManifestDiff, rules: TcpRules | None) -> ManifestDiff:
        """The file of the key can hold another one while the manifest is as it was."""
        before = self._parts.front_door.rules
        if rules is None or before is None or rules.api_key == before.api_key:
            return diff
        if diff.touches("api.api_key") or diff.touches("api.api_key_file"):
            return diff
        change = Change("api.api_key_file", "the key it held", "another key", Effect.NOW)
        return replace(diff, changes=(*diff.changes, change))

    async def _apply(self, checked: _Checked) -> Reloaded:
        """From here on nothing fails; models first, so that another limit finds those that are there now."""
        daemon, pool, manifest = self._daemon, self._daemon.pool, checked.manifest
        preloaded = {name for name, model in daemon.manifest.models.items() if model.preload}
        daemon.manifest = manifest
        settings = manifest.daemon
        log_changed = EventLevel(settings.log_level), settings.log_max_size_bytes, settings.log_backups
        self._parts.log.configure(*log_changed)
        self._parts.front_door.rules = checked.rules
        for entry in pool.roster.replace(manifest.models):
            recall(entry, checked.saved)
        wanted = self._pin(checked) + [
            entry
            for entry in (pool.entries[name] for name in manifest.models)
            if entry.settings.preload and entry.name not in preloaded and not entry.pinned
        ]
        pool.prefix.wish_bytes = prefix_cache_bytes(settings.prefix_cache, daemon.machine)
        pool.configure(settings)
        self._parts.watchers.configure(settings)
        self._succession.begin()
        pending = tuple(name for name in self._succession.pending if name not in checked.unreadable)
        change = await put_in_force(daemon, lambda: daemon.enforcer.configure(checked.enforcer))
        unsaved = await daemon.state_file.change(lambda state: state.without_outdated(manifest))
        self._load(wanted)
        return Reloaded(checked.diff, change, pending, (*self._warnings(checked, change), *unsaved))

    def _pin(self, checked: _Checked) -> list[EnginePoolEntry]:
        """Pin and unpin what the manifest says otherwise than before; returns the newly pinned ones."""
        pool, newly = self._daemon.pool, []
        for name, model in checked.manifest.models.items():
            entry, pinned = pool.entries[name], checked.saved.pinned(name, model.pin)
            if name in checked.diff.added:
                entry.pinned = pinned
            elif entry.pinned is not pinned:
                (pool.pin if pinned else pool.unpin)(name)
            else:
                continue
            if pinned:
                newly.append(entry)
        return newly

    def _load(self, entries: list[EnginePoolEntry]) -> None:
        """Load what the manifest wants loaded from now on, as at the start; nobody has to wait for it."""

        async def as_at_the_start() -> None:
            await know_sizes(self._daemon)
            await load_these(self._daemon, entries)

        task = asyncio.create_task(as_at_the_start())
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)

    def _warnings(self, checked: _Checked, change: LimitChange) -> tuple[str, ...]:
        flags, overridden = self._daemon.flags, []
        for key, value in (("max_memory", flags.max_memory), ("hard_limit", flags.hard_limit)):
            if value is not None and checked.diff.touches(f"daemon.{key}"):
                option = key.replace("_", "-")
                overridden.append(f"`daemon.{key}` waits: `--{option} {value}` of the start comes before it")
        unreadable = [f"`{name}` cannot be loaded: {why}" for name, why in checked.unreadable.items()]
        return (*unreadable, *overridden, *change.warnings)
