"""The manifest as text: read from the disk, taken apart as TOML, and the line on which each of its keys stands."""

from __future__ import annotations

import re
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from omlxd.core.errors import ManifestInvalid, NotPermitted, OmlxError
from omlxd.core.wording import Location, dotted, nearest, shown

MAX_MANIFEST_BYTES: Final = 2**20
_CORRECT_HINT: Final = "correct the file, then `omlxd check`"

Finding = tuple[Location, str]
"""Where in the manifest, and what is wrong there."""


def read_text(path: Path) -> str:
    """The manifest's text, unchecked; raises what `read_manifest` raises for a file that cannot be read."""
    shown_path = shown(str(path))
    try:
        # A pipe would block the open, so look first.
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
            raise _unreadable(shown_path, f"is {kind}", "name a TOML file, or let `omlxd init` write one")
        with path.open("rb") as file:
            content = file.read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError:
        raise _unreadable(shown_path, "does not exist", "`omlxd init` writes one") from None
    except PermissionError:
        raise NotPermitted(
            f"the manifest `{shown_path}` may not be read", hint="make it readable for the user who runs omlxd"
        ) from None
    except (OSError, ValueError) as failed:  # ValueError: a NUL byte in the path
        reason = getattr(failed, "strerror", None) or str(failed)
        raise _unreadable(shown_path, f"cannot be read: {reason.lower()}", "check the path") from None
    if len(content) > MAX_MANIFEST_BYTES:
        raise _unreadable(shown_path, "is larger than 1 MiB", "name a manifest: a TOML file of a few lines")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as failed:
        line = content.count(b"\n", 0, failed.start) + 1
        raise invalid_manifest(path, [f"line {line}: is not UTF-8 text (byte {failed.start + 1})"]) from None


def read_toml(text: str, path: Path) -> dict[str, Any]:
    """The text's tables, unchecked; raises ManifestInvalid with the place where it is no TOML."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise invalid_manifest(path, ["file: is nested too deeply"]) from None
    except ValueError as failed:  # TOMLDecodeError, and numbers of thousands of digits
        message = str(failed)
        where = re.search(r" \((?:at line (\d+), column (\d+)|at end of document)\)$", message)
        if where is None:
            raise invalid_manifest(path, [f"file: {shown(message)}"]) from None
        what = message[: where.start()]
        problem = _at(text, int(where[1]), int(where[2]), what) if where[1] else _at_the_end(text, what)
        raise invalid_manifest(path, [problem]) from None


def _at(text: str, line: int, column: int, what: str) -> str:
    lines = text.replace("\r\n", "\n").split("\n")[:line]
    here, before = lines[-1], lines[-1][: column - 1]
    opened = _open_pieces("\n".join([*lines[:-1], before]))
    place = f"line {line}, column {column}"
    if not opened:
        assignment = _ASSIGNMENT.match(here)
        return f"{place}: {what if assignment is None else _of_key(assignment, before, what)}"
    outer, inner = opened[0], opened[-1]
    if column > len(here) and inner.ends_with_its_line:
        return f"line {inner.line}, column {inner.column}: the {inner.kind} that begins here is not closed"
    if outer.line < line and outer.kind == "list" and (_HEADER.match(here) or _ASSIGNMENT.match(here)):
        return f"line {outer.line}: the list that begins here is not closed before line {line}"
    within = f", in the {outer.kind} that begins on line {outer.line}" if outer.line < line else ""
    return f"{place}: {_MISSING.get(what, what)}{within}"


_MISSING: Final = {"Unclosed array": "a comma or `]` is missing", "Unclosed inline table": "a comma or `}` is missing"}
_TRUTHS: Final = ("true", "false", "yes", "no", "on", "off")


def _of_key(assignment: re.Match[str], before: str, what: str) -> str:
    """What tomllib says of this key's value, which may be a secret and is not repeated."""
    key, value = f"`{shown(assignment[1])}`", assignment.string[assignment.end() :].strip()
    if what.startswith("Expected newline"):
        return f"something stands behind the value of {key}; text needs quotes"
    if what != "Invalid value" or before.strip() != assignment[0].strip():
        return what
    word = re.split(r"[\s#]", value, maxsplit=1)[0]
    if not word:
        return f"{key} has no value"
    if nearest(word, _TRUTHS) is not None:
        return f"{key} has no valid value; write `true` or `false`, or text in quotes"
    return f"{key} has no valid value; text needs quotes"


def _at_the_end(text: str, what: str) -> str:
    """What is missing at the end of the file is missing where it was begun."""
    if opened := _open_pieces(text):
        piece = opened[-1] if opened[-1].ends_with_its_line else opened[0]
        return f"line {piece.line}, column {piece.column}: the {piece.kind} that begins here is not closed"
    last = text.rstrip().count("\n") + 1
    if what == "Invalid value" and (assignment := _ASSIGNMENT.match(text.rstrip().split("\n")[-1])):
        what = _of_key(assignment, assignment[0], what)
    return f"line {last}: {what}"


