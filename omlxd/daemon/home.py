"""Where a daemon's files are; imports almost nothing, because the command line asks it too."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from omlxd.core.errors import StartFailed
from omlxd.core.wording import shown

HOME_VARIABLE = "OMLXD_HOME"
MAX_SOCKET_PATH_BYTES = 103  # what macOS's sockaddr_un holds; Linux takes 107


@dataclass(frozen=True, slots=True)
class Home:
    """One daemon's directory; a second one beside it is a second daemon."""

    root: Path

    @property
    def manifest(self) -> Path:
        """The manifest, unless `--manifest` names another."""
        return self.root / "omlxd.toml"

    @property
    def state(self) -> Path:
        """What was set at run time and what was learned; written by the daemon only."""
        return self.root / "state.toml"

    @property
    def socket(self) -> Path:
        """The control socket."""
        return self.root / "omlxd.sock"

    @property
    def lock(self) -> Path:
        """The file whose `flock` makes the daemon the only one here; the pid inside is for messages."""
        return self.root / "omlxd.lock"

    @property
    def chat_history(self) -> Path:
        """What was typed into chats; written by the command line, and readable by its owner alone."""
        return self.root / "chat_history"

    @property
    def logs(self) -> Path:
        """The directory of the log files."""
        return self.root / "logs"

    @property
    def log(self) -> Path:
        """The structured log."""
        return self.logs / "omlxd.jsonl"

    @property
    def stacks(self) -> Path:
        """Where SIGUSR1 writes what each thread does."""
        return self.logs / "stacks.txt"

    @property
    def daemon_err(self) -> Path:
        """What the detached process writes to stdout and stderr."""
        return self.logs / "daemon.err"


def find_home(argument: str | Path | None = None, environ: Mapping[str, str] = os.environ) -> Home:
    """The home that `--home`, else `$OMLXD_HOME`, else `~/.omlxd` names, as an absolute path.

    Raises:
        StartFailed: the path is no UTF-8, and could not be told in an answer or in the log.
    """
    root = Path(argument or environ.get(HOME_VARIABLE) or "~/.omlxd").expanduser().absolute()
    try:
        str(root).encode()
    except UnicodeEncodeError:
        raise StartFailed(
            f"the path of the home is not UTF-8: `{shown(str(root))}`",
            hint="name another with `--home` or `OMLXD_HOME`",
        ) from None
    return Home(root)
