"""Every number about memory, and every knob MLX has for it: the differences between Metal, CUDA and CPU end here.

`used = active + overhead` and `overhead = max(0, footprint - cache - active - base - slack)`: what the operating system
charges the process beyond what MLX's own gauge sees. The footprint lags behind what is freed, and swings by itself, so
the overhead is slow: sampled at rest, at most once in `SAMPLE_S`, never within `SETTLE_S` of a load or an unload, and
it is the least of the last `SAMPLES`. What is really there stays and is seen; what comes and goes costs nobody a thing.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from omlxd.core.errors import StartFailed
from omlxd.core.memory import MemoryReading
from omlxd.core.wording import INSTALL_HINT
from omlxd.engine.orders import MIB, EngineLimits
from omlxd.engine.protocol import Sampled

SETTLE_S = 2.0
SAMPLE_S = 1.0
SAMPLES = 3
CPU_SLACK_BYTES = 64 * MIB
CUDA_SLACK_BYTES = 3 * 1024 * MIB  # NVML's figure lies 1.2 to 2.8 GB above active: context, cuDNN, graphs
CACHE_CEILING_BYTES = 1024 * MIB
CACHE_STEP_BYTES = MIB  # the cache's limit before a step is a multiple of it, so that it seldom changes


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


class Gauges:
    """Reads memory and turns MLX's knobs; zeros until `attach` is told that MLX is imported.

    Args:
        backend: where MLX runs.
        clock: monotonic seconds.
    """

    def __init__(self, backend: Backend, clock: Callable[[], float] = time.monotonic) -> None:
        self.backend = backend
        self.base_bytes = 0
        self._clock = clock
        self._mx: Any = None
        self._overheads = (0,) * SAMPLES  # replaced, never changed: two threads read it
        self._unsettled_until = 0.0
        self._sampled_at = float("-inf")
        self._default_cache_limit = self._cache_room_bytes = 0
        self._cache_limit_bytes = -1  # nothing told yet
        self._system: tuple[float, int, int] = (-1.0, 0, 0)
        self._footprint_bytes = 0

    def attach(self) -> None:
        """MLX is imported: read it from now on, run one small evaluation and take the base footprint."""
        import mlx.core as mx

        probe = mx.ones((256, 256))
        mx.eval(probe @ probe)
        del probe
        mx.synchronize()
        mx.clear_cache()
        self._default_cache_limit = mx.set_cache_limit(0)
        mx.set_cache_limit(self._default_cache_limit)
        self._cache_limit_bytes = self._default_cache_limit
        if self.backend.name == "metal" and (cap := self.backend.device_cap()):
            mx.set_wired_limit(cap[0])
        self._mx = mx
        self.base_bytes = self.backend.footprint_bytes()

    def active_bytes(self) -> int:
        """Live arrays now (50 ns)."""
        return int(self._mx.get_active_memory()) if self._mx else 0

    def cache_bytes(self) -> int:
        """Freed buffers that MLX keeps now."""
        return int(self._mx.get_cache_memory()) if self._mx else 0

    def reset_peak(self) -> None:
        """Begin to measure a step's peak."""
        if self._mx:
            self._mx.reset_peak_memory()

    def above_active_bytes(self) -> int:
        """How far the peak since `reset_peak` lies above what is live now: what a step took and gave back."""
        return max(0, int(self._mx.get_peak_memory()) - self.active_bytes()) if self._mx else 0

    def obey(self, limits: EngineLimits) -> None:
        """Set MLX's cache limit so that its cache takes at most half of what lies between the limits.

        The ceiling of 1 GiB is for Metal, whose default is as large as its memory limit. No memory limit is set:
        on the CPU it is back-pressure that costs time, and on Metal it caused churn and swap during loads.
        """
        if not self._mx:
            return
        room = self._default_cache_limit
        if limits.soft_bytes and limits.hard_bytes:
            room = min(room, max(0, limits.hard_bytes - limits.soft_bytes) // 2)
        self._cache_room_bytes = min(room, CACHE_CEILING_BYTES)
        self._limit_cache(self._cache_room_bytes)

    def cap_cache(self, room_bytes: int) -> bool:
        """Let MLX's cache take at most `room_bytes`, and what the limits allow; True when it holds more already."""
        if not self._mx:
            return False
        allowed_bytes = max(0, min(room_bytes // CACHE_STEP_BYTES * CACHE_STEP_BYTES, self._cache_room_bytes))
        self._limit_cache(allowed_bytes)
        return self.cache_bytes() > allowed_bytes

    def _limit_cache(self, limit_bytes: int) -> None:
        """Tell MLX only what is new: the call waits for the allocator's lock, 6 % of a decode step's time."""
        if limit_bytes != self._cache_limit_bytes:
            self._mx.set_cache_limit(limit_bytes)
            self._cache_limit_bytes = limit_bytes

    def unsettle(self) -> None:
        """A load or unload goes on or just ended: the footprint lags, so do not believe it for a while."""
        self._unsettled_until = self._clock() + SETTLE_S

    def grow_base(self, growth_bytes: int) -> None:
        """Something small and lasting (a tokenizer) was added to the process, or taken out of it again (negative)."""
        self.base_bytes = max(0, self.base_bytes + growth_bytes)

    def beside_mlx_bytes(self) -> int:
        """The footprint without what MLX has: what something else adds to the process while models run."""
        return self.backend.footprint_bytes() - self.active_bytes() - self.cache_bytes()

    @property
    def sample_due(self) -> bool:
        """Whether a reading at rest would sample the overhead now."""
        now = self._clock()
        return self._mx is not None and now >= max(self._unsettled_until, self._sampled_at + SAMPLE_S)

    def read(self, *, at_rest: bool) -> MemoryReading:
        """A reading now; at rest it also samples the overhead, when that is due."""
        active, cache = self.active_bytes(), self.cache_bytes()
        try:
            self._footprint_bytes = self.backend.footprint_bytes()
        except OSError:
            pass  # no file may be opened to ask in: what was seen last counts
        footprint = self._footprint_bytes
        if at_rest and self.sample_due:
            self._sampled_at = self._clock()
            overhead = max(0, footprint - cache - active - self.base_bytes - self.backend.slack_bytes)
            self._overheads = (*self._overheads[1:], overhead)
        total, available = self._system_memory()
        return MemoryReading(
            active_bytes=active,
            cache_bytes=cache,
            footprint_bytes=footprint,
            base_bytes=self.base_bytes,
            overhead_bytes=min(self._overheads),
            system_total_bytes=total,
            system_available_bytes=available,
            at_rest=at_rest,
        )

    def _system_memory(self) -> tuple[int, int]:
        # 100 us a call on Linux: a reading after each step should not pay for it each time.
        now = self._clock()
        if now - self._system[0] > 0.5 or self._system[0] < 0:
            try:
                memory = psutil.virtual_memory()
                self._system = (now, int(memory.total), int(memory.available))
            except OSError:
                pass  # the same
        return self._system[1], self._system[2]


class Sampler:
    """Looks at `active` and `active + cache` a hundred times a second while there is work, inside steps too.

    Attributes:
        peak_active_bytes: the highest `active` seen.
        peak_total_bytes: the highest `active + cache` seen.
        sampled: how often it looked, and what it saw above the hard limit; replaced, never changed.
    """

    def __init__(self, gauges: Gauges, interval_s: float = 0.01) -> None:
        self.peak_active_bytes = 0
        self.peak_total_bytes = 0
        self.sampled = Sampled()
        self.hard_bytes = 0
        self._gauges = gauges
        self._interval_s = interval_s
        self._working = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="omlxd-sampler", daemon=True)

    def start(self) -> None:
        """Begin; it sleeps until `work(True)`."""
        self._thread.start()

    def work(self, working: bool) -> None:
        """Whether the engine has work; an idle engine is not sampled."""
        if working:
            self._working.set()
        else:
            self._working.clear()

    def stop(self) -> None:
        """End the thread; idempotent."""
        self._ended.set()
        self._working.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            self._working.wait()
            if self._ended.wait(self._interval_s):
                return
            active, total = self._look()
            self.peak_active_bytes = max(self.peak_active_bytes, active)
            self.peak_total_bytes = max(self.peak_total_bytes, total)
            seen, over_bytes = self.sampled, total - self.hard_bytes if self.hard_bytes else 0
            self.sampled = Sampled(
                seen.samples + 1, seen.over_hard_samples + (over_bytes > 0), max(seen.over_hard_bytes, over_bytes)
            )

    def _look(self) -> tuple[int, int]:
        """`active`, and `active + cache` without a buffer that was freed or taken again between the two gauges."""
        before, cache, after = self._gauges.active_bytes(), self._gauges.cache_bytes(), self._gauges.active_bytes()
        return max(before, after), min(before, after) + cache


def tame_glibc() -> None:
    """Make glibc give freed memory back: RSS beyond MLX's own grew to 775 MB in 40 requests without, 98 MB with.

    Prefill is 1 to 11 % slower for it, decode the same. Does nothing on other C libraries.
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    m_trim_threshold, m_mmap_threshold = -1, -3
    mallopt(m_mmap_threshold, 128 * 1024)
    mallopt(m_trim_threshold, 128 * 1024)


def trim_heap() -> None:
    """Give the C library's free pages back to the system (17 ms; 407 -> 138 MB seen after an unload)."""
    if sys.platform != "linux":
        return
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return


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
