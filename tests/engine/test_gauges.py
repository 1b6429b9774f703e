"""Gauges with recorded figures: what Metal, CUDA and the CPU say, and what omlxd makes of it."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from omlxd.core.errors import StartFailed
from omlxd.core.memory import MemoryReading, Policy
from omlxd.core.policy import decide
from omlxd.core.snapshot import EntrySnapshot, Limits, Snapshot
from omlxd.core.states import EntryState
from omlxd.engine import backends
from omlxd.engine.backends import CPU_SLACK_BYTES, CUDA_SLACK_BYTES, CudaBackend, MetalBackend, phys_footprint_of
from omlxd.engine.gauges import CACHE_CEILING_BYTES, HEAP_BYTES, SAMPLE_S, SAMPLES, SETTLE_S, Gauges
from omlxd.engine.orders import MIB, EngineLimits

GIB = 1024 * MIB
M2_64GB = {
    "architecture": "applegpu_g14s",
    "max_buffer_length": 36 * GIB,
    "max_recommended_working_set_size": 51_539_607_552,
    "memory_size": 68_719_476_736,
}
H200 = {"device_name": "NVIDIA H200", "total_memory": 150_754_820_096, "free_memory": 150_196_977_664}


@dataclass
class RecordedBackend:
    """A backend whose footprint is played back."""

    name: str = "cpu"
    slack_bytes: int = CPU_SLACK_BYTES
    footprint: int = 0

    def footprint_bytes(self) -> int:
        return self.footprint

    def device_cap(self) -> tuple[int, str] | None:
        return None

    def wired_limit_bytes(self) -> int | None:
        return None


@dataclass
class RecordedMlx:
    """MLX's gauges and knobs, played back."""

    active: int = 0
    cache: int = 0
    cache_limits: list[int] = field(default_factory=list)

    def get_active_memory(self) -> int:
        return self.active

    def get_cache_memory(self) -> int:
        return self.cache

    def set_cache_limit(self, limit: int) -> int:
        self.cache_limits.append(limit)
        return 0


def gauges(backend: RecordedBackend, mlx: RecordedMlx, now: list[float], base: int = 80 * MIB) -> Gauges:
    made = Gauges(backend, clock=lambda: now[0])
    made.base_bytes = base
    made._mx = mlx
    return made


def test_the_wired_limit_of_metal_wins_over_what_the_driver_recommends() -> None:
    assert MetalBackend(lambda: M2_64GB, lambda: 0).device_cap() == (51_539_607_552, "metal")
    assert MetalBackend(lambda: M2_64GB, lambda: 57_344).device_cap() == (57_344 * MIB, "metal")
    assert MetalBackend(lambda: M2_64GB, lambda: 57_344).wired_limit_bytes() == 57_344 * MIB


def test_a_device_that_says_nothing_has_no_cap() -> None:
    assert MetalBackend(dict, lambda: 0).device_cap() is None
    assert CudaBackend(dict).device_cap() is None


def test_cuda_caps_at_the_memory_of_the_device() -> None:
    assert CudaBackend(lambda: H200).device_cap() == (150_754_820_096, "cuda")


def test_the_footprint_of_macos_is_read_at_its_place_in_the_structure() -> None:
    raw = bytes(16) + struct.pack("=7Q", *range(7)) + struct.pack("=3Q", 987_654_321, 1, 2)
    assert phys_footprint_of(raw) == 987_654_321


def settled(made: Gauges, now: list[float]) -> MemoryReading:
    """The reading when the footprint has stayed as it is for as long as it takes to be believed."""
    for _ in range(SAMPLES):
        now[0] += SAMPLE_S
        reading = made.read(at_rest=True)
    return reading


def test_overhead_is_what_the_footprint_shows_beyond_base_active_cache_and_slack() -> None:
    backend, now = RecordedBackend(footprint=80 * MIB + 500 * MIB + 30 * MIB + CPU_SLACK_BYTES + 7 * MIB), [10.0]
    reading = settled(gauges(backend, RecordedMlx(active=500 * MIB, cache=30 * MIB), now), now)
    assert reading.overhead_bytes == 7 * MIB
    assert reading.used_bytes == 507 * MIB


