"""The text of `state.toml`, and what can be read of one that is damaged: each value on its own."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

import tomli_w

from omlxd.core.errors import InvalidRequest
from omlxd.core.learned_costs import LearnedCosts
from omlxd.core.manifest import AUTO
from omlxd.core.saved_state import LearnedSizes, SavedLimit, SavedPin, SavedState
from omlxd.core.units import parse_limit

SCHEMA = 1
_T = TypeVar("_T")
_KINDS: Mapping[str, type] = {"int": int, "float": float}


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
