"""The models of one pool by name and alias, in the manifest's order; another manifest may replace them at any time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from omlxd.core.manifest import ModelSettings
from omlxd.core.manifest_diff import SOURCE_FIELDS, same_source
from omlxd.daemon.entry import EnginePoolEntry
from omlxd.daemon.refusals import unknown

ModelSource = ModelSettings | str | Path


class Roster:
    """Which models there are.

    A model that is removed cannot be asked for any more; its entry stays until its memory is back (`forget`).

    Args:
        models: by name: a model folder, or its settings.
        clock: monotonic seconds.
    """

    def __init__(self, models: Mapping[str, ModelSource], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._aliases: dict[str, str] = {}
        self.entries: dict[str, EnginePoolEntry] = {}
        self._take({name: self._entry(name, _settings(name, source)) for name, source in models.items()})

    @property
    def loaded_names(self) -> frozenset[str]:
        """The models whose weights are in memory now."""
        return frozenset(name for name, entry in self.entries.items() if entry.loaded)

    def resolve(self, name_or_alias: str) -> EnginePoolEntry:
        """The entry of this name or alias; raises UnknownModel with the nearest name as the hint."""
        name = self._aliases.get(name_or_alias, name_or_alias)
        entry = self.entries.get(name)
        if entry is not None and not entry.removed:
            return entry
        names = [name for name, entry in self.entries.items() if not entry.removed]
        raise unknown(name_or_alias, (*names, *self._aliases))

    def replace(self, models: Mapping[str, ModelSettings]) -> list[EnginePoolEntry]:
        """Take another manifest's models; returns the entries that are new.

        What a loaded model cannot change (its folder, its context) waits in its `heir`. Whoever iterates over `entries`
        meanwhile goes on with the old ones.
        """
        kept: dict[str, EnginePoolEntry] = {}
        new = []
        for name, settings in models.items():
            entry = self.entries.get(name)
            if entry is None:
                entry = self._entry(name, settings)
                new.append(entry)
            else:
                _hand_over(entry, settings)
            kept[name] = entry
        for name, entry in self.entries.items():
            if name not in kept:
                entry.removed, entry.heir, entry.pinned = True, None, False
                kept[name] = entry
        self._take(kept)
        return new

    def forget(self, entry: EnginePoolEntry) -> None:
        """A removed model's memory is back, and nobody uses its entry any more."""
        self._take({name: each for name, each in self.entries.items() if each is not entry})

    def _take(self, entries: dict[str, EnginePoolEntry]) -> None:
        self.entries = entries
        here = {name: entry for name, entry in entries.items() if not entry.removed}
        self._aliases = {alias: name for name, entry in here.items() for alias in entry.settings.aliases}

    def _entry(self, name: str, settings: ModelSettings) -> EnginePoolEntry:
        return EnginePoolEntry(name, settings, self._clock, pinned=settings.pin)


def _hand_over(entry: EnginePoolEntry, settings: ModelSettings) -> None:
    source = {name: getattr(entry.settings, name) for name in SOURCE_FIELDS}
    entry.heir = None if same_source(entry.settings, settings) else settings
    entry.settings, entry.removed = replace(settings, **source), False


def _settings(name: str, source: ModelSource) -> ModelSettings:
    if isinstance(source, ModelSettings):
        return source
    return ModelSettings(name=name, path=str(Path(source).expanduser().absolute()))
