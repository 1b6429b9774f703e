"""How a process ends that ran MLX on our thread: with its own exit status, whatever was in flight (never SIGABRT)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.mlx

PROGRAM = """
import sys, queue
from omlxd.engine.events import *
from omlxd.engine.orders import *
from omlxd.engine.thread import EngineThread
mode, path = sys.argv[1:]
events = queue.Queue()
engine = EngineThread()
engine.start(lambda batch: [events.put(event) for event in batch])
engine.apply(Plan(resident=frozenset({"m"}), load=LoadOrder(1, "m", path)))
while not isinstance(event := events.get(timeout=60), LoadDone if mode != "loading" else LoadProgress): pass
if mode != "loading":
    order = GenerationOrder("r", "m", (5, 6, 7) * 300, 10_000)
    engine.apply(Plan(resident=frozenset({"m"}), requests={"r": order}, seen_seq=event.seq))
    while not isinstance(events.get(timeout=60), Generated if mode != "prefill" else Prefilled): pass
if mode == "closed": assert engine.close()
if mode == "raises": raise SystemExit(7)
"""


@pytest.mark.parametrize(
    ("mode", "status"), [("loading", 0), ("prefill", 0), ("decode", 0), ("closed", 0), ("raises", 7)]
)
def test_a_program_that_forgets_to_close_the_engine_still_ends_cleanly(
    mode: str, status: int, tiny_model: Callable[..., Path]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode, str(tiny_model())],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert done.stderr == ""
