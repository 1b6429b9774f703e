"""A model's text on its way to a terminal: whatever it holds, nothing but text arrives there."""

from __future__ import annotations

from typing import Final

# Escape sequences are made of C0 and C1 characters; the bidi overrides and isolates show text in another order than
# it has. Newlines and tabs are text.
_CONTROLS: Final = [*range(0x20), *range(0x7F, 0xA0)]
_REORDERING: Final = [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_HARMLESS: Final = frozenset("\n\t")
_SHOWN: Final = {code: ascii(chr(code))[1:-1] for code in (*_CONTROLS, *_REORDERING) if chr(code) not in _HARMLESS}


class SafeText:
    """Shows control characters as escapes, as `\\x1b`, piece by piece; a carriage return before a newline goes."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, piece: str) -> str:
        """What can be written of the text so far; a `\\r` at the end waits for what follows it."""
        text = self._held + piece
        self._held = "\r" if text.endswith("\r") else ""
        return safe(text[: len(text) - len(self._held)])

    def rest(self) -> str:
        """What was held back; the text is over."""
        held, self._held = self._held, ""
        return safe(held)


def safe(text: str) -> str:
    """The text without control characters, other than newlines and tabs; they are shown as escapes."""
    return text.replace("\r\n", "\n").translate(_SHOWN)
