"""Whose functions MLX multiplies with, asked of the dynamic linker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from omlxd.core.checkup import Health
from omlxd.daemon import checkup
from omlxd.engine import blas
from omlxd.engine.backends import CpuBackend

MULTIPLY = """
from omlxd.engine import mlxlm
mlxlm.import_libraries()
import mlx.core as mx
with mx.stream(mx.cpu):
    mx.eval(mx.ones((64, 64)) @ mx.ones((64, 64)))
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere MLX multiplies with the system's own")


def bound_to(tmp_path: Path, variable: str) -> set[str]:
    """The libraries that MLX's calls of `cblas_sgemm` went to, in a process with this value of the variable."""
    told = tmp_path / "bindings"
    environment = os.environ | {blas.VARIABLE: variable, "LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(told)}
    subprocess.run([sys.executable, "-c", MULTIPLY], env=environment, check=True)
    lines = [line for file in tmp_path.glob("bindings.*") for line in file.read_text(errors="replace").splitlines()]
    calls = [line for line in lines if "libmlx.so" in line.split(" to ")[0] and "`cblas_sgemm'" in line]
    return {Path(line.split(" to ")[1].split()[0]).name.split("-")[0] for line in calls}


@pytest.mark.skipif(not blas.has_openblas(), reason="no OpenBLAS here")
def test_matrices_are_multiplied_by_the_systems_openblas(tmp_path: Path) -> None:
    assert bound_to(tmp_path, "") == {blas.OPENBLAS}


def test_they_are_not_when_the_user_says_so(tmp_path: Path) -> None:
    assert bound_to(tmp_path, blas.BUNDLED) == {"libblas"}


@pytest.mark.parametrize(
    ("variable", "installed", "health", "found"),
    [
        ("", True, Health.OK, "the system's OpenBLAS"),
        ("", False, Health.WARNING, "MLX's own, on one core"),
        (blas.BUNDLED, True, Health.OK, "MLX's own, by OMLXD_BLAS"),
    ],
)
def test_doctor_says_whose_it_is(
    variable: str, installed: bool, health: Health, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(blas.VARIABLE, variable)
    monkeypatch.setattr(blas, "has_openblas", lambda: installed)
    monkeypatch.setattr(checkup, "detect_backend", CpuBackend)
    (told,) = [each for each in checkup.check_installation()[0] if each.check == "blas"]
    assert told.health is health
    assert told.found.startswith(found)


SPINS = """
import os
from omlxd.engine import mlxlm
mlxlm.import_libraries()
print(os.environ.get("OPENBLAS_THREAD_TIMEOUT"))
"""


@pytest.mark.parametrize(
    ("variable", "asked", "found"), [("", None, blas.SPIN), ("", "28", "28"), (blas.BUNDLED, None, "None")]
)
def test_its_threads_sleep_soon_unless_the_user_says_otherwise(variable: str, asked: str | None, found: str) -> None:
    environment = os.environ | {blas.VARIABLE: variable}
    environment.pop(blas.SPIN_VARIABLE, None)
    if asked is not None:
        environment[blas.SPIN_VARIABLE] = asked
    told = subprocess.run([sys.executable, "-c", SPINS], env=environment, check=True, capture_output=True, text=True)
    assert told.stdout.strip() == found
