"""The log's lines, newest first across rotated files, and those that are appended; memory is bounded throughout.

A log may hold anything: the torn end of a daemon that was killed, half a line of a full disk, somebody else's text.
What is not an event is counted and left out, never an error.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from omlxd.core.errors import NotPermitted

LOOK_AGAIN_S: Final = 0.1
LONGEST_LINE_BYTES: Final = 2**20  # ours have a few kilobytes
BLOCK_BYTES: Final = 2**16

Wanted = Callable[[bytes], bool]


@dataclass(frozen=True, slots=True)
class Line:
    """One event: the line as it is in the file, and what it says."""

    raw: bytes
    record: dict[str, Any]


class Log:
    """One reading of a log.

    Args:
        path: the current file; older ones are `path.1`, `path.2`, ...

    Attributes:
        damaged: lines so far that were not events.
    """

    def __init__(self, path: Path) -> None:
        self.damaged = 0
        self._path = path

    def newest_first(self, wanted: Wanted | None = None, *, since: float = 0.0) -> Iterator[Line]:
        """Each event of all files, the newest first.

        Args:
            wanted: looks at a line before it is parsed, so that a search through many is quick.
            since: files that were last written before this Unix time are left out.

        Raises:
            NotPermitted: a file may not be read.
        """
        with ExitStack() as stack:
            for file in self._files(stack, since):
                yield from self._backwards(file, _whole_bytes(file), wanted)

    def last_and_new(self, last: Callable[[Iterator[Line]], list[Line]]) -> Iterator[Line]:
        """What `last` picks of the events that are there (given newest first), then each one that is appended."""
        with ExitStack() as stack:
            files = self._files(stack, 0.0)
            current = files[0] if files and self._is(files[0]) else None
            position = 0 if current is None else _whole_bytes(current)

            def old() -> Iterator[Line]:
                for file in files:
                    yield from self._backwards(file, position if file is current else _whole_bytes(file), None)

            yield from last(old())
            for file in files[0 if current is None else 1 :]:
                file.close()
            for raw in _appended(self._path, current, position):
                if (line := self._parsed(raw)) is not None:
                    yield line

    def _files(self, stack: ExitStack, since: float) -> list[BinaryIO]:
        """All files, newest first, opened before any is read, so that a rotation meanwhile loses and doubles none."""
        found: dict[tuple[int, int], BinaryIO] = {}
        number = 0
        while (file := _opened(_numbered(self._path, number))) is not None or number == 0:
            if file is not None:
                stack.enter_context(file)
                status = os.fstat(file.fileno())
                if status.st_mtime >= since:
                    found.setdefault((status.st_dev, status.st_ino), file)
            number += 1
        return list(found.values())

    def _is(self, file: BinaryIO) -> bool:
        return not _is_another(self._path, os.fstat(file.fileno()))

    def _backwards(self, file: BinaryIO, end: int, wanted: Wanted | None) -> Iterator[Line]:
        for raw in _raw_backwards(file, end):
            if (wanted is None or raw is None or wanted(raw)) and (line := self._parsed(raw)) is not None:
                yield line

    def _parsed(self, raw: bytes | None) -> Line | None:
        """The event of a line; None, and counted, when it is none."""
        if raw is not None and not raw.strip():
            return None
        try:
            record = json.loads(raw) if raw is not None else None
        except (ValueError, RecursionError):
            record = None
        if raw is None or not isinstance(record, dict) or not isinstance(record.get("event"), str):
            self.damaged += 1
            return None
        return Line(raw, record)


def _numbered(path: Path, number: int) -> Path:
    return path if number == 0 else path.with_name(f"{path.name}.{number}")


def _opened(path: Path) -> BinaryIO | None:
    try:
        return path.open("rb")
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise NotPermitted(f"the log `{path}` may not be read", hint="ask its owner") from error


def _whole_bytes(file: BinaryIO) -> int:
    """The length of the file up to its last line's end: what follows is torn, or is being written now."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        begin = max(0, end - BLOCK_BYTES)
        file.seek(begin)
        if (at := file.read(end - begin).rfind(b"\n")) >= 0:
            return begin + at + 1
        end = begin
    return 0


def _raw_backwards(file: BinaryIO, end: int) -> Iterator[bytes | None]:
    """The lines before `end`, last first; None for one that is longer than any of ours."""
    rest, too_long = b"", False
    while end > 0:
        begin = max(0, end - BLOCK_BYTES)
        file.seek(begin)
        first, *lines = (file.read(end - begin) + rest).split(b"\n")
        end = begin
        for line in reversed(lines):
            yield None if too_long else line
            too_long = False
        if len(first) > LONGEST_LINE_BYTES:
            first, too_long = b"", True
        rest = first
    yield None if too_long else rest


def _appended(path: Path, file: BinaryIO | None, position: int) -> Iterator[bytes | None]:
    """Lines written from `position` on; when the name gets a new file, the old one is read to its end first."""
    rest = b""
    try:
        while True:
            if file is None:
                if (file := _opened(path)) is None:
                    time.sleep(LOOK_AGAIN_S)
                    continue
                position = 0
            opened = os.fstat(file.fileno())
            rotated = _is_another(path, opened)  # asked before reading: nothing is missed
            if opened.st_size < position:
                position, rest = 0, b""  # emptied by somebody else
            file.seek(position)
            block = file.read(BLOCK_BYTES)
            position += len(block)
            *whole, rest = (rest + block).split(b"\n")
            yield from whole
            if len(rest) > LONGEST_LINE_BYTES:
                rest = b""
                yield None
            if not block and rotated:
                file.close()
                file, rest = None, b""
            elif not block:
                time.sleep(LOOK_AGAIN_S)
    finally:
        if file is not None:
            file.close()


def _is_another(path: Path, opened: os.stat_result) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False  # in the middle of a rotation; the new file comes
    return (found.st_ino, found.st_dev) != (opened.st_ino, opened.st_dev)