_PIECE: Final = re.compile(
    "|".join(
        (
            r"#[^\n]*",
            r'"{3}(?:\\.|[^\\])*?"{3,5}',
            r"'{3}.*?'{3,5}",
            r"\"{3}|'{3}",
            r'"(?:\\.|[^"\\\n])*"',
            r"'[^'\n]*'",
            r"[\[\]{}\"']",
        )
    ),
    re.DOTALL,
)
"""What can hide a bracket or is one; a text that is not closed shows as its quotes alone."""
_QUOTES: Final = frozenset(('"', "'", '"""', "'''"))
_ONE_LINE: Final = frozenset(('"', "'", "{"))
_KINDS: Final = {"[": "list", "{": "inline table"}


@dataclass(frozen=True, slots=True)
class _Open:
    """A list, table or text that is not closed, and where it begins."""

    kind: str
    line: int
    column: int
    ends_with_its_line: bool


def _open_pieces(text: str) -> list[_Open]:
    """What is not closed where this ends, the outermost first."""
    opened: list[re.Match[str]] = []
    for piece in _PIECE.finditer(text):
        if piece[0] in ("]", "}"):
            del opened[-1:]
        elif piece[0] in _KINDS:
            opened.append(piece)
        elif piece[0] in _QUOTES:  # the rest is within it
            opened.append(piece)
            break
    return [_placed_open(text, piece, is_outer=piece is opened[0]) for piece in opened]


def _placed_open(text: str, piece: re.Match[str], *, is_outer: bool) -> _Open:
    begin = piece.start()
    starts_at = text.rfind("\n", 0, begin) + 1
    is_heading = is_outer and piece[0] == "[" and not text[starts_at:begin].strip()
    kind = "table heading" if is_heading else _KINDS.get(piece[0], "text in quotes")
    return _Open(kind, text.count("\n", 0, begin) + 1, begin - starts_at + 1, piece[0] in _ONE_LINE)


def placed(problems: Iterable[str], path: str | Path) -> list[str]:
    """Problems that were found later, each `key.path: ...`, with the lines that their keys have in this file."""
    try:
        text = read_text(Path(path))
    except OmlxError:  # it has gone away meanwhile
        text = ""
    lines = {dotted(location): line for location, line in lines_of_keys(text).items()}
    keys = ((problem, problem.partition(": ")[0]) for problem in problems)
    return [f"{problem} (line {lines[key]})" if key in lines else problem for problem, key in keys]


def in_file_order(found: Iterable[Finding], lines: Mapping[Location, int]) -> list[str]:
    """One sentence each, with its key and line, in the order of the `lines_of_keys`."""
    placed = []
    for location, sentence in found:
        known = next((location[:n] for n in range(len(location), 0, -1) if location[:n] in lines), None)
        line = lines[known] if known else 0
        placed.append((line or 2**31, f"{dotted(location)}: {sentence}" + (f" (line {line})" if line else "")))
    return [text for _, text in sorted(placed, key=lambda entry: entry[0])]


def invalid_manifest(path: Path, problems: list[str]) -> ManifestInvalid:
    """The error that all these problems of the file are together."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return ManifestInvalid(f"the manifest `{shown(str(path))}` has {count}", problems=problems, hint=_CORRECT_HINT)


def _unreadable(shown_path: str, what: str, hint: str) -> ManifestInvalid:
    return ManifestInvalid(f"the manifest `{shown_path}` {what}", hint=hint)


_KEY: Final = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')"""
_KEYS: Final = rf"{_KEY}(?:\s*\.\s*{_KEY})*"
_HEADER = re.compile(rf"\s*\[\[?\s*({_KEYS})\s*\]")
_ASSIGNMENT = re.compile(rf"\s*({_KEYS})\s*=")


def lines_of_keys(text: str) -> dict[Location, int]:
    """The line on which each key or table first appears; good enough for messages (long strings may fool it)."""
    lines: dict[Location, int] = {}
    table: Location = ()
    for number, line in enumerate(text.split("\n"), start=1):
        if header := _HEADER.match(line):
            table = _parts(header[1])
            for length in range(1, len(table) + 1):
                lines.setdefault(table[:length], number)
        elif assignment := _ASSIGNMENT.match(line):
            lines.setdefault(table + _parts(assignment[1]), number)
    return lines


def _parts(written: str) -> Location:
    """`models."qwen3.5".path` as its parts."""
    try:
        level: Any = tomllib.loads(f"{written} = 0")
    except ValueError:
        return (written,)
    parts: list[str] = []
    while isinstance(level, dict):
        (key, level), *_ = level.items()
        parts.append(key)
    return tuple(parts)