def test_the_figures_of_nvml_lie_within_the_slack_of_cuda() -> None:
    backend, now = RecordedBackend("cuda", CUDA_SLACK_BYTES, footprint=8 * GIB + 2_800_000_000), [10.0]
    assert settled(gauges(backend, RecordedMlx(active=8 * GIB), now, base=0), now).overhead_bytes == 0


def test_what_the_heap_has_kept_is_given_back_and_what_stays_is_not_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, now, trimmed = RecordedBackend(footprint=80 * MIB + HEAP_BYTES), [10.0], []
    made = gauges(backend, RecordedMlx(), now)

    def trim() -> None:
        trimmed.append(backend.footprint)
        backend.footprint -= HEAP_BYTES

    monkeypatch.setattr("omlxd.engine.gauges.trim_heap", trim)
    settled(made, now)
    assert not trimmed, "so much may stay"
    backend.footprint += 200 * MIB  # somebody else's, for good
    assert settled(made, now).footprint_bytes == 80 * MIB + 200 * MIB
    backend.footprint += HEAP_BYTES
    settled(made, now)
    assert len(trimmed) == 1
    backend.footprint += 1
    settled(made, now)
    assert len(trimmed) == 2
    backend.footprint -= 200 * MIB  # it has gone after all
    settled(made, now)
    backend.footprint += HEAP_BYTES + 1
    settled(made, now)
    assert len(trimmed) == 3, "and is no room for the heap"


@pytest.mark.parametrize("name", ["metal", "cuda"])
def test_where_buffers_do_not_come_from_the_heap_it_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("omlxd.engine.gauges.trim_heap", lambda: pytest.fail("not here"))
    settled(gauges(RecordedBackend(name, footprint=3 * GIB), RecordedMlx(), now), now)


def test_a_lagging_footprint_is_not_believed_after_a_load_or_an_unload() -> None:
    now = [10.0]
    backend, mlx = RecordedBackend(), RecordedMlx(active=0)
    made = gauges(backend, mlx, now)
    backend.footprint = 80 * MIB + 2 * GIB  # the model is gone, its pages are not yet
    made.unsettle()
    while now[0] < 10.0 + SETTLE_S:
        assert made.read(at_rest=True).overhead_bytes == 0
        assert not made.sample_due
        now[0] += 0.1
    assert settled(made, now).overhead_bytes == 2 * GIB - CPU_SLACK_BYTES


def test_a_reading_inside_a_step_keeps_the_overhead_of_the_last_one_at_rest() -> None:
    backend, mlx, now = RecordedBackend(footprint=80 * MIB), RecordedMlx(), [10.0]
    made = gauges(backend, mlx, now)
    made.read(at_rest=True)
    backend.footprint += 3 * GIB
    for _ in range(10):
        now[0] += SAMPLE_S
        assert made.read(at_rest=False).overhead_bytes == 0


def test_many_readings_in_a_row_are_one_sample() -> None:
    backend, now = RecordedBackend(footprint=3 * GIB), [10.0]
    made = gauges(backend, RecordedMlx(), now)
    for _ in range(100):
        now[0] += SAMPLE_S / 100
        assert made.read(at_rest=True).overhead_bytes == 0


SWINGING = (130, 20, 210, 140, 0, 150, 90, 220, 160, 30)
"""Footprint beyond base, active and slack in MiB, second by second, of a process whose pages come and go."""


def decisions(made: Gauges, backend: RecordedBackend, mlx: RecordedMlx, now: list[float], figures: list[int]) -> int:
    """How many of these seconds would have caused work, with 100 MiB between what is active and the limit."""
    limits = Limits(mlx.active + 100 * MIB, mlx.active + 10 * GIB, policy=Policy.GRACEFUL)
    models = tuple(EntrySnapshot(name, EntryState.LOADED, weights_bytes=MIB) for name in ("a", "b"))
    worked = 0
    for figure in figures:
        now[0] += 1.0
        backend.footprint = 80 * MIB + mlx.active + CPU_SLACK_BYTES + figure * MIB
        worked += decide(Snapshot(now[0], made.read(at_rest=True), models), limits).action is not None
    return worked


