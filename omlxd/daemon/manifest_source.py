"""The manifest as text: read from the disk, taken apart as TOML, and the line on which each of its keys stands."""

from __future__ import annotations

import re
import stat
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from omlxd.core.errors import ManifestInvalid, NotPermitted, OmlxError
from omlxd.core.wording import Location, dotted, shown

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
        where = re.search(r" \((?:at (line \d+, column \d+)|at end of document)\)$", message)
        if where is None:
            raise invalid_manifest(path, [f"file: {shown(message)}"]) from None
        place = where[1] or "end of file"
        raise invalid_manifest(path, [f"{place}: {message[: where.start()]}"]) from None


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
