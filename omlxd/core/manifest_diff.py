"""What differs between the manifest in force and a new one, and when each difference takes effect; data only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, Final

from omlxd.core.manifest import ApiSettings, DaemonSettings, Manifest, ModelSettings
from omlxd.core.units import format_bytes, format_duration
from omlxd.core.wording import dotted

HIDDEN: Final = "(hidden)"
RESTART_KEYS: Final = frozenset({"daemon.max_batch", "api.listen"})
"""Sockets are bound, and the ledger is made for so many rows, once in the life of a daemon."""
SOURCE_FIELDS: Final = ("path", "repo", "max_context")
"""What a loaded model cannot change: it is loaded again for them."""

_UNITS: Final[Mapping[str, Callable[[Any], str]]] = {"_s": format_duration, "_bytes": format_bytes, "_tokens": str}


class Effect(StrEnum):
    """When a difference takes effect: at once, when the model is loaded again, or with the daemon's next start."""

    NOW = "now"
    WHEN_IDLE = "when_idle"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class Change:
    """One difference.

    Attributes:
        key: as the manifest has it: `daemon.max_memory`, `models.chat.ttl`; `models.chat` for a whole model.
        before, after: the values in words; None where there is none, also for a model that is new or gone.
        effect: when it takes effect.
    """

    key: str
    before: str | None
    after: str | None
    effect: Effect

    def to_json(self) -> dict[str, Any]:
        """For the answer of `reload` and the log."""
        return {"key": self.key, "before": self.before, "after": self.after, "effect": self.effect.value}


@dataclass(frozen=True, slots=True)
class ManifestDiff:
    """All differences, in the order of the manifest's tables.

    Attributes:
        changes: one by one.
        added, removed: models that only one of the two manifests has.
        reloaded: models whose weights come from somewhere else, or with another context.
    """

    changes: tuple[Change, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    reloaded: tuple[str, ...] = ()

    @property
    def restart_keys(self) -> tuple[str, ...]:
        """The keys that wait for the daemon's next start."""
        return tuple(each.key for each in self.changes if each.effect is Effect.RESTART)

    def touches(self, key: str) -> bool:
        """Whether this key differs."""
        return any(each.key == key for each in self.changes)


def diff_manifests(running: Manifest, asked: Manifest) -> ManifestDiff:
    """From the manifest in force to the one that is asked for.

    The key of the API follows its address: while another address waits for a restart, the old one keeps its rules.
    """
    changes = [
        *_table_changes("daemon", running.daemon, asked.daemon),
        *_table_changes("api", running.api, asked.api, all_restart=running.api.listen != asked.api.listen),
    ]
    added = tuple(name for name in asked.models if name not in running.models)
    removed = tuple(name for name in running.models if name not in asked.models)
    reloaded = []
    for name, model in asked.models.items():
        key = dotted(("models", name))
        if (before := running.models.get(name)) is None:
            changes.append(Change(key, None, source_of(model), Effect.NOW))
            continue
        changes += _table_changes(key, before, model)
        if not same_source(before, model):
            reloaded.append(name)
    changes += [Change(dotted(("models", name)), source_of(running.models[name]), None, Effect.NOW) for name in removed]
    return ManifestDiff(tuple(changes), added, removed, tuple(reloaded))


def in_force(running: Manifest, asked: Manifest) -> Manifest:
    """What is in force once the difference was applied: `asked`, but for what waits for a restart."""
    api = running.api if running.api.listen != asked.api.listen else asked.api
    return replace(asked, daemon=replace(asked.daemon, max_batch=running.daemon.max_batch), api=api)


def same_source(one: ModelSettings, other: ModelSettings) -> bool:
    """Whether a model that was loaded with the one settings is what the others ask for."""
    return all(getattr(one, name) == getattr(other, name) for name in SOURCE_FIELDS)


def source_of(model: ModelSettings) -> str:
    """Where its weights come from."""
    return model.path or model.repo or ""


def key_of_field(field: str) -> str:
    """`ttl_s` is `ttl` in the manifest: there a value says its unit."""
    return next((field.removesuffix(unit) for unit in _UNITS if field.endswith(unit)), field)


def _table_changes(
    table: str,
    running: DaemonSettings | ApiSettings | ModelSettings,
    asked: DaemonSettings | ApiSettings | ModelSettings,
    *,
    all_restart: bool = False,
) -> Iterator[Change]:
    for field in fields(running):
        before, after = getattr(running, field.name), getattr(asked, field.name)
        if before == after:
            continue
        key = f"{table}.{key_of_field(field.name)}"
        effect = Effect.NOW
        if all_restart or key in RESTART_KEYS:
            effect = Effect.RESTART
        elif isinstance(running, ModelSettings) and field.name in SOURCE_FIELDS:
            effect = Effect.WHEN_IDLE
        yield Change(key, _in_words(field.name, before), _in_words(field.name, after), effect)


def _in_words(field: str, value: Any) -> str | None:
    if value is None:
        return None
    if field == "api_key":
        return HIDDEN
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(str(each) for each in value)}]"
    for unit, write in _UNITS.items():
        if field.endswith(unit):
            return write(value)
    return str(value)
