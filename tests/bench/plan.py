"""`omlxd plan` against what the real model then takes, at several contexts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w

from omlxd.engine.demo_models import ensure_smollm2
from tests.bench.machine import this_machine
from tests.bench.plan_child import NAME, Taken
from tests.bench.report import Judged, Row, Target, against
from tests.bench.scratch import CHECKOUT, Scratch

FEW_CONTEXTS, CONTEXTS, CONTEXTS_WITH_BLAS = (64, 128, 192), (64, 256, 768), (256, 1024, 2048)
CACHE = "OMLXD_TEST_CACHE"


def run(scratch: Scratch) -> Iterator[Row]:
    """SmolLM2-135M, fetched once; without a preloaded BLAS it takes 40 ms a token, so the contexts are short then."""
    folder = ensure_smollm2(
        Path(os.environ.get(CACHE) or Path.home() / ".cache" / "omlxd-tests"), report=lambda line: None
    )
    contexts = FEW_CONTEXTS if scratch.quick else CONTEXTS_WITH_BLAS if this_machine().blas else CONTEXTS
    home = scratch.home("plan")
    daemon = {"max_memory": "4G"}
    (home / "omlxd.toml").write_text(tomli_w.dumps({"daemon": daemon, "models": {NAME: {"path": str(folder)}}}))
    for context, taken in zip(contexts, _measured(folder, contexts), strict=True):
        need = _planned(home, context)
        stays_bytes = need["weights_bytes"] + need["kv_bytes"]
        yield _row(f"weights, context {context}", need["weights_bytes"], taken.weights_bytes, 0.01)
        yield _row("  KV cache", need["kv_bytes"], taken.kv_bytes, 0.02)
        note = (
            f"promised with the next block: {(stays_bytes + need['growth_bytes'] + need['transient_bytes']) / 1e6:.0f}"
            f" MB; the system charged the process {taken.footprint_bytes / 1e6:.0f} MB above its base at the end"
        )
        yield _row("  peak", stays_bytes + need["transient_bytes"], taken.peak_bytes, 0.15, note)


def _row(figure: str, predicted_bytes: int, measured_bytes: int, error: float, note: str = "") -> Row:
    """Met when the prediction is at most so much above the measurement; 1.00 is exact."""
    target = Target(1 + error, Judged.RATIO)
    return against(figure, "MB", [predicted_bytes / 1e6], "measured", [measured_bytes / 1e6], target, note)


def _planned(home: Path, context: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "omlxd", "plan", NAME, "--context", str(context), "--json"]
    environment = {**os.environ, "OMLXD_HOME": str(home)}
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, check=True, stdout=subprocess.PIPE)
    (planned,) = json.loads(done.stdout)["models"]
    return dict(planned)


def _measured(folder: Path, contexts: tuple[int, ...]) -> list[Taken]:
    command = [sys.executable, "-m", "tests.bench.plan_child", str(folder), *map(str, contexts)]
    done = subprocess.run(command, cwd=CHECKOUT, check=True, stdout=subprocess.PIPE)
    return [Taken(**each) for each in json.loads(done.stdout)]
