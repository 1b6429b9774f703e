"""The real engine, driven by plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from omlxd.engine.thread import EngineThread
from tests.engine.driver import Driver


@pytest.fixture
def driver_of() -> Iterator[Callable[..., Driver]]:
    """Makes drivers of engines with these options."""
    made: list[Driver] = []

    def make(**options: Any) -> Driver:
        made.append(Driver(EngineThread(**options)))
        return made[-1]

    yield make
    ended = [each.engine.close() for each in made]
    assert all(ended)


@pytest.fixture
def driver(driver_of: Callable[..., Driver]) -> Driver:
    return driver_of()
