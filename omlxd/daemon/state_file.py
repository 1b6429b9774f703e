"""`state.toml`: what the user set at run time and what omlxd learned; survives restarts, written atomically.

A run-time value holds until the manifest's own value changes, so each is saved with the manifest's value of that
moment. What is damaged of the file is left out and told, and the file is kept beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from omlxd.core.errors import InvalidRequest, StartFailed
from omlxd.core.events import Emit, Event, EventLevel, EventName
from omlxd.core.learned_costs import LearnedCosts
from omlxd.core.manifest import AUTO, Manifest
from omlxd.core.units import parse_limit
from omlxd.daemon.files import open_regular

SCHEMA = 1
_MOST_DAMAGED = 9  # copies that are kept; the next one takes the place of the newest
_T = TypeVar("_T")
_KINDS: Mapping[str, type] = {"int": int, "float": float}


@dataclass(frozen=True, slots=True)
class SavedLimit:
    """`omlxd limit` said `max_memory` (as written) while the manifest said `manifest_max_memory`."""

    max_memory: str
    manifest_max_memory: str


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
        """This state without what a newer word of the manifest has taken the place of."""
        limit = self.limit if self.max_memory(str(manifest.daemon.max_memory)) is not None else None
        models = manifest.models
        pins = {
            name: pin
            for name, pin in self.pins.items()
            if name not in models or models[name].pin is pin.manifest_pinned
        }
        return replace(self, limit=limit, pins=pins)

    def with_pin(self, model: str, pin: SavedPin) -> SavedState:
        """This state with one more word about a pin."""
        return replace(self, pins={**self.pins, model: pin})

    def with_learned(self, model: str, sizes: LearnedSizes) -> SavedState:
        """This state with measured sizes."""
        return replace(self, learned={**self.learned, model: sizes})


def read_state(path: Path) -> SavedState:
    """What is saved there; nothing when there is none, or one that is no text, which is the daemon's to move aside."""
    try:
        return parse_state(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return SavedState()


class StateFile:
    """Reads the state once and writes each change; a write that fails is a warning, never an error to the caller."""

    def __init__(self, path: Path, emit: Emit) -> None:
        self.path = path
        self.state = SavedState()
        self.warnings: tuple[str, ...] = ()  # what whoever starts the daemon should know
        self._emit = emit
        self._writing = asyncio.Lock()
        self._written: SavedState | None = None
        self._told: str | None = None  # why the last write failed
        self._tasks: set[asyncio.Task[tuple[str, ...]]] = set()

    def load(self) -> SavedState:
        """Read the file; what is damaged of it is left out and told, and the file is kept as `state.toml.damaged`."""
        self.state = SavedState()
        lost: tuple[str, ...] = ()
        try:
            with os.fdopen(open_regular(self.path, os.O_RDONLY), encoding="utf-8") as file:
                self.state, lost = salvage(file.read())
        except FileNotFoundError:
            pass
        except (OSError, StartFailed, ValueError) as error:  # UnicodeDecodeError is a ValueError
            lost = (str(error),)
        self._written = self.state
        if lost:
            self._set_aside("; ".join(lost))
        return self.state

    async def change(self, update: Callable[[SavedState], SavedState]) -> tuple[str, ...]:
        """Take a change over and write it; when this returns it is on the disk, or the answer is why it is not."""
        self.state = update(self.state)
        return await self.flush()

    async def flush(self) -> tuple[str, ...]:
        """Write what is not on the disk yet (a daemon that ends may have cut a change short), or say why it is not."""
        writing = asyncio.create_task(self._write())
        self._tasks.add(writing)
        writing.add_done_callback(self._tasks.discard)
        # A thread that writes cannot be cancelled, so nobody else may begin meanwhile.
        return await asyncio.shield(writing)

    async def try_writing(self) -> None:
        """Look whether the disk takes a state at all, and add to `warnings` when it does not."""
        async with self._writing:
            try:
                await asyncio.to_thread(_try_writing, self.path, render_state(self.state))
            except OSError as error:
                self.warnings = (*self.warnings, f"nothing can be saved: {self._tell(error)}")

    @property
    def limit_saved(self) -> bool:
        """Whether the next daemon will find the limit that was set at run time."""
        return self._written is not None and self.state.limit == self._written.limit

    async def unsaved(self) -> str | None:
        """What the user has set and one more try cannot write: `the limit and pins: No space left on device`."""
        if not await self.flush():
            return None
        pins_saved = self._written is not None and self.state.pins == self._written.pins
        words = [word for word, saved in (("the limit", self.limit_saved), ("pins", pins_saved)) if not saved]
        return f"{' and '.join(words)}: {self._told}" if words else None

    async def _write(self) -> tuple[str, ...]:
        async with self._writing:  # whoever comes second writes the newest state, in order
            if (state := self.state) == self._written:
                return ()
            try:
                await asyncio.to_thread(write_atomically, self.path, render_state(state))
                self._written, self._told = state, None
            except OSError as error:
                return (f"in force, but not saved: {self._tell(error)}",)
        return ()

    def _tell(self, error: OSError) -> str:
        """Why it was not written; an event only when that is news, and not for each load on a full disk."""
        reason = error.strerror or type(error).__name__
        if reason != self._told:
            self._told, fields = reason, {"path": str(self.path), "reason": reason}
            self._emit(Event(EventName.STATE_FILE_NOT_SAVED, level=EventLevel.WARNING, fields=fields))
        return reason

    def _set_aside(self, reason: str) -> None:
        """Keep the damaged file, write anew what could be read of it, and tell both."""
        kept = self.state != SavedState()
        fields = {"path": str(self.path), "reason": reason, "kept": kept}
        try:
            fields["moved_to"] = str(_moved(self.path, copy=kept))
        except OSError as error:
            fields["not_moved"] = error.strerror or type(error).__name__
        if kept:
            try:
                write_atomically(self.path, render_state(self.state))
            except OSError:
                self._written = None  # the damaged file stands as it was; the next change tries again
        self._emit(Event(EventName.STATE_FILE_DAMAGED, level=EventLevel.WARNING, fields=fields))
        where = f"it is kept as `{fields['moved_to']}`" if "moved_to" in fields else "it is where it was"
        self.warnings = (
            *self.warnings,
            f"`{self.path}` is damaged, {where}; {'the rest of it holds' if kept else 'nothing of it holds'}: {reason}",
        )


def salvage(text: str) -> tuple[SavedState, tuple[str, ...]]:
    """What can be read of what `render_state` wrote, each value on its own, and what is wrong with the rest."""
    document, lost = _document(text)
    if (schema := document.get("schema")) != SCHEMA and not lost:
        lost.append(f"`schema` is {schema!r}; this omlxd reads {SCHEMA}")

    def read(name: str, value: Any, parse: Callable[[Any], _T]) -> _T | None:
        try:
            return None if value is None else parse(value)
        except (KeyError, ValueError, InvalidRequest) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            lost.append(f"`{name}`: {why}")
            return None

    def read_each(name: str, parse: Callable[[Any], _T]) -> dict[str, _T]:
        table = read(name, document.get(name), _table) or {}
        found = {key: read(f"{name}.{key}", value, parse) for key, value in table.items()}
        return {key: value for key, value in found.items() if value is not None}

    state = SavedState(
        limit=read("limit", document.get("limit"), _limit),
        pins=read_each("pins", lambda pin: SavedPin(**_typed(pin, pinned=bool, manifest_pinned=bool))),
        learned=read_each("learned", _learned),
        loaded=read("loaded", document.get("loaded"), _names) or (),
        restart=document.get("restart") is True,
        start=read_each("start", _text),
    )
    return state, tuple(lost)


def parse_state(text: str) -> SavedState:
    """What can be read of what `render_state` wrote, of this or another schema."""
    return salvage(text)[0]


def render_state(state: SavedState) -> str:
    """The file's text."""
    document: dict[str, Any] = {"schema": SCHEMA}
    if state.limit is not None:
        limit = state.limit
        document["limit"] = {"max_memory": limit.max_memory, "manifest_max_memory": limit.manifest_max_memory}
    if state.restart:
        document["restart"] = True
    if state.loaded:
        document["loaded"] = list(state.loaded)
    if state.start:
        document["start"] = dict(state.start)
    if state.pins:
        document["pins"] = {
            name: {"pinned": pin.pinned, "manifest_pinned": pin.manifest_pinned} for name, pin in state.pins.items()
        }
    if state.learned:
        document["learned"] = {
            name: {"fingerprint": known.fingerprint, "weights_bytes": known.weights_bytes}
            | ({} if known.costs is None else {"costs": asdict(known.costs)})
            for name, known in state.learned.items()
        }
    return (
        "# Written by omlxd: what you set with `omlxd limit`, `pin` and `unpin`, what is loaded, and measured sizes.\n"
        + tomli_w.dumps(document)
    )


def write_atomically(path: Path, text: str) -> None:
    """Replace the file as a whole: after a crash it is the old or the new one, never half of either."""
    beside = _written_beside(path, text)
    try:
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(directory)  # the rename itself
    finally:
        os.close(directory)


def _written_beside(path: Path, text: str) -> Path:
    """The new file, whole and on the disk; nothing of it is left when that fails."""
    beside = path.with_name(path.name + ".new")
    beside.unlink(missing_ok=True)  # whatever it is: a pipe would be waited for
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        beside.unlink(missing_ok=True)  # on a full disk every byte counts
        raise
    return beside


def _try_writing(path: Path, text: str) -> None:
    _written_beside(path, text).unlink()


def _document(text: str) -> tuple[dict[str, Any], list[str]]:
    """The TOML document, and why not all of it: where one table is no TOML, the others are read without it."""
    try:
        return tomllib.loads(text), []
    except tomllib.TOMLDecodeError as error:
        document, lost = dict[str, Any](), [str(error)]
    for table in re.split(r"^(?=\[)", text, flags=re.MULTILINE):
        try:
            found = tomllib.loads(table)
        except tomllib.TOMLDecodeError:
            continue
        _merge(document, found)
    return document, lost


def _merge(document: dict[str, Any], found: Mapping[str, Any]) -> None:
    for key, value in found.items():
        if isinstance(value, dict) and isinstance(document.get(key), dict):
            _merge(document[key], value)
        else:
            document[key] = value


def _moved(path: Path, *, copy: bool) -> Path:
    """Give the file another name that is free, so that an older damaged one stays; `copy` keeps this name too."""
    names = [f"{path.name}.damaged", *(f"{path.name}.damaged-{number}" for number in range(2, _MOST_DAMAGED + 1))]
    for aside in map(path.with_name, names):
        if copy and aside.exists() and aside.samefile(path):
            return aside  # from an earlier start, which could not write it anew
        if not os.path.lexists(aside):
            break
    if copy:
        with contextlib.suppress(OSError):  # a file system without hard links
            aside.unlink(missing_ok=True)
            os.link(path, aside)
            return aside
    return path.replace(aside)


def _costs(sizes: Mapping[str, Any]) -> LearnedCosts | None:
    """What was measured; None when nothing was, or an older omlxd wrote other figures: they are measured again."""
    kinds = {each.name: _KINDS[str(each.type)] for each in fields(LearnedCosts)}
    costs = sizes.get("costs", {})
    known = isinstance(costs, dict) and kinds.keys() == costs.keys()
    return LearnedCosts(**_typed(costs, **kinds)) if known else None


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError("is no list of names")
    return tuple(value)


def _table(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("is no table")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("is no text")
    return value


def _limit(value: Any) -> SavedLimit:
    limit = SavedLimit(**_typed(value, max_memory=str, manifest_max_memory=str))
    if limit.max_memory.strip().lower() != AUTO:
        parse_limit(limit.max_memory, ram_bytes=2**40)  # what a percentage comes to does not matter here
    return limit


def _learned(value: Any) -> LearnedSizes:
    return LearnedSizes(**_typed(value, fingerprint=str, weights_bytes=int), costs=_costs(value))


def _typed(table: Mapping[str, Any], **kinds: type) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise ValueError("a value stands where a table should be")
    for key, kind in kinds.items():
        if type(table[key]) is not kind:
            raise ValueError(f"`{key}` is no {kind.__name__}")
    return {key: table[key] for key in kinds}
