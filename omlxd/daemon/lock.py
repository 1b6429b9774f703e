"""One daemon per home: an `flock` that the kernel drops with the process, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

from omlxd.core.errors import AlreadyRunning
from omlxd.daemon.files import cannot_write, open_regular


class HomeLock:
    """Held from construction to `release`; the file is never unlinked.

    Unlinking would let two processes hold locks on two files of the same name. The pid inside is only for messages.

    Raises:
        AlreadyRunning: another process holds it.
        NotPermitted, StartFailed: the file cannot be opened, or is no regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd: int | None = open_regular(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise cannot_write(error, path) from None
        if not _locked(self._fd):
            pid = _pid_in(self._fd)
            os.close(self._fd)
            raise _already_running(path, pid)
        os.ftruncate(self._fd, 0)
        with contextlib.suppress(OSError):  # a full disk: who asks for the pid is not told, and that is all
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let the next daemon in; idempotent."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)

    def __enter__(self) -> HomeLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _locked(fd: int) -> bool:
    for pause_s in (0.05, 0.1, 0.0):  # the command line looks for a daemon by taking the lock for an instant
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(pause_s)
        else:
            return True
    return False


def _pid_in(fd: int) -> int | None:
    text = os.pread(fd, 32, 0).decode(errors="replace").strip()
    return int(text) if text.isdigit() else None  # empty while the winner is about to write it


def _already_running(path: Path, pid: int | None) -> AlreadyRunning:
    who = f" (pid {pid})" if pid else ""
    return AlreadyRunning(
        f"omlxd is already running{who} for `{path.parent}`",
        hint="`omlxd status` shows it, `omlxd stop` ends it; another home (`OMLXD_HOME`) is another daemon",
        details={"pid": pid, "home": str(path.parent)},
    )
