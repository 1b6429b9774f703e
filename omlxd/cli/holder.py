"""Who holds a home's lock: whether a daemon lives, and its pid, without a word from the daemon itself."""

from __future__ import annotations

import fcntl
import os
import stat
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds the lock; `pid` is None in the instant before it has written it."""

    pid: int | None


def holder_of(lock: Path) -> Holder | None:
    """The daemon that holds this lock from before its socket exists until its process ends; None when nobody does."""
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            return Holder(int(text) if text.isdecimal() and int(text) > 1 else None)
        return None
    except OSError:
        return None
    finally:
        os.close(fd)


def is_held(lock: Path) -> bool:
    """Whether a daemon lives."""
    return holder_of(lock) is not None
