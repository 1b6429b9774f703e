"""Fixtures that more than one room's tests use: model folders, made once per test run."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from omlxd.engine.demo_models import ensure_smollm2, make_tiny

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # what the tests start compiles once and not each time, for 0.4 s
os.environ.setdefault("OMLXD_BLAS", "bundled")  # the same sums everywhere: `test_blas` tests the other
settings.register_profile("omlxd", deadline=None)  # a busy machine is slow, not wrong
settings.load_profile("omlxd")


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """At most four: each brings MLX and daemons of its own, and some tests hold memory to predictions."""
    return min(4, os.cpu_count() or 1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model(kind="llama", size_bytes=1_000_000, **make_tiny's other arguments)`: a shared folder, to read.

    All workers of a run share them: whoever wants one first makes it.
    """
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tiny-models"
    root.mkdir(exist_ok=True)

    def model(kind: str = "llama", size_bytes: int = 1_000_000, **options: Any) -> Path:
        given = [f"{name}-{value}" for name, value in sorted(options.items())]
        folder = root / "-".join([kind, str(size_bytes), *given])
        with (root / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return folder if folder.exists() else make_tiny(folder, kind=kind, size_bytes=size_bytes, **options)

    return model


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real model, fetched once for all runs into `$OMLXD_TEST_CACHE` (default `~/.cache/omlxd-tests`)."""
    cache = Path(os.environ.get("OMLXD_TEST_CACHE") or Path.home() / ".cache" / "omlxd-tests")
    return ensure_smollm2(cache, report=lambda line: None)
