"""What benches share: a directory that goes away, tiny models made once, and how many rounds to take."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.bench.peers.venvs import DEFAULT_FOLDER

CHECKOUT: Final = Path(__file__).resolve().parents[2]
_MAKE: Final = (
    "import json, sys; from pathlib import Path; from omlxd.engine.demo_models import make_tiny;"
    " make_tiny(Path(sys.argv[1]), **json.loads(sys.argv[2]))"
)


@dataclass(frozen=True, slots=True)
class Scratch:
    """One run's directory; short, since sockets live below it.

    Attributes:
        root: removed after the run.
        quick: take few rounds, to see that a bench works.
        peers: where other servers are installed, each in a virtual environment; kept.
    """

    root: Path
    quick: bool = False
    peers: Path = DEFAULT_FOLDER

    def rounds(self, full: int, quick: int = 3) -> int:
        """How many rounds to take."""
        return quick if self.quick else full

    def llama(self, megabytes: int) -> Path:
        """A float32 llama of random weights."""
        return self.tiny("llama", megabytes)

    def tiny(self, kind: str, megabytes: int, **options: Any) -> Path:
        """A model of `make_tiny`; made in a process of its own, so that this one never starts MLX."""
        folder = self.root / "-".join(map(str, (kind, megabytes, *options.values())))
        if not folder.exists():
            asked = json.dumps({"kind": kind, "size_bytes": megabytes * 1_000_000, **options})
            subprocess.run([sys.executable, "-c", _MAKE, str(folder), asked], cwd=CHECKOUT, check=True)
        return folder

    def family(self, name: str, config: Mapping[str, Any]) -> Path:
        """A float32 model of random weights with this config, of any architecture that mlx-lm knows."""
        folder = self.root / name
        if not folder.exists():
            command = [sys.executable, "-m", "tests.bench.family_folders", str(folder), json.dumps(config)]
            subprocess.run(command, cwd=CHECKOUT, check=True, stderr=subprocess.DEVNULL)
        return folder

    def home(self, name: str) -> Path:
        """A fresh home for a daemon."""
        home = self.root / name
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(mode=0o700)
        return home
