"""Writes a file as a whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replace the file as a whole: after a crash it is the old or the new one, never half of either.

    Raises:
        OSError: the disk refuses; the old one stands as it was.
    """
    beside = _written_beside(path, text)
    try:
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(directory)  # the rename itself
    finally:
        os.close(directory)


def try_writing(path: Path, text: str) -> None:
    """Write the file as `write_atomically` would, and leave the one that is there; raises what that would."""
    _written_beside(path, text).unlink()


def _written_beside(path: Path, text: str) -> Path:
    """The new file, whole and on the disk; nothing of it is left when that fails."""
    beside = path.with_name(path.name + ".new")
    beside.unlink(missing_ok=True)  # whatever it is: a pipe would be waited for
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        beside.unlink(missing_ok=True)  # on a full disk every byte counts
        raise
    return beside
