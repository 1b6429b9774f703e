"""What benches share: a directory that goes away, tiny models made once, and how many rounds to take."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CHECKOUT: Final = Path(__file__).resolve().parents[2]
_MAKE: Final = (
    "import sys; from pathlib import Path; from omlxd.engine.demo_models import make_tiny;"
    " make_tiny(Path(sys.argv[1]), size_bytes=int(sys.argv[2]))"
)


@dataclass(frozen=True, slots=True)
class Scratch:
    """One run's directory; short, since sockets live below it.

    Attributes:
        root: removed after the run.
        quick: take few rounds, to see that a bench works.
    """

    root: Path
    quick: bool = False

    def rounds(self, full: int, quick: int = 3) -> int:
        """How many rounds to take."""
        return quick if self.quick else full

    def llama(self, megabytes: int) -> Path:
        """A float32 llama of random weights; made in a process of its own, so that this one never starts MLX."""
        folder = self.root / f"llama-{megabytes}"
        if not folder.exists():
            command = [sys.executable, "-c", _MAKE, str(folder), str(megabytes * 1_000_000)]
            subprocess.run(command, cwd=CHECKOUT, check=True)
        return folder

    def home(self, name: str) -> Path:
        """A fresh home for a daemon."""
        home = self.root / name
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(mode=0o700)
        return home
