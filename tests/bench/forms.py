"""What holding answers to a schema costs: the vocabulary's tree once, then for each token the mask and its use."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omlxd.engine.demo_models import ensure_smollm2
from tests.bench.report import Row, against, alone
from tests.bench.scratch import CHECKOUT, Scratch

VOCAB, MEGABYTES = 49_152, 26
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def run(scratch: Scratch) -> Iterator[Row]:
    """A random llama with the vocabulary of SmolLM2, whose own forward pass is short; all in one child process."""
    cache = Path(os.environ.get("OMLXD_TEST_CACHE") or Path.home() / ".cache" / "omlxd-tests")
    real = ensure_smollm2(cache, report=lambda line: None)
    model = scratch.tiny("llama", MEGABYTES, vocab=VOCAB)
    for name in TOKENIZER:
        shutil.copyfile(real / name, model / name)
    rounds = scratch.rounds(5, 2)
    found = _child(model, rounds)
    yield alone("the vocabulary's tree", "ms", [found["tree_ms"]], note=f"{found['tree_mb']:.0f} MB more")
    yield alone("a grammar made ready", "ms", found["grammar_ms"])
    yield alone(f"a mask of {VOCAB} tokens", "µs", found["mask_us"])
    yield alone("a token taken", "µs", found["take_us"])
    yield alone("a mask applied to logits", "µs", found["apply_us"])
    for rows in (1, 8):
        held, free = found[f"held_{rows}"], found[f"free_{rows}"]
        yield against(f"a token of each of {rows} that follow a schema", "ms", held, "free text", free)


def _child(model: Path, rounds: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.bench.forms_child", str(model), str(rounds)]
    done = subprocess.run(command, cwd=CHECKOUT, check=True, stdout=subprocess.PIPE)
    return dict(json.loads(done.stdout))
