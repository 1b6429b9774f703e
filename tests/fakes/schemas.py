"""Values that follow a JSON schema, for the part of JSON Schema that our OpenAPI document uses."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Strategy = st.SearchStrategy[Any]
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


def following(schema: Any, definitions: dict[str, Any]) -> Strategy:
    """Values of this schema; `definitions` are those of `#/components/schemas/`."""
    if reference := schema.get("$ref"):
        return st.deferred(lambda: following(definitions[reference.rpartition("/")[2]], definitions))
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return st.one_of([following(each, definitions) for each in schema[key]])
    match schema.get("type"):
        case "object":
            return _objects(schema, definitions)
        case "array":
            most = min(schema.get("maxItems", 3), 3)
            items = following(schema.get("items", {}), definitions)
            return st.lists(items, min_size=schema.get("minItems", 0), max_size=most)
        case "string":
            if pattern := schema.get("pattern"):
                return st.from_regex(pattern, fullmatch=True)
            return st.text(min_size=schema.get("minLength", 0), max_size=min(schema.get("maxLength", 12), 12))
        case "integer":
            return st.integers(schema.get("minimum", -(2**63)), schema.get("maximum", 2**63))
        case "number":
            return st.floats(
                schema.get("minimum", schema.get("exclusiveMinimum", -1e9)),
                schema.get("maximum", 1e9),
                allow_nan=False,
                exclude_min="exclusiveMinimum" in schema,
            )
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case None:
            return anything
        case other:
            raise AssertionError(f"no strategy for the type {other}")


def _objects(schema: Any, definitions: dict[str, Any]) -> Strategy:
    properties = {name: following(each, definitions) for name, each in schema.get("properties", {}).items()}
    required = set(schema.get("required", ()))
    if properties:
        optional = {name: each for name, each in properties.items() if name not in required}
        return st.fixed_dictionaries({name: properties[name] for name in required}, optional=optional)
    more = schema.get("additionalProperties", True)
    keys = following(schema.get("propertyNames", {"type": "string"}), definitions)
    patterns = schema.get("patternProperties")
    if patterns:
        ((pattern, values),) = patterns.items()
        return st.dictionaries(st.from_regex(pattern, fullmatch=True), following(values, definitions), max_size=3)
    if more is False:
        return st.just({})
    return st.dictionaries(keys, anything if more is True else following(more, definitions), max_size=3)
