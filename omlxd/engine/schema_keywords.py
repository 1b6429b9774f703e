"""Words in a JSON Schema that mean nothing: one that is mistyped would be passed over, and the answer held to less."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omlxd.core.wording import nearest, shown


def _set_of(words: str) -> frozenset[str]:
    return frozenset(words.split())


_ONE = _set_of(
    "items additionalItems additionalProperties unevaluatedItems unevaluatedProperties propertyNames contains"
    " not if then else contentSchema"
)
_SEVERAL = _set_of("items allOf anyOf oneOf prefixItems")
_NAMED = _set_of("properties patternProperties $defs definitions dependentSchemas dependencies")
"""What holds a schema, a list of them, or some by names that the client chose."""
_RULES = _set_of(
    "$ref type enum const required minProperties maxProperties minItems maxItems uniqueItems minContains maxContains"
    " minLength maxLength pattern format minimum maximum exclusiveMinimum exclusiveMaximum multipleOf"
    " dependentRequired"
)
_NOTES = _set_of(
    "$schema $id id $anchor $comment $vocabulary $dynamicRef $dynamicAnchor $recursiveRef $recursiveAnchor title"
    " description default examples example deprecated readOnly writeOnly contentEncoding contentMediaType nullable"
    " discriminator xml externalDocs"
)
_KNOWN = _ONE | _SEVERAL | _NAMED | _RULES | _NOTES
"""All that JSON Schema and OpenAPI know; what of it is not supported llguidance refuses itself."""
_Placed = tuple[str, Any]


def unknown_keyword(schema: Any) -> str | None:
    """The first word of the schema that no keyword is, with where it stands and what may have been meant.

    A word that begins with `x-` is the client's own.
    """
    holders = {reference[2:].split("/")[0] for reference in _references(schema)}  # `#/components/schemas/pet`
    open_ends: list[_Placed] = [("", schema)]
    while open_ends:
        place, each = open_ends.pop()
        if not isinstance(each, Mapping):
            continue
        for word in each:
            if word in _KNOWN or word.startswith("x-"):
                continue
            if not place and word in holders:
                open_ends += _held_deeper(word, each[word])
                continue
            near = nearest(word, _KNOWN)
            said = f"`{shown(word)}`{f' in `{shown(place)}`' if place else ''} is no keyword of JSON Schema"
            return said + (f"; did you mean `{near}`?" if near else "")
        open_ends += reversed(list(_within(place, each)))
    return None


def _within(place: str, schema: Mapping[str, Any]) -> Iterator[_Placed]:
    """The schemas right inside this one."""
    for word, value in schema.items():
        path = f"{place}.{word}" if place else word
        if word in _NAMED and isinstance(value, Mapping):
            yield from ((f"{path}.{name}", each) for name, each in value.items())
        elif word in _SEVERAL and isinstance(value, list):
            yield from ((f"{path}.{number}", each) for number, each in enumerate(value))
        elif word in _ONE:
            yield path, value


def _held_deeper(place: str, holder: Any) -> Iterator[_Placed]:
    """The schemas in a place of the client's own, by names: `components`, then `schemas`, then they."""
    for name, each in holder.items() if isinstance(holder, Mapping) else ():
        if isinstance(each, Mapping) and not _KNOWN.isdisjoint(each):
            yield f"{place}.{name}", each
        else:
            yield from _held_deeper(f"{place}.{name}", each)


def _references(schema: Any) -> Iterator[str]:
    open_ends = [schema]
    while open_ends:
        each = open_ends.pop()
        if isinstance(each, Mapping):
            if isinstance(found := each.get("$ref"), str) and found.startswith("#/"):
                yield found
            open_ends += each.values()
        elif isinstance(each, list):
            open_ends += each
