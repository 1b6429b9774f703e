"""Whether what is refused would really not have fitted, and whether what is admitted really does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from tests.bench.refusals_child import Case
from tests.bench.report import Judged, Row, Target, alone
from tests.bench.scratch import CHECKOUT, Scratch

FAMILIES = (
    "llama",
    "llama, many heads",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "mixtral",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "mamba2",
    "falcon_h1",
    "lfm2",
    "qwen3_next",
)
MARGIN = 1.15
NEVER = Target(0.0, Judged.WORST)


def run(scratch: Scratch) -> Iterator[Row]:
    """Full and grouped attention, sliding windows, experts, compressed caches, state spaces and hybrids."""
    cases = [Case(**each) for each in _hunt(scratch)]
    refused = [case for case in cases if case.estimated_bytes]
    admitted = [case for case in cases if not case.estimated_bytes]
    false = [case for case in refused if case.peak_bytes * MARGIN <= case.cap_bytes]
    passed = [case for case in admitted if case.peak_bytes > case.cap_bytes]
    counts = f"of {len(cases)} prompts under random caps"
    yield alone(f"refused, {counts}", "", [len(refused)])
    yield alone(f"  falsely: peak + {MARGIN - 1:.0%} was within the cap", "", [len(false)], NEVER, _named(false))
    yield alone("  peak without a cap / cap", "", [case.peak_bytes / case.cap_bytes for case in refused])
    yield alone("  estimate / peak", "", [case.estimated_bytes / case.peak_bytes for case in refused])
    yield alone(f"admitted, {counts}", "", [len(admitted)])
    yield alone("  wrongly: the peak passed the hard limit", "", [len(passed)], NEVER, _named(passed))
    yield alone("  peak / cap", "", [case.peak_bytes / case.cap_bytes for case in admitted])


def _hunt(scratch: Scratch) -> list[dict[str, int | str]]:
    folder = scratch.root / "families"
    folder.mkdir()
    arguments = [str(folder), str(scratch.rounds(200, 20)), "1", *FAMILIES]
    command = [sys.executable, "-m", "tests.bench.refusals_child", *arguments]
    done = subprocess.run(command, cwd=CHECKOUT, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return list(json.loads(done.stdout))


def _named(cases: list[Case]) -> str:
    worst = [f"{case.family}, {case.prompt_tokens} tokens: {case.peak_bytes} of {case.cap_bytes}" for case in cases]
    return "; ".join(worst[:4])
