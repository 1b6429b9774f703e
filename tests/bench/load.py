"""Loading in slices through the engine thread, against one `mx.eval` of all parameters; page cache warm."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench.report import Judged, Row, Target, against
from tests.bench.scratch import CHECKOUT, Scratch

MEGABYTES, QUICK_MEGABYTES = 1000, 300
WARM_MEGABYTES = 1
PEER = "one mx.eval"
NO_SLOWER = Target(1.10, Judged.RATIO)


def run(scratch: Scratch) -> Iterator[Row]:
    """Each load has a process of its own, whose memory is clean and whose imports are done."""
    model = scratch.llama(QUICK_MEGABYTES if scratch.quick else MEGABYTES)
    warm = scratch.llama(WARM_MEGABYTES)
    found: dict[str, list[dict[str, Any]]] = {"sliced": [], "at_once": []}
    for number in range(scratch.rounds(9, 2) + 1):
        for how in ("sliced", "at_once") if number % 2 else ("at_once", "sliced"):
            figures = _child(how, model, warm)
            if number:  # the first round fills the page cache
                found[how].append(figures)
    for key, what, target in (
        ("weights_s", "weights into memory", NO_SLOWER),
        ("load_s", "whole load, with files and tokenizer", NO_SLOWER),
        ("peak_bytes", "peak of active memory", None),
    ):
        unit, scale = ("MB", 1e-6) if key == "peak_bytes" else ("ms", 1e3)
        ours, peer = ([scale * figures[key] for figures in found[how]] for how in ("sliced", "at_once"))
        yield against(f"{what}, {found['sliced'][0]['active_bytes'] / 1e6:.0f} MB", unit, ours, PEER, peer, target)
    shutil.rmtree(model)


def _child(how: str, model: Path, warm: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.bench.load_child", how, str(model), str(warm)]
    done = subprocess.run(command, cwd=CHECKOUT, check=True, stdout=subprocess.PIPE)
    return dict(json.loads(done.stdout))
