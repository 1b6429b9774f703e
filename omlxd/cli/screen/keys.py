"""Bytes that a terminal sends, as names of keys."""

from __future__ import annotations

from typing import Final

_ESCAPE: Final = 0x1B
_NAMES: Final = {
    b"A": "up",
    b"B": "down",
    b"H": "home",
    b"F": "end",
    b"1~": "home",
    b"4~": "end",
    b"5~": "page up",
    b"6~": "page down",
    b"7~": "home",
    b"8~": "end",
}
_CONTROLS: Final = {0x03: "ctrl-c", 0x04: "ctrl-d", 0x0C: "ctrl-l", 0x0D: "enter", 0x0A: "enter"}


class KeyReader:
    """Tells keys apart; the bytes of one may come in several pieces."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def pending(self) -> bool:
        """Whether the last bytes could be the beginning of a key, or the escape key by itself."""
        return bool(self._rest)

    def feed(self, typed: bytes) -> list[str]:
        """The keys that are whole now; what no name is known for is left out."""
        self._rest += typed
        keys = []
        while self._rest:
            length, name = _first(self._rest)
            if not length:
                break
            self._rest = self._rest[length:]
            if name:
                keys.append(name)
        return keys

    def flush(self) -> list[str]:
        """Nothing has followed: what is left was the escape key, or noise."""
        rest, self._rest = self._rest, b""
        return ["escape"] if rest == b"\x1b" else []


def _first(typed: bytes) -> tuple[int, str]:
    """How many bytes the first key has, and its name, empty for one that means nothing; 0 when it is not whole."""
    code = typed[0]
    if code != _ESCAPE:
        return 1, _CONTROLS.get(code, chr(code) if 0x20 <= code < 0x7F else "")
    if len(typed) == 1:
        return 0, ""
    if typed[1:2] not in (b"[", b"O"):
        return 1, "escape"
    for at in range(2, len(typed)):  # parameters, then one byte that ends it
        if 0x40 <= typed[at] <= 0x7E:
            return at + 1, _NAMES.get(typed[2 : at + 1], "")
    return (0, "") if len(typed) < 32 else (len(typed), "")
