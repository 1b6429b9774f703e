"""Every number about memory, and every knob MLX has for it; what differs between Metal, CUDA and CPU is a `Backend`.

`used = active + overhead` and `overhead = max(0, footprint - cache - active - base - slack)`: what the operating system
charges the process beyond what MLX's own gauge sees. The footprint lags behind what is freed, and swings by itself, so
the overhead is slow: sampled at rest, at most once in `SAMPLE_S`, never within `SETTLE_S` of a load or an unload, and
it is the least of the last `SAMPLES`. What is really there stays and is seen; what comes and goes costs nobody a thing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil

from omlxd.core.memory import MemoryReading
from omlxd.engine.backends import Backend
from omlxd.engine.glibc import trim_heap
from omlxd.engine.orders import MIB, EngineLimits

SETTLE_S = 2.0
SAMPLE_S = 1.0
SAMPLES = 3
HEAP_BYTES = 32 * MIB  # of freed pieces that the C library may keep: getting its pages anew costs time
CACHE_CEILING_BYTES = 1024 * MIB  # of freed buffers that MLX may keep
CACHE_UNDER_LOW_LIMITS_BYTES = 32 * MIB  # at least, what MLX itself keeps on the CPU
CACHE_STEP_BYTES = MIB  # the cache's limit before a step is a multiple of it, so that it seldom changes


class Gauges:
    """Reads memory and turns MLX's knobs; zeros until `attach` is told that MLX is imported.

    Args:
        backend: where MLX runs.
        clock: monotonic seconds.

    Attributes:
        backend: where MLX runs.
        base_bytes: the footprint before any model.
        cache_room_bytes: freed buffers that MLX may keep under the limits in force.
    """

    def __init__(self, backend: Backend, clock: Callable[[], float] = time.monotonic) -> None:
        self.backend = backend
        self.base_bytes = 0
        self._clock = clock
        self._mx: Any = None
        self._overheads = (0,) * SAMPLES  # replaced, never changed: two threads read it
        self._unsettled_until = 0.0
        self._sampled_at = float("-inf")
        self.cache_room_bytes = CACHE_CEILING_BYTES
        self._cache_limit_bytes = -1  # nothing told yet
        self._beside_bytes = 0  # what was left beside MLX when the heap was given back last
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
        """Set MLX's cache limit: a quarter of the soft limit, and at most half of what lies between the limits.

        Nobody who says 200 MB means a process of 1.3 GB, though the cache is no part of what the soft limit counts.
        The ceiling is below Metal's default, which is as large as its memory limit, and above the CPU's of 32 MiB: a
        step that reads eight prompts takes more, and what MLX does not keep comes in fresh pages (36,000 in such a
        step, 2 µs each). No memory limit is set: on the CPU it is back-pressure that costs time, and on Metal it caused
        churn and swap during loads.
        """
        if not self._mx:
            return
        room = CACHE_CEILING_BYTES
        if limits.soft_bytes:
            room = min(room, max(CACHE_UNDER_LOW_LIMITS_BYTES, limits.soft_bytes // 4))
        if limits.soft_bytes and limits.hard_bytes:
            room = min(room, max(0, limits.hard_bytes - limits.soft_bytes) // 2)
        self.cache_room_bytes = room
        self._limit_cache(self.cache_room_bytes)

    def cap_cache(self, room_bytes: int) -> bool:
        """Let MLX's cache take at most `room_bytes`, and what the limits allow; True when it holds more already."""
        if not self._mx:
            return False
        allowed_bytes = max(0, min(room_bytes // CACHE_STEP_BYTES * CACHE_STEP_BYTES, self.cache_room_bytes))
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
        self._read_footprint()
        if at_rest and self.sample_due:
            self._sampled_at = self._clock()
            self._trim_heap(active + cache + self.base_bytes)
            overhead = max(0, self._footprint_bytes - cache - active - self.base_bytes - self.backend.slack_bytes)
            self._overheads = (*self._overheads[1:], overhead)
        total, available = self._system_memory()
        return MemoryReading(
            active_bytes=active,
            cache_bytes=cache,
            footprint_bytes=self._footprint_bytes,
            base_bytes=self.base_bytes,
            overhead_bytes=min(self._overheads),
            system_total_bytes=total,
            system_available_bytes=available,
            at_rest=at_rest,
        )

    def _read_footprint(self) -> None:
        try:
            self._footprint_bytes = self.backend.footprint_bytes()
        except OSError:
            pass  # no file may be opened to ask in: what was seen last counts

    def _trim_heap(self, known_bytes: int) -> None:
        """On the CPU, MLX's buffers come from the C library: when it has kept too many, it gives them back."""
        if self.backend.name != "cpu":
            return
        beside_bytes = max(0, self._footprint_bytes - known_bytes)
        self._beside_bytes = min(self._beside_bytes, beside_bytes)  # what was not the heap's may have gone by itself
        if beside_bytes <= self._beside_bytes + HEAP_BYTES:
            return
        trim_heap()
        self._read_footprint()
        self._beside_bytes = max(0, self._footprint_bytes - known_bytes)

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
