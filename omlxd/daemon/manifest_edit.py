"""Edits of the manifest that keep everything else in it as it is: comments, order, blanks.

Each edit is checked by reading the result: it must say what the file said before and the change, and nothing else.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from omlxd.core.errors import InvalidRequest, NotPermitted, OmlxError
from omlxd.core.manifest_template import default_manifest_text
from omlxd.core.wording import shown
from omlxd.daemon.manifest_file import parse_manifest
from omlxd.daemon.manifest_source import read_text

_ANY_HEADER: Final = re.compile(r"\s*\[")
_BY_HAND: Final = "edit the file by hand, then `omlxd check`"


def with_model(text: str, path: Path, name: str, settings: Mapping[str, Any]) -> str:
    """The manifest's text with one more `[models.NAME]` table.

    Args:
        text: a manifest without problems.
        path: its file, for messages and for relative paths in it.
        name: the model's.
        settings: its keys and values, as TOML has them.

    Raises:
        ManifestInvalid: the name or a setting is not allowed.
        InvalidRequest: the file is written in a way that cannot be edited here.
    """
    import tomlkit  # 60 ms

    document = tomlkit.parse(text)
    table = tomlkit.table()
    table.update(settings)
    if "models" not in document:
        document["models"] = tomlkit.table(is_super_table=True)
    document["models"][name] = table
    written = document.as_string()
    before = tomllib.loads(text)
    _require(written, path, before | {"models": before.get("models", {}) | {name: dict(settings)}})
    parse_manifest(written, path)
    return written


def without_model(text: str, path: Path, name: str) -> tuple[str, str]:
    """The manifest's text without the table of a model, and the lines that went.

    The comment directly above the table goes with it; what is commented elsewhere stays.

    Raises:
        InvalidRequest: the file is written in a way that cannot be edited here.
    """
    lines = text.splitlines(keepends=True)
    begin, end = _lines_of(lines, name)
    written, gone = "".join([*lines[:begin], *lines[end:]]), "".join(lines[begin:end])
    before = tomllib.loads(text)
    models = {each: table for each, table in before["models"].items() if each != name}
    _require(written, path, {key: value for key, value in before.items() if key != "models"} | {"models": models})
    return written, gone


def edit_manifest(path: Path, change: Callable[[str], str]) -> None:
    """Replace the manifest's text by what `change` makes of it; nobody ever sees half of it.

    Two edits at the same time come one after the other. A link is followed, permissions stay; a manifest that is not
    there begins as the one of `omlxd init`, readable by its owner only.

    Raises:
        ManifestInvalid, NotPermitted: it cannot be read, or not be written.
        OmlxError: the disk refuses; the manifest is as it was.
    """
    target = Path(os.path.realpath(path))
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone(target.parent):
            there = target.exists()
            text = read_text(target) if there else default_manifest_text()
            _replace(target, change(text), target.stat().st_mode & 0o777 if there else 0o600)
    except OSError as error:
        kind = NotPermitted if isinstance(error, PermissionError) else OmlxError
        raise kind(
            f"the manifest `{shown(str(path))}` cannot be written ({error.strerror}); it is as it was",
            hint="make room or its folder writable, or name another with `--manifest`",
        ) from error


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _replace(target: Path, text: str, mode: int) -> None:
    fd, temporary = tempfile.mkstemp(prefix=".omlxd.toml-", dir=target.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fchmod(fd, mode)
            os.fsync(fd)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _lines_of(lines: list[str], name: str) -> tuple[int, int]:
    """Where the table begins, with the comment directly above it, and where what follows it begins."""
    header = next((at for at, line in enumerate(lines) if _is_header_of(line, name)), None)
    if header is None:
        return 0, 0  # an inline table, or dotted keys: the check of the result refuses that
    begin = header
    while begin > 0 and lines[begin - 1].lstrip().startswith("#"):
        begin -= 1
    end = next((at for at in range(header + 1, len(lines)) if _ANY_HEADER.match(lines[at])), len(lines))
    # Comments and blanks before the next table are its own, and not the end of this one.
    while end > header + 1 and (not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#")):
        end -= 1
    return begin, end + (end < len(lines) and not lines[end].strip())


def _is_header_of(line: str, name: str) -> bool:
    if not _ANY_HEADER.match(line):
        return False
    try:
        parsed = tomllib.loads(line)
    except ValueError:
        return False
    return parsed == {"models": {name: {}}}


def _require(text: str, path: Path, expected: Mapping[str, Any]) -> None:
    try:
        found = tomllib.loads(text)
    except ValueError:
        found = {}
    if found.get("models", {}) != expected.get("models", {}) or _others(found) != _others(expected):
        raise InvalidRequest(
            f"the models in `{shown(str(path))}` are not written as `[models.NAME]` tables, which alone are edited",
            hint=_BY_HAND,
        )


def _others(document: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key != "models"}
