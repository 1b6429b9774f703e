"""The library form inside somebody else's program: when the program ends, nothing of ours is left in it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, runpy, sys, threading
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print(json.dumps([thread.name for thread in threading.enumerate()]))
"""


@pytest.mark.mlx
def test_the_example_leaves_no_thread_and_ends_with_0(small: Callable[..., Path]) -> None:
    command = [sys.executable, "-c", PROGRAM, str(ROOT / "examples" / "embed.py"), str(small(1)), str(small(2))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "[decision]" in ran.stdout
    assert json.loads(ran.stdout.splitlines()[-1]) == ["MainThread"]
