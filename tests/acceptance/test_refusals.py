"""Nobody is refused who would have fitted, and nobody is admitted who does not: random prompts under random caps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.refusals_child import Case

pytestmark = pytest.mark.mlx

FAMILIES = ("llama", "gemma3_text", "qwen3_moe", "deepseek_v3", "mamba2")
MARGIN = 1.15


@pytest.mark.slow
def test_what_is_refused_would_have_passed_its_cap_and_what_is_admitted_does_not(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.bench.refusals_child", str(tmp_path), "10", "7", *FAMILIES]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    cases = [Case(**each) for each in json.loads(done.stdout)]
    refused = [case for case in cases if case.estimated_bytes]
    admitted = [case for case in cases if not case.estimated_bytes]
    assert len(refused) >= 3
    assert len(admitted) >= 3
    assert [case for case in refused if case.peak_bytes * MARGIN <= case.cap_bytes] == []
    assert [case for case in admitted if case.peak_bytes > case.cap_bytes] == []
