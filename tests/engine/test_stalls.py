"""A step that does not end: how long it has taken, where the thread stands, and that it goes on afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from omlxd.core.states import FinishReason
from omlxd.engine import sampling
from omlxd.engine.thread import EngineThread
from tests.engine.driver import DEADLINE_S, Driver, generation

pytestmark = pytest.mark.mlx


def test_a_stuck_step_counts_its_seconds_and_shows_where_it_stands(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, go_on, ahead_s = threading.Event(), threading.Event(), [0.0]

    def stuck(logprobs: object) -> object:
        inside.set()
        go_on.wait(DEADLINE_S)
        return greedy(logprobs)

    greedy = sampling.make_sampler(generation("", "", [1]).sampling)
    monkeypatch.setattr(sampling, "make_sampler", lambda *_: stuck)
    driver = Driver(EngineThread(clock=lambda: time.monotonic() + ahead_s[0]))
    try:
        driver.load("m", tiny_model())
        driver.engine.rest().result(DEADLINE_S)
        driver.start(generation("r", "m", [5, 6, 7], 3))
        assert inside.wait(DEADLINE_S)
        ahead_s[0] = 100.0
        assert 100.0 <= driver.engine.stalled_s() < 100.0 + DEADLINE_S
        names = [line.rpartition(" ")[2] for line in driver.engine.stack()]
        assert names.index("_round") < names.index("prefill_step") < names.index("stuck")
        assert all(line.count("/") == 1 for line in driver.engine.stack())
        go_on.set()
        assert driver.collect({"r"})["r"][1] is FinishReason.LENGTH
        driver.engine.rest().result(DEADLINE_S)
        assert driver.engine.stalled_s() < 100.0
    finally:
        go_on.set()
        assert driver.engine.close()
    assert driver.engine.stack() == ()
    assert driver.engine.stalled_s() == 0.0
