"""`omlxd logs`: the structured log, readable, and followed across rotations."""

from __future__ import annotations

import json as json_module
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import typer

from omlxd.cli import output
from omlxd.cli.invocation import home_of
from omlxd.cli.sentences import event_line
from omlxd.core.errors import NotPermitted, OmlxError
from omlxd.daemon.files import require_regular

LOOK_AGAIN_S: Final = 0.1
_COLOURS: Final = {"warning": "33", "error": "31", "debug": "2"}


def logs(
    context: typer.Context,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with what is written.")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, metavar="N", help="The last N lines.")] = 50,
    json: Annotated[bool, typer.Option("--json", help="The JSON lines as they are.")] = False,
) -> None:
    """Show the daemon's log."""
    path = home_of(context).log
    require_regular(path)
    if not follow and not path.exists():
        raise OmlxError(f"there is no log at `{path}`", hint="`omlxd start` begins one")
    for line in _last_and_new(path, lines, follow=follow):
        _show(line, as_it_is=json)


def _show(line: str, *, as_it_is: bool) -> None:
    if as_it_is:
        sys.stdout.write(line + "\n")
    else:
        try:
            record = json_module.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            colour = _COLOURS.get(str(record.get("level")), "")
            text = event_line(record)
            output.data(output.painted(text, colour, sys.stdout) if colour else text)
        else:
            output.data(line)  # cut off by a crash, or not ours: shown as it is
    sys.stdout.flush()


def _last_and_new(path: Path, count: int, *, follow: bool) -> Iterator[str]:
    """The last `count` lines, from rotated files too where the newest holds fewer, then what is appended."""
    try:
        file = path.open("rb") if path.exists() else None
    except PermissionError as error:
        raise NotPermitted(f"the log `{path}` may not be read", hint="ask its owner") from error
    position = 0
    if file is not None:
        with file:
            content = file.read()
        whole = content if not follow else content[: content.rfind(b"\n") + 1]
        position = len(whole)
        found = whole.decode("utf-8", "replace").splitlines()
        if len(found) < count:
            found = [*_older(path, count - len(found)), *found]
        yield from found[-count:] if count else []
    if follow:
        yield from _appended(path, position)


def _older(path: Path, count: int) -> list[str]:
    found: deque[str] = deque()
    number = 1
    while len(found) < count:
        rotated = path.with_name(f"{path.name}.{number}")
        try:
            lines = rotated.read_bytes().decode("utf-8", "replace").splitlines()
        except OSError:
            break
        found.extendleft(reversed(lines[-(count - len(found)) :]))
        number += 1
    return list(found)


def _appended(path: Path, position: int) -> Iterator[str]:
    """Lines written from `position` on; when the name gets a new file, the old one is read to its end first."""
    file, rest = None, b""
    try:
        while True:
            if file is None:
                try:
                    file = path.open("rb")
                except FileNotFoundError:
                    time.sleep(LOOK_AGAIN_S)
                    continue
                # A file that is shorter than what was read of it is another one.
                file.seek(position if os.fstat(file.fileno()).st_size >= position else 0)
            rotated = _is_another(path, os.fstat(file.fileno()))  # asked before reading: nothing is missed
            rest += file.read()
            *whole, rest = rest.split(b"\n")
            for line in whole:
                yield line.decode("utf-8", "replace")
            if rotated:
                file.close()
                file, position, rest = None, 0, b""
            elif not whole:
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
