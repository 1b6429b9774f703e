"""What a model's words are: answer, reasoning or a tool call, told apart by the markers that it writes between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

ANSWER = "normal"
REASONING = "reasoning"
TOOL_CALL = "tool"
"""States of a reply, by mlx-lm's names; text in any other state is of no interest to a client."""

Transitions = Mapping[str, Sequence[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How a model marks the parts of its reply.

    Attributes:
        start: the state that a reply begins in.
        transitions: by state: which marker leads to which state. Markers are not part of the text.
    """

    start: str = ANSWER
    transitions: Transitions = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Whether all text is the answer as it stands."""
        return self.start == ANSWER and not self.transitions


@dataclass(frozen=True, slots=True)
class Part:
    """Text in one state; a tool call is one whole part, with the marker before it and the one behind (if it came).

    `is_open` says of the last part that the reply ended inside a tool call, or inside what may be the marker of one.
    """

    state: str
    text: str
    before: str = ""
    after: str = ""
    is_open: bool = False


class ReplySplitter:
    """Splits a reply that comes in pieces; text that could still become a marker is held back until it cannot."""

    def __init__(self, reply_format: ReplyFormat) -> None:
        self._transitions = reply_format.transitions
        self._state = reply_format.start
        self._held = ""
        self._call = ""
        self._before = ""

    def add(self, piece: str) -> list[Part]:
        """The parts that are certain now; of a tool call nothing before it is whole."""
        text, parts = self._held + piece, []
        while True:
            edges = self._transitions.get(self._state, ())
            found = [(at, -len(marker), marker, to) for marker, to in edges if (at := text.find(marker)) >= 0]
            if not found:
                break
            at, _, marker, to = min(found)
            parts += self._said(text[:at])
            parts += self._leave(marker, to)
            text = text[at + len(marker) :]
        keep = longest_prefix_at_end(text, [marker for marker, _ in edges])
        parts += self._said(text[: len(text) - keep])
        self._held = text[len(text) - keep :]
        return parts

    def finish(self) -> list[Part]:
        """The rest: what was held back, and a tool call whose end never came."""
        begun, self._held = self._held, ""
        edges = self._transitions.get(self._state, ())
        is_marker = any(to == TOOL_CALL and marker.startswith(begun) for marker, to in edges)
        parts = [replace(part, is_open=is_marker) for part in self._said(begun)]
        return parts + [replace(part, is_open=True) for part in self._leave("", ANSWER)]

    def _said(self, text: str) -> list[Part]:
        if self._state == TOOL_CALL:
            self._call += text
            return []
        return [Part(self._state, text)] if text and self._state in (ANSWER, REASONING) else []

    def _leave(self, marker: str, to: str) -> list[Part]:
        parts = []
        if self._state == TOOL_CALL:
            if self._call.strip():
                parts.append(Part(TOOL_CALL, self._call, self._before, marker))
            self._call = ""
        self._state, self._before = to, marker
        return parts


def longest_prefix_at_end(text: str, words: Sequence[str]) -> int:
    """Length of the longest end of `text` with which one of the words begins and is not complete (0 when none)."""
    longest = 0
    for word in words:
        for size in range(min(len(word) - 1, len(text)), longest, -1):
            if text.endswith(word[:size]):
                longest = size
                break
    return longest
