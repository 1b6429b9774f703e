"""Words that several messages share: text from outside, quoted safely; the nearest known word; keys; how to install."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

Location = tuple[str | int, ...]
"""Where a value stands in a TOML document: keys, and positions in lists."""

INSTALL_HINT: Final = (
    "on Linux MLX needs a backend: `pip install 'omlxd[cpu]'`, or `pip install 'omlxd[cuda]'` with an NVIDIA GPU"
)

_LONGEST: Final = 80
_MOST_NAMES: Final = 5


def shown(text: str) -> str:
    """Text from outside as a message may hold it: one line, printable, at most 80 characters."""
    printable = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text[: _LONGEST + 1])
    return printable if len(printable) <= _LONGEST else printable[: _LONGEST - 1] + "…"


def named(names: Iterable[str]) -> str:
    """`a`, `b` in backticks; of very many the first ones and how many more there are."""
    quoted = [f"`{name}`" for name in names]
    if len(quoted) <= _MOST_NAMES + 1:
        return ", ".join(quoted)
    return f"{', '.join(quoted[:_MOST_NAMES])} and {len(quoted) - _MOST_NAMES} others"


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like the word, for "did you mean"; None when none is close."""
    import difflib  # 3 ms, and only for messages

    by_folded = {candidate.lower(): candidate for candidate in candidates}
    found = difflib.get_close_matches(word[:100].lower(), by_folded, n=1, cutoff=0.6)
    return by_folded[found[0]] if found else None


def dotted(location: Location) -> str:
    """A location as TOML writes it: `models."qwen3.5".path`, list positions as `[0]`."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            bare = re.fullmatch(r"[A-Za-z0-9_-]+", part)
            text += ("." if text else "") + (part if bare else f'"{shown(part)}"')
    return text
