"""Fixtures of the daemon's tests: an ordinary user, whom file permissions concern even when root runs the tests."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

NOBODY = 65_534


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A new folder that every user may enter; pytest's own are closed."""
    with tempfile.TemporaryDirectory(prefix="omlxd-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def as_ordinary_user() -> Callable[[], AbstractContextManager[None]]:
    """`with as_ordinary_user(): …` runs without root's right to read everything."""

    @contextlib.contextmanager
    def without_root() -> Iterator[None]:
        if os.geteuid() != 0:
            yield
            return
        os.seteuid(NOBODY)
        try:
            yield
        finally:
            os.seteuid(0)

    return without_root
