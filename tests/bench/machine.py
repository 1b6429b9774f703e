"""The machine line: what a figure was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from omlxd.core.units import format_bytes

PACKAGES = ("omlxd", "mlx", "mlx-lm", "uvicorn", "starlette")


@dataclass(frozen=True, slots=True)
class Machine:
    """Cores, memory, processor and versions."""

    cores: int
    ram_bytes: int
    cpu: str
    system: str
    backend: str
    python: str
    versions: dict[str, str]
    blas: str
    load_average: float

    def __str__(self) -> str:
        versions = " ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            f"machine: {self.cores} cores, {format_bytes(self.ram_bytes)}, {self.cpu}, {self.system},"
            f" backend {self.backend}{self.blas and f' with {self.blas}'}, Python {self.python}, {versions},"
            f" load {self.load_average:.1f}"
        )


def this_machine() -> Machine:
    """What this process runs on."""
    from omlxd.engine.backends import detect_backend

    backend = detect_backend()
    return Machine(
        cores=os.cpu_count() or 1,
        ram_bytes=psutil.virtual_memory().total,
        cpu=_cpu(),
        system=f"{platform.system()} {platform.release()}",
        backend=backend.name if backend else "none",
        python=".".join(map(str, sys.version_info[:3])),
        versions={name: _version(name) for name in PACKAGES},
        blas="preloaded BLAS" if "blas" in os.environ.get("LD_PRELOAD", "") else "",
        load_average=os.getloadavg()[0],
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
