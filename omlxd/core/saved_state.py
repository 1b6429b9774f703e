"""What outlives the daemon: what the user set at run time, what was learned of models, and what was loaded.

A run-time value holds until the manifest's own value changes, so each is saved with the manifest's value of that
moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from omlxd.core.learned_costs import LearnedCosts
from omlxd.core.manifest import Manifest
from omlxd.core.states import LimitOrigin
from omlxd.core.wording import named


@dataclass(frozen=True, slots=True)
class SavedLimit:
    """`omlxd limit` said `max_memory` (as written) while the manifest said `manifest_max_memory`."""

    max_memory: str
    manifest_max_memory: str

    @property
    def origin(self) -> LimitOrigin:
        """Who says what the limit is; what the manifest says as well is its own."""
        return LimitOrigin.MANIFEST if self.max_memory == self.manifest_max_memory else LimitOrigin.LIMIT


@dataclass(frozen=True, slots=True)
class SavedPin:
    """`omlxd pin` or `unpin` while the manifest said `manifest_pinned`."""

    pinned: bool
    manifest_pinned: bool


@dataclass(frozen=True, slots=True)
class LearnedSizes:
    """What a model of these files took: its weights, and its requests where no formula says that."""

    fingerprint: str
    weights_bytes: int
    costs: LearnedCosts | None = None


@dataclass(frozen=True, slots=True)
class SavedState:
    """All that outlives the process.

    Attributes:
        limit, pins: what was set at run time.
        learned: by model, what it was measured to take.
        loaded: the models in memory, the one that was used last first.
        restart: the daemon ended for a successor that is to load them again.
        start: what the command line of the daemon that runs said and still holds; empty once it has ended in order.
    """

    limit: SavedLimit | None = None
    pins: Mapping[str, SavedPin] = field(default_factory=dict)
    learned: Mapping[str, LearnedSizes] = field(default_factory=dict)
    loaded: tuple[str, ...] = ()
    restart: bool = False
    start: Mapping[str, str] = field(default_factory=dict)

    def max_memory(self, manifest_max_memory: str) -> str | None:
        """The limit set at run time, while the manifest still says what it said then."""
        if self.limit is None or self.limit.manifest_max_memory != manifest_max_memory:
            return None
        return self.limit.max_memory

    def limit_origin(self, manifest_max_memory: str) -> str | None:
        """Where the limit comes from when it is not the manifest's: `set by ...; the manifest says ...`."""
        if self.max_memory(manifest_max_memory) in (None, manifest_max_memory):
            return None
        return f"set by `omlxd limit`; the manifest says `{manifest_max_memory}`"

    def pinned(self, model: str, manifest_pinned: bool) -> bool:
        """Whether the model is pinned, by the newer of the run-time and the manifest's word."""
        saved = self.pins.get(model)
        if saved is None or saved.manifest_pinned != manifest_pinned:
            return manifest_pinned
        return saved.pinned

    def without_outdated(self, manifest: Manifest) -> SavedState:
        """This state without what a newer word of the manifest has taken the place of, or has nothing to do with."""
        limit = self.limit if self.max_memory(str(manifest.daemon.max_memory)) is not None else None
        models = manifest.models
        pins = {
            name: pin for name, pin in self.pins.items() if name in models and models[name].pin is pin.manifest_pinned
        }
        return replace(self, limit=limit, pins=pins)

    def changed_pins(self, manifest: Manifest) -> dict[str, bool]:
        """The models that are pinned, or are not, other than the manifest says."""
        pinned = {model.name: self.pinned(model.name, model.pin) for model in manifest.models.values()}
        return {name: now for name, now in pinned.items() if now is not manifest.models[name].pin}

    def pins_origin(self, manifest: Manifest) -> str | None:
        """Where pins come from when they are not the manifest's: `... unpinned by ...; the manifest says otherwise`."""
        changed = self.changed_pins(manifest)
        said = [
            f"{named(names)} {done} by `omlxd {command}`"
            for command, done, pinned in (("unpin", "unpinned", False), ("pin", "pinned", True))
            if (names := [name for name, now in changed.items() if now is pinned])
        ]
        return f"{', '.join(said)}; the manifest says otherwise" if said else None

    def with_pin(self, model: str, pin: SavedPin) -> SavedState:
        """This state with one more word about a pin."""
        return replace(self, pins={**self.pins, model: pin})

    def with_learned(self, model: str, sizes: LearnedSizes) -> SavedState:
        """This state with measured sizes."""
        return replace(self, learned={**self.learned, model: sizes})
