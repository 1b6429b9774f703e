"""Our files, where something else may be in the way: never a wait for a pipe's other end, never a bare `OSError`."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from omlxd.core.errors import NotPermitted, OmlxError, StartFailed

HOME_HINT = "name another home with `--home` or `OMLXD_HOME`"


def open_regular(path: Path, flags: int) -> int:
    """A descriptor of a regular file, mode 0600 when it is made; whatever else has the name is not waited for.

    Raises:
        OSError: it cannot be opened.
        StartFailed: it is a pipe, a device or a directory.
    """
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError:
        require_regular(path)  # a pipe without a reader and a directory have errors of their own
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _in_the_way(path)
    os.set_blocking(fd, True)
    return fd


def require_regular(path: Path) -> None:
    """Raises StartFailed when something that is not a regular file has this name; nothing there is well."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # whoever opens it is told
    if not stat.S_ISREG(mode):
        raise _in_the_way(path)


def make_directory(path: Path) -> None:
    """Make the directory, private, with those above it; one that is there is left as it is.

    Raises:
        NotPermitted, StartFailed: it cannot be made, or a file is in its place.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise StartFailed(f"`{path}` is in the way: it is not a directory", hint=HOME_HINT) from None
    except OSError as error:
        raise cannot_write(error, path) from None


def cannot_write(error: OSError, path: Path) -> OmlxError:
    """The error that a refused write is for the user; `path` where the system has not named one."""
    named = error.filename if isinstance(error.filename, str) else str(path)
    message = f"cannot write `{named}`: {error.strerror or type(error).__name__}"
    if isinstance(error, PermissionError):
        return NotPermitted(message, hint=HOME_HINT)
    return StartFailed(message, hint=HOME_HINT)


def _in_the_way(path: Path) -> StartFailed:
    return StartFailed(
        f"`{path}` is in the way: it is not a regular file",
        hint="move it away; omlxd does not remove what is not its own",
    )
