"""Where the system segment of a conversation ends in its tokens: what other chats with it begin with as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from omlxd.core.errors import InvalidRequest
from omlxd.engine.codec import TextCodec

LEAST_CHARACTERS = 64
"""Of system text: less is run faster than it is looked for."""


def system_tokens(
    messages: Sequence[Mapping[str, Any]],
    tokens: Sequence[int],
    codec: TextCodec,
    tools: Sequence[Mapping[str, Any]] = (),
) -> int:
    """How many of a conversation's `tokens` its system messages take; 0 without any, or when that cannot be told.

    Templates differ in what they make of a system message, some put it into the first turn, and tokens reach over the
    borders of texts: so a chat with the same beginning and another question is encoded as well, and what the two
    share counts.
    """
    system = list(takewhile(lambda message: message.get("role") == "system", messages))
    if sum(len(str(message.get("content") or "")) for message in system) < LEAST_CHARACTERS:
        return 0
    following = messages[len(system)] if len(system) < len(messages) else {"role": "user", "content": ""}
    other = "1" if str(following.get("content") or "").startswith("0") else "0"
    try:
        probe = codec.encode_chat([*system, {"role": following.get("role", "user"), "content": other}], tools)
    except InvalidRequest:  # some templates want a turn to be answered, or more of them
        return 0
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(probe, tokens, strict=False)))
