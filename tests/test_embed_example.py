"""The example of the library form runs as a program of its own, with real models, and ends cleanly."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "embed.py"


@pytest.mark.mlx
def test_the_example_answers_from_each_model_and_shows_the_eviction(tiny_model: Callable[..., Path]) -> None:
    folders = [tiny_model(size_bytes=1_000_000), tiny_model(size_bytes=1_100_000)]
    ran = subprocess.run(
        [sys.executable, str(EXAMPLE), *map(str, folders)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=EXAMPLE.parent.parent,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    first, second = (folder.name for folder in folders)
    assert ran.stdout.count("tokens, first after") == 2
    assert "[decision]" in ran.stdout
    assert f"`{first}` is idle" in ran.stdout
    assert ran.stdout.endswith(f"  {first}: unloaded\n  {second}: loaded\n")


@pytest.mark.mlx
def test_a_program_that_ends_without_closing_the_pool_ends_cleanly(tiny_model: Callable[..., Path]) -> None:
    program = f"""
import asyncio
from omlxd import EnginePool

async def main():
    pool = EnginePool({{"m": {str(tiny_model())!r}}})
    print(await pool.generate("m", prompt="hello", max_tokens=4).text() != "")

asyncio.run(main())
"""
    ran = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=EXAMPLE.parent.parent,
        check=False,
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, "True"), ran.stderr
