"""Waits until a file that somebody may be writing is left alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

QUIET_S: Final = 0.1
LONGEST_WAIT_S: Final = 2.0


async def until_quiet(path: Path, *, quiet_s: float = QUIET_S, longest_s: float = LONGEST_WAIT_S) -> None:
    """Return when nothing about the file has changed for `quiet_s`, or after `longest_s` all the same.

    An editor that empties a file and then writes it would otherwise be caught in between.
    """
    loop = asyncio.get_running_loop()
    ends_s, seen = loop.time() + longest_s, await asyncio.to_thread(_stamp, path)
    while loop.time() < ends_s:
        await asyncio.sleep(quiet_s)
        before, seen = seen, await asyncio.to_thread(_stamp, path)
        if seen == before:
            return


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
