"""Another enforcer beside ours while memory grows 1 GB/s: when it acts, how far memory goes, who loses an answer.

Theirs is the class `ProcessMemoryEnforcer` of flyto-mlx (the oMLX code base) with the numbers it comes with, in its own
environment. It has no engine that can be told to grow; so both are driven alike: a thread takes memory, an idle model
of 1 GB is there to be unloaded, and `acted` is the moment in which that begins.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.bench.peers.catalogue import FLYTO
from tests.bench.peers.venvs import Unavailable, last_line
from tests.bench.report import Judged, Row, Target, against, beside, unable
from tests.bench.scratch import CHECKOUT, Scratch

VICTIM_MB, OTHER_MB = 1000, 5
TIMEOUT_S: Final = 600.0
SOON_MS: Final = 50.0
THEIRS_NOTE: Final = "its class with a stand-in for its pool"
CASES: Final = (("while one decodes", True), ("while nobody does", False))
BEFORE: Final = Target(1.0, Judged.RATIO)
NONE: Final = Target(0.0, Judged.WORST)


def run(scratch: Scratch) -> Iterator[Row]:
    """Both poll once a second; ours also looks after each step, which is what the second case is without."""
    rounds = scratch.rounds(20, 3)
    victim, other = scratch.llama(VICTIM_MB), scratch.llama(OTHER_MB)
    try:
        python = FLYTO.bin_folder(scratch.peers) / "python"
        theirs, why = _child([str(python), "-m", "tests.bench.peers.enforcer_flyto", str(rounds)]), ""
    except Unavailable as error:
        theirs, why = [], str(error)
    for case, decodes in CASES:
        command = [sys.executable, "-m", "tests.bench.peers.enforcer_ours"]
        ours = _child([*command, str(victim), str(other), str(rounds), "busy" if decodes else "idle"])
        yield from _rows(case, ours, theirs, why)


def _rows(case: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]], why: str) -> Iterator[Row]:
    figures = (
        (f"1 GB/s {case}: limit crossed to action", "ms", "action_ms", 1.0),
        ("  to memory back", "ms", "back_ms", 1.0),
        ("  growth past the limit", "MB", "overshoot_bytes", 1e-6),
    )
    for figure, unit, key, scale in figures:
        mine = [scale * each[key] for each in ours]
        if why:
            yield unable(figure, unit, mine, FLYTO.name, why)
        else:
            yield against(figure, unit, mine, FLYTO.name, [scale * each[key] for each in theirs], BEFORE, THEIRS_NOTE)
    for figure, key in (("  past the hard mark", "past_hard"), ("  requests lost", "lost")):
        mine = [float(sum(each[key] for each in ours))]
        if why:
            yield unable(figure, "", mine, FLYTO.name, why)
        else:
            of = f"of {len(ours)} and {len(theirs)} rounds"
            yield beside(figure, "", mine, FLYTO.name, [float(sum(each[key] for each in theirs))], NONE, of)


def _child(command: list[str]) -> list[dict[str, Any]]:
    """What it printed; raises Unavailable with the last line of its error."""
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise Unavailable(f"{Path(command[2]).suffix[1:]} failed: {last_line(done.stderr)}")
    return list(json.loads(done.stdout.splitlines()[-1]))