def test_a_footprint_that_swings_round_the_limit_causes_no_work_and_one_that_stays_above_it_does() -> None:
    backend, mlx, now = RecordedBackend(), RecordedMlx(active=500 * MIB), [10.0]
    made = gauges(backend, mlx, now)
    assert decisions(made, backend, mlx, now, [*SWINGING] * 6) == 0
    assert decisions(made, backend, mlx, now, [130] * SAMPLES) == 1
    assert decisions(made, backend, mlx, now, [90]) == 0


def test_a_footprint_that_lags_behind_what_was_freed_costs_nobody_another_model() -> None:
    """The first unload suffices by MLX's gauge; the pages follow over four seconds."""
    backend, mlx, now = RecordedBackend(footprint=80 * MIB + 500 * MIB), RecordedMlx(active=500 * MIB), [10.0]
    made = gauges(backend, mlx, now)
    settled(made, now)
    mlx.active = 300 * MIB
    made.unsettle()
    assert decisions(made, backend, mlx, now, [200, 200, 150, 90, 60, 10, 0]) == 0


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (0, 0, CACHE_CEILING_BYTES),
        (GIB, GIB + 20 * MIB, 10 * MIB),
        (GIB, GIB, 0),
        (GIB, 60 * GIB, GIB // 4),
        (GIB, 0, GIB // 4),
        (100 * MIB, 60 * GIB, 32 * MIB),
        (8 * GIB, 60 * GIB, CACHE_CEILING_BYTES),
    ],
)
def test_mlxs_cache_takes_a_part_of_the_soft_limit_and_of_what_is_above_it(soft: int, hard: int, expected: int) -> None:
    mlx = RecordedMlx()
    gauges(RecordedBackend(), mlx, [0.0]).obey(EngineLimits(soft_bytes=soft, hard_bytes=hard))
    assert mlx.cache_limits == [expected]


def test_mlxs_cache_is_capped_by_what_a_step_leaves_and_never_above_what_the_limits_allow() -> None:
    mlx = RecordedMlx(cache=4 * MIB)
    made = gauges(RecordedBackend(), mlx, [0.0])
    made.obey(EngineLimits(soft_bytes=GIB, hard_bytes=GIB + 20 * MIB))
    assert [made.cap_cache(room) for room in (8 * MIB, 3 * MIB, -MIB, GIB)] == [False, True, True, False]
    assert mlx.cache_limits == [10 * MIB, 8 * MIB, 3 * MIB, 0, 10 * MIB]


def test_before_mlx_is_imported_every_figure_of_it_is_zero() -> None:
    made: Any = Gauges(RecordedBackend(footprint=40 * MIB))
    reading = made.read(at_rest=True)
    assert (reading.active_bytes, reading.cache_bytes, reading.overhead_bytes) == (0, 0, 0)
    assert reading.footprint_bytes == 40 * MIB
    assert reading.system_total_bytes > reading.system_available_bytes > 0


def test_an_mlx_without_a_backend_is_refused_with_the_line_that_installs_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").touch()  # what `pip install mlx` alone leaves on Linux: no lib/libmlx.so
    monkeypatch.setattr(backends.sys, "platform", "linux")
    monkeypatch.setattr(backends, "_has", lambda name: False)
    monkeypatch.setattr(backends.sys, "path", [str(tmp_path)])
    monkeypatch.delitem(backends.sys.modules, "mlx", raising=False)
    with pytest.raises(StartFailed, match="without a backend") as refused:
        backends.detect_backend()
    assert "omlxd[cpu]" in str(refused.value.hint)


def test_the_backend_follows_from_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.sys, "platform", "darwin")
    assert backends.detect_backend().name == "metal"
    monkeypatch.setattr(backends.sys, "platform", "linux")
    monkeypatch.setattr(backends, "_has", lambda name: name == "mlx-cuda-12")
    assert backends.detect_backend().name == "cuda"
