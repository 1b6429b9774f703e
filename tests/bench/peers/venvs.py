"""A virtual environment for each peer, made when it is first wanted and kept in a folder of the user's cache."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

DEFAULT_FOLDER: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omlxd-bench"
INSTALL_TIMEOUT_S: Final = 1800.0
TOLD: Final = ("mlx", "mlx-lm")
_NOISE = re.compile(r"\[notice\]|^WARNING|^\s*$")


class Unavailable(Exception):
    """A peer that cannot be measured here, and why in one line."""


@dataclass(frozen=True, slots=True)
class Package:
    """What `pip` is asked for.

    Attributes:
        name, version: the distribution; pinned, so that two runs measure the same.
        beside: what else it needs; with `bare` that is all it gets.
        bare: leave its own dependencies out, because they cannot be met on this platform.
    """

    name: str
    version: str
    beside: Sequence[str] = ()
    bare: bool = False

    @property
    def installs(self) -> list[list[str]]:
        """The arguments of `pip install`, one list a call."""
        pinned = f"{self.name}=={self.version}"
        return [list(self.beside), ["--no-deps", pinned]] if self.bare else [[pinned, *self.beside]]


def ensure(package: Package, folder: Path) -> Path:
    """The environment of this package, made anew when its pins have changed.

    Raises:
        Unavailable: it could not be made; so it is not tried again until its folder is removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{package.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # somebody else may be making it
        return _made(package, folder / package.name)


def _made(package: Package, at: Path) -> Path:
    wanted = json.dumps(package.installs)
    done, failed = at / "installed.json", at / "failed.json"
    if done.is_file() and done.read_text() == wanted:
        return at
    if failed.is_file() and (before := json.loads(failed.read_text()))["wanted"] == wanted:
        raise Unavailable(f"could not be installed: {before['why']} (to try again, remove {at})")
    shutil.rmtree(at, ignore_errors=True)
    at.mkdir()
    try:
        _run([sys.executable, "-m", "venv", str(at)])
        for arguments in package.installs:
            _run([str(at / "bin" / "python"), "-m", "pip", "install", "--quiet", *arguments])
    except Unavailable as error:
        failed.write_text(json.dumps({"wanted": wanted, "why": str(error)}))
        raise Unavailable(f"could not be installed: {error}") from None
    done.write_text(wanted)
    return at


def versions(environment: Path, names: Sequence[str]) -> str:
    """`mlx 0.32.4, mlx-lm 0.32.2`: what is installed of these, read from its folders."""
    found = {}
    for info in environment.glob("lib/python*/site-packages/*.dist-info"):
        name, _, version = info.name.removesuffix(".dist-info").partition("-")
        found[name.lower()] = version
    return ", ".join(f"{name} {at}" for name in names if (at := found.get(name.replace("-", "_"))))


def last_line(text: str) -> str:
    """The last line that says something, without what `pip` adds to every failure; shortened."""
    lines = [line.strip() for line in text.splitlines() if not _NOISE.search(line)]
    return lines[-1][:200] if lines else "it said nothing"


def _run(command: Sequence[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        raise Unavailable(last_line(error.stderr or error.stdout)) from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"it took longer than {INSTALL_TIMEOUT_S / 60:.0f} minutes") from None
