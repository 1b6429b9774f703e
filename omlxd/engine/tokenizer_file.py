"""Reads a `tokenizer.json` in slices, so that whoever waits for the interpreter's lock gets it in between.

`tokenizers` and `json` hold the lock for as long as a file takes: 0.4 s for a vocabulary of 49 thousand tokens, seconds
for the largest, and no stream, no answer and no signal moves meanwhile. Here the text is parsed a piece at a time, and
the model is built from its parts; only that vocabulary's tables are still made in one go.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from json.decoder import scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, overload

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SLICE_CHARACTERS: Final = 64 * 1024
"""Parsed in 1 to 3 ms."""
_LONG: Final = ("model", "vocab", "merges", "added_tokens")
_BLANKS: Final = re.compile(r"[ \t\n\r]*")
_BPE_OPTIONS: Final = (
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
)
_TOKEN_OPTIONS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_in_slices(path: Path) -> dict[str, Any]:
    """What the file holds, as `json.load` gives it.

    It is read in slices where it is written as Hugging Face writes it, an entry a line, and in one go where not.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read.
        json.JSONDecodeError: it is not JSON.
    """
    text = path.read_text(encoding="utf-8")
    try:
        found, end = _object(text, _skip(text, 0))
        if _skip(text, end) == len(text):
            return found
    except (ValueError, IndexError):
        pass
    return dict(json.loads(text))  # says itself what is wrong, if anything is


def build(content: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer of a parsed file, the same as `Tokenizer.from_file` makes; None of a kind that only that can make.

    Raises whatever `tokenizers` says of parts that do not fit together.
    """
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import BPE

    model = content.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE":
        return None
    if not model.keys() <= {"type", "vocab", "merges", *_BPE_OPTIONS}:
        return None
    options = {key: model[key] for key in _BPE_OPTIONS if model.get(key) is not None}
    merges: Any = _Unhurried(model["merges"])
    bpe = BPE(vocab=model["vocab"], merges=merges, **options)
    empty = {**model, "vocab": {}, "merges": []}
    made = Tokenizer.from_str(json.dumps({**content, "model": empty, "added_tokens": []}))
    made.model = bpe
    added = content.get("added_tokens") or []
    made.add_tokens([AddedToken(each["content"], **{key: each[key] for key in _TOKEN_OPTIONS}) for each in added])
    if any(made.token_to_id(each["content"]) != each["id"] for each in added):
        return None
    return made


class _Unhurried(Sequence[tuple[str, str]]):
    """Merges that are handed over by Python's own loop, in which the lock changes hands."""

    def __init__(self, merges: Sequence[Any]) -> None:
        self._merges = merges

    def __len__(self) -> int:
        return len(self._merges)

    @overload
    def __getitem__(self, at: int) -> tuple[str, str]: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[tuple[str, str]]: ...

    def __getitem__(self, at: int | slice) -> tuple[str, str] | Sequence[tuple[str, str]]:
        return _Unhurried(self._merges[at]) if isinstance(at, slice) else _pair(self._merges[at])

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for merge in self._merges:
            yield _pair(merge)


def _pair(merge: Any) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _object(text: str, at: int) -> tuple[dict[str, Any], int]:
    """The object that begins here, and where it ends; raises ValueError when there is none."""
    found: dict[str, Any] = {}
    at = _skip(text, _expect(text, at, "{"))
    if text[at] == "}":
        return found, at + 1
    while True:
        key_at = at
        key, at = scanstring(text, _expect(text, at, '"'), True)
        at = _skip(text, _expect(text, _skip(text, at), ":"))
        found[key], at = _value(text, at, key, key_at)
        at = _skip(text, at)
        if text[at] == "}":
            return found, at + 1
        at = _skip(text, _expect(text, at, ","))


def _value(text: str, at: int, key: str, key_at: int) -> tuple[Any, int]:
    if key not in _LONG or text[at] not in "{[":
        return json.JSONDecoder().raw_decode(text, at)
    if key == "model":
        return _object(text, at)
    line_at = text.rfind("\n", 0, key_at)
    indent = text[line_at:key_at]
    end = text.find(indent + ("}" if text[at] == "{" else "]"), at) if line_at >= 0 and not indent.strip() else -1
    if end < 0:  # not an entry a line
        return json.JSONDecoder().raw_decode(text, at)
    return _entries(text, at, end), end + len(indent) + 1


def _entries(text: str, at: int, end: int) -> Any:
    """The container from here to its closing line, slice by slice; no text of JSON has a line break of its own."""
    opening, closing = text[at], "}" if text[at] == "{" else "]"
    at += 1
    inner = text[_skip(text, at)]
    boundary = {"{": "},\n", "[": "],\n"}.get(inner, ",\n")
    found: Any = {} if opening == "{" else []
    while at < end:
        cut = text.find(boundary, at + SLICE_CHARACTERS, end)
        cut = end if cut < 0 else cut + len(boundary) - 2  # before the comma
        part = json.loads(f"{opening}{text[at:cut]}{closing}")
        found.update(part) if opening == "{" else found.extend(part)
        at = cut + 1
        time.sleep(0)  # whoever waits for the lock is next
    return found


def _skip(text: str, at: int) -> int:
    match = _BLANKS.match(text, at)
    return match.end() if match else at


def _expect(text: str, at: int, what: str) -> int:
    if not text.startswith(what, at):
        raise ValueError(f"no {what} at {at}")
    return at + len(what)
