"""The places MLX runs on: what the system or the driver charges this process there, and what the device allows."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from omlxd.core.errors import StartFailed
from omlxd.core.wording import INSTALL_HINT
from omlxd.engine.orders import MIB

CPU_SLACK_BYTES = 64 * MIB
CUDA_SLACK_BYTES = 3 * 1024 * MIB  # NVML's figure lies 1.2 to 2.8 GB above active: context, cuDNN, graphs


class Backend(Protocol):
    """What differs between the places MLX runs on."""

    name: str
    slack_bytes: int

    def footprint_bytes(self) -> int:
        """What the operating system (or the driver) charges this process."""
        ...

    def device_cap(self) -> tuple[int, str] | None:
        """Bytes the device allows, and what says so."""
        ...

    def wired_limit_bytes(self) -> int | None:
        """What the user lets the device wire (`iogpu.wired_limit_mb`), 0 for the system's choice; None elsewhere."""
        ...


@dataclass
class CpuBackend:
    """Linux without an accelerator: resident memory, and no cap but the machine's."""

    name: str = "cpu"
    slack_bytes: int = CPU_SLACK_BYTES
    _process: psutil.Process = field(default_factory=psutil.Process)

    def footprint_bytes(self) -> int:
        return int(self._process.memory_info().rss)

    def device_cap(self) -> tuple[int, str] | None:
        return None

    def wired_limit_bytes(self) -> int | None:
        return None


class MetalBackend:
    """Apple silicon: `phys_footprint`, and the working set the driver recommends or `iogpu.wired_limit_mb` allows."""

    name = "metal"
    slack_bytes = CPU_SLACK_BYTES

    def __init__(
        self,
        device_info: Callable[[], dict[str, Any]] | None = None,
        wired_limit_mb: Callable[[], int] | None = None,
    ) -> None:
        self._device_info = device_info or _mlx_device_info
        self._wired_limit_mb = wired_limit_mb or _iogpu_wired_limit_mb

    def footprint_bytes(self) -> int:
        return _phys_footprint(os.getpid())

    def device_cap(self) -> tuple[int, str] | None:
        if (wired_bytes := self.wired_limit_bytes()) > 0:
            return wired_bytes, "metal"
        recommended = self._device_info().get("max_recommended_working_set_size")
        return (int(recommended), "metal") if recommended else None

    def wired_limit_bytes(self) -> int:
        return self._wired_limit_mb() * MIB


class CudaBackend:
    """NVIDIA: the process's device bytes by NVML, and the device's memory."""

    name = "cuda"
    slack_bytes = CUDA_SLACK_BYTES

    def __init__(self, device_info: Callable[[], dict[str, Any]] | None = None) -> None:
        self._device_info = device_info or _mlx_device_info

    def footprint_bytes(self) -> int:
        return _nvml_process_bytes(os.getpid())

    def device_cap(self) -> tuple[int, str] | None:
        total = self._device_info().get("total_memory")
        return (int(total), "cuda") if total else None

    def wired_limit_bytes(self) -> int | None:
        return None


def detect_backend() -> Backend:
    """The backend that the installed MLX brings, found without importing it.

    Raises:
        StartFailed: there is none: on Linux the package `mlx` alone has no library (`libmlx.so`).
    """
    if sys.platform == "darwin":
        return MetalBackend()
    if any(_has(name) for name in ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda")):
        return CudaBackend()
    package = importlib.util.find_spec("mlx")
    folders = list(package.submodule_search_locations or []) if package else []
    if not any((Path(folder) / "lib" / "libmlx.so").exists() for folder in folders):
        raise StartFailed("MLX is installed without a backend, so no model can run", hint=INSTALL_HINT)
    return CpuBackend()


def _has(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _mlx_device_info() -> dict[str, Any]:
    import mlx.core as mx

    return dict(mx.device_info())


def _iogpu_wired_limit_mb() -> int:
    value, size = ctypes.c_uint64(0), ctypes.c_size_t(8)
    libc = ctypes.CDLL("libc.dylib")
    if libc.sysctlbyname(b"iogpu.wired_limit_mb", ctypes.byref(value), ctypes.byref(size), None, 0) != 0:
        return 0
    return int(value.value)


RUSAGE_INFO_V0_BYTES = 96
PHYS_FOOTPRINT_OFFSET = 72  # after a 16-byte uuid and seven 64-bit counters (<sys/resource.h>, rusage_info_v0)


def _phys_footprint(pid: int) -> int:
    buffer = ctypes.create_string_buffer(RUSAGE_INFO_V0_BYTES)
    if ctypes.CDLL("libproc.dylib").proc_pid_rusage(pid, 0, buffer) != 0:
        return int(psutil.Process(pid).memory_info().rss)
    return phys_footprint_of(buffer.raw)


def phys_footprint_of(rusage_info_v0: bytes) -> int:
    """`ri_phys_footprint`, in bytes, of a raw `rusage_info_v0`."""
    return int.from_bytes(rusage_info_v0[PHYS_FOOTPRINT_OFFSET : PHYS_FOOTPRINT_OFFSET + 8], sys.byteorder)


def _nvml_process_bytes(pid: int) -> int:
    import pynvml

    pynvml.nvmlInit()
    total = 0
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == pid:
                total += int(process.usedGpuMemory or 0)
    return total
