"""Words that several messages share: text from outside, quoted safely; the nearest known word; how to install."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

INSTALL_HINT: Final = (
    "on Linux MLX needs a backend: `pip install 'omlxd[cpu]'`, or `pip install 'omlxd[cuda]'` with an NVIDIA GPU"
)

_LONGEST: Final = 80


def shown(text: str) -> str:
    """Text from outside as a message may hold it: one line, printable, at most 80 characters."""
    printable = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text[: _LONGEST + 1])
    return printable if len(printable) <= _LONGEST else printable[: _LONGEST - 1] + "…"


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like the word, for "did you mean"; None when none is close."""
    import difflib  # 3 ms, and only for messages

    by_folded = {candidate.lower(): candidate for candidate in candidates}
    found = difflib.get_close_matches(word[:100].lower(), by_folded, n=1, cutoff=0.6)
    return by_folded[found[0]] if found else None
