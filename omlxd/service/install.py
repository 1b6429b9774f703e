"""Puts the service's file in place and takes it away, and never over what a user has edited."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from omlxd.core.errors import InvalidRequest, NotPermitted, OmlxError
from omlxd.service.seal import is_unedited


@dataclass(frozen=True, slots=True)
class ServiceFile:
    """A plist or unit on disk, or the place where there is none (`text` is None)."""

    path: Path
    text: str | None

    @property
    def edited(self) -> bool:
        """Whether it is there and not as we wrote it."""
        return self.text is not None and not is_unedited(self.text)


def read_service_file(path: Path) -> ServiceFile:
    """The file that is there, or none; raises NotPermitted."""
    try:
        return ServiceFile(path, path.read_text(encoding="utf-8", errors="replace"))
    except (FileNotFoundError, NotADirectoryError):
        return ServiceFile(path, None)
    except PermissionError:
        raise NotPermitted(f"`{path}` may not be read", hint="it belongs to another user") from None


def write_service_file(there: ServiceFile, text: str, *, mode: int) -> bool:
    """Put the text in place, atomically; False when it is there already.

    Raises:
        InvalidRequest: the file that is there is not as we wrote it.
        NotPermitted, OmlxError: it cannot be written.
    """
    if there.text == text:
        return False
    _require_unedited(there, "install")
    path = there.path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                os.fchmod(fd, mode)
                file.write(text)
                file.flush()
                os.fsync(fd)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink()
            raise
    except OSError as error:
        raise _cannot(error, "written", path) from None
    return True


def remove_service_file(there: ServiceFile) -> None:
    """Take it away; raises InvalidRequest when somebody has edited it."""
    _require_unedited(there, "uninstall")
    try:
        there.path.unlink(missing_ok=True)
    except OSError as error:
        raise _cannot(error, "removed", there.path) from None


def _require_unedited(there: ServiceFile, verb: str) -> None:
    if there.edited:
        raise InvalidRequest(
            f"`{there.path}` was edited and is left as it is",
            hint=f"move it away and `omlxd service {verb}` again; `omlxd service show` shows what would be written",
        )


def _cannot(error: OSError, verb: str, path: Path) -> OmlxError:
    kind = NotPermitted if isinstance(error, PermissionError) else OmlxError
    return kind(
        f"`{path}` cannot be {verb} ({error.strerror})", hint="`sudo` where the directory belongs to the system"
    )
