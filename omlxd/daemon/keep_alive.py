"""How long a request wants its model kept when nobody uses it: Ollama's `keep_alive`, and `ttl` for the same."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from omlxd.core.errors import InvalidRequest
from omlxd.core.units import parse_duration

FOR_EVER = math.inf


def parse_keep_alive(value: Any) -> float:
    """Seconds: of a number, or a duration such as `5m`; anything negative is for ever, which is infinite.

    Raises:
        InvalidRequest: it is neither.
    """
    text = value.strip() if isinstance(value, str) else value
    if isinstance(text, str) and text.startswith("-"):
        parse_duration(text[1:])
        return FOR_EVER
    if isinstance(text, int | float) and not isinstance(text, bool) and text < 0:
        return FOR_EVER
    return parse_duration(text)


def granted_s(wanted_s: float | None, ttl_s: float | None, most_s: float | None) -> float | None:
    """What a request gets of the seconds it wants; None when it wants nothing.

    Args:
        wanted_s: infinite for ever.
        ttl_s: the model's own `ttl`, which is the most as long as the manifest names no other; None for no end.
        most_s: `max_keep_alive` of the manifest.
    """
    if wanted_s is None:
        return None
    most_s = ttl_s if most_s is None else most_s
    return wanted_s if most_s is None else min(wanted_s, most_s)


def _validated(value: Any) -> float:
    try:
        return parse_keep_alive(value)
    except InvalidRequest:
        raise PydanticCustomError(
            "keep_alive", "must be a number of seconds, or a duration such as `5m`; negative for ever"
        ) from None


KeepAlive = Annotated[
    float,
    PlainValidator(_validated),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}]}),
]
"""A field of a body."""
