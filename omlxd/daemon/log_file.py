"""The log's file: rotates by size, comes back after somebody else's rotation, and loses lines rather than raise."""

from __future__ import annotations

import logging
import logging.handlers
import math
import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

LOOK_S: Final = 0.02


class LogFile(logging.handlers.RotatingFileHandler):
    """Appends one line a record.

    A file that was moved away (logrotate) is left to whoever has it, and the name gets a new one; one that was emptied
    (`copytruncate`) is appended to from its beginning; a directory that was removed is made again. That is looked for
    before a line, but not again within LOOK_S: each look lets go of the interpreter, which others may keep for long.

    Args:
        path: the current file; older ones are `path.1`, `path.2`, ...
        max_bytes: no file gets longer, unless one line alone is.
        kept: how many older files stay; 0 for none.
        clock: seconds that only grow.

    Attributes:
        lost: lines that could not be written and that nobody was told of.
        last_error: why, in the system's words.
    """

    def __init__(self, path: Path, *, max_bytes: int, kept: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(
            path, maxBytes=max_bytes, backupCount=kept, encoding="utf-8", errors="backslashreplace", delay=True
        )
        self.setFormatter(logging.Formatter("%(message)s"))
        self.lost = 0
        self.last_error = ""
        self._failed = False
        self._clock = clock
        self._looked_s = -math.inf
        self._size_bytes = self._line_bytes = 0

    def lost_to_report(self) -> int:
        """The count to tell, once, when the last line went through again."""
        if self._failed or not self.lost:
            return 0
        lost, self.lost = self.lost, 0
        return lost

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line; never raises."""
        self._failed = False
        if self.stream is not None and self._clock() - self._looked_s >= LOOK_S:
            self._look()
        super().emit(record)
        self._size_bytes += self._line_bytes

    def shouldRollover(self, record: logging.LogRecord) -> bool:
        """Whether the line would make the file too long; in bytes, where the standard library counts characters."""
        if self.stream is None:
            self.stream = self._open()
        self._line_bytes = len((self.format(record) + self.terminator).encode(errors="backslashreplace"))
        return self._size_bytes > 0 and self._size_bytes + self._line_bytes > self.maxBytes

    def doRollover(self) -> None:
        """Move the files on; without any to keep, empty the current one, which the standard library would let grow."""
        if self.backupCount > 0:
            super().doRollover()
        else:
            os.truncate(self.baseFilename, 0)
            self._size_bytes = 0

    def handleError(self, record: logging.LogRecord) -> None:
        """Count the line."""
        error = sys.exc_info()[1]
        self.lost += 1
        self._failed = True
        self.last_error = (isinstance(error, OSError) and error.strerror) or type(error).__name__
        # What could not be written waits in the stream and would fail again with every later line.
        self._drop_stream()

    def _look(self) -> None:
        """Whether the name still belongs to the open file, and how long that is."""
        assert self.stream is not None
        self._looked_s = self._clock()
        ours = os.fstat(self.stream.fileno())
        if _is_another(self.baseFilename, ours):
            self._drop_stream()
        else:
            self._size_bytes = _size_bytes(ours)

    def _drop_stream(self) -> None:
        stream, self.stream = self.stream, None
        try:
            if stream is not None:
                stream.close()
        except OSError:
            pass

    def _open(self) -> Any:
        path = Path(self.baseFilename)
        if not path.parent.exists():
            path.parent.mkdir(mode=0o700)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        stream = os.fdopen(fd, self.mode, encoding=self.encoding, errors=self.errors)
        self._looked_s, self._size_bytes = self._clock(), _size_bytes(os.fstat(fd))
        if _is_torn(path):
            stream.write("\n")  # goes out with the next line, which then stands alone
        return stream


def _size_bytes(found: os.stat_result) -> int:
    """What counts towards its limit; a terminal or a pipe has none."""
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _is_another(path: str, ours: os.stat_result) -> bool:
    """Whether the name belongs to another file by now, or to none."""
    try:
        named = Path(path).stat()
    except OSError:
        return True
    return (named.st_dev, named.st_ino) != (ours.st_dev, ours.st_ino)


def _is_torn(path: Path) -> bool:
    """Whether the file ends within a line: a full disk took a part of it, or the process was killed."""
    try:
        with path.open("rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode) or file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:
        return False
