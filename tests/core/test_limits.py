"""The soft limit (R2), the hard limit (R3), `auto`, and the caps of device and container."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.core.errors import InvalidRequest
from omlxd.core.limits import Machine, MemoryLimits, auto_limit, resolve_limits
from omlxd.core.states import LimitOrigin

GIB = 2**30


def metal(ram_gib: int, cap_gib: int) -> Machine:
    return Machine(ram_bytes=ram_gib * GIB, device_cap_bytes=cap_gib * GIB, device_cap_source="metal")


@pytest.mark.parametrize(
    ("soft_gib", "machine", "hard_gib"),
    [
        (8, Machine(16 * GIB), 12),  # RAM - 4 GiB is the larger
        (14, Machine(16 * GIB), 14),  # the soft limit is the larger
        (12, Machine(16 * GIB), 12),  # both the same
        (16, Machine(16 * GIB), 16),  # never more than the machine
        (2, Machine(3 * GIB), 2),  # RAM - 4 GiB is below 0
        (8, metal(64, 48), 48),  # never more than the device allows
        (48, metal(64, 48), 48),
        (8, metal(64, 62), 60),
        (40, Machine(32 * GIB, 80 * GIB, "cuda"), 40),  # a device's memory is not RAM
        (8, Machine(256 * GIB, 16 * GIB, "cgroup"), 16),
    ],
)
def test_r3_the_hard_limit_is_the_larger_of_soft_and_ram_less_4_gib_within_the_cap(
    soft_gib: int, machine: Machine, hard_gib: int
) -> None:
    assert resolve_limits(soft_gib * GIB, None, machine) == MemoryLimits(soft_gib * GIB, hard_gib * GIB, "max_memory")


@pytest.mark.parametrize("max_memory", [0, -1, -GIB])
@pytest.mark.parametrize(
    ("machine", "hard_gib"), [(Machine(16 * GIB), 12), (metal(64, 48), 48), (Machine(4 * GIB), 0), (Machine(GIB), 0)]
)
def test_r2_a_soft_limit_of_0_or_less_means_no_enforcement(max_memory: int, machine: Machine, hard_gib: int) -> None:
    assert resolve_limits(max_memory, None, machine) == MemoryLimits(0, hard_gib * GIB, "max_memory")


@pytest.mark.parametrize(
    ("machine", "binding", "cap_gib"),
    [
        (metal(64, 48), "metal", 48),
        (Machine(64 * GIB, 24 * GIB, "cuda"), "cuda", 24),
        (Machine(64 * GIB, 8 * GIB, "cgroup"), "cgroup", 8),
        (Machine(64 * GIB), "ram", 64),
        (Machine(16 * GIB, 99 * GIB, "cgroup"), "ram", 16),  # a container may be promised more than there is
    ],
)
def test_a_soft_limit_above_the_cap_becomes_95_percent_of_it_loudly(
    machine: Machine, binding: str, cap_gib: int
) -> None:
    limits = resolve_limits(100 * GIB, None, machine)
    assert limits.soft_bytes == cap_gib * GIB * 95 // 100
    assert limits.binding == binding
    (warning,) = limits.warnings
    assert "`max_memory` 100 GiB" in warning
    assert binding in warning


@pytest.mark.parametrize(
    ("origin", "said"),
    [
        (LimitOrigin.MANIFEST, "max_memory"),
        (LimitOrigin.LIMIT, "omlxd limit"),
        (LimitOrigin.COMMAND_LINE, "--max-memory"),
    ],
)
def test_a_limit_is_named_by_who_said_it_also_in_what_is_wrong_with_it(origin: LimitOrigin, said: str) -> None:
    assert resolve_limits(8 * GIB, None, metal(64, 48), origin).set_by == said
    capped = resolve_limits(100 * GIB, None, metal(64, 48), origin)
    assert (capped.set_by, capped.warnings[0].startswith(f"`{said}` 100 GiB is above")) == ("metal", True)
    with pytest.raises(InvalidRequest, match=rf"below the soft limit 8.00 GiB \({said}\)"):
        resolve_limits(8 * GIB, 4 * GIB, metal(64, 48), origin)


def test_a_soft_limit_equal_to_the_cap_stays_as_it_is_without_a_warning() -> None:
    limits = resolve_limits(48 * GIB, None, metal(64, 48))
    assert (limits.soft_bytes, limits.binding, limits.warnings) == (48 * GIB, "max_memory", ())


@pytest.mark.parametrize(("soft_gib", "hard_gib"), [(8, 8), (8, 9), (8, 48), (0, 10), (0, 0)])
def test_an_explicit_hard_limit_between_soft_and_cap_is_taken(soft_gib: int, hard_gib: int) -> None:
    assert resolve_limits(soft_gib * GIB, hard_gib * GIB, metal(64, 48)).hard_bytes == hard_gib * GIB


def test_an_explicit_hard_limit_below_the_soft_limit_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"below the soft limit 8.00 GiB \(max_memory\)") as refused:
        resolve_limits(8 * GIB, 8 * GIB - 1, Machine(16 * GIB))
    assert "8.00 GiB or more" in (refused.value.hint or "")
    assert refused.value.details["soft_limit_bytes"] == 8 * GIB


@pytest.mark.parametrize("machine", [metal(64, 48), Machine(99 * GIB, 48 * GIB, "cuda"), Machine(48 * GIB)])
def test_an_explicit_hard_limit_above_the_cap_is_refused_and_names_the_part(machine: Machine) -> None:
    with pytest.raises(InvalidRequest, match=machine.cap_source) as refused:
        resolve_limits(8 * GIB, 48 * GIB + 1, machine)
    assert "lower `hard_limit` to 48.0 GiB" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("machine", "auto_gib"),
    [
        (Machine(8 * GIB), 4),  # RAM/2
        (Machine(16 * GIB), 8),  # both the same
        (Machine(64 * GIB), 56),  # RAM - 8 GiB
        (metal(64, 50), 45),  # 0.9 of the cap
        (metal(16, 11), 8),
        (Machine(64 * GIB, 10 * GIB, "cgroup"), 9),
    ],
)
def test_auto_is_the_larger_of_half_and_all_but_8_gib_within_90_percent_of_the_cap(
    machine: Machine, auto_gib: int
) -> None:
    assert auto_limit(machine) == auto_gib * GIB
    assert resolve_limits(auto_limit(machine), None, machine).warnings == ()


@given(
    st.integers(-(2**40), 2**44),
    st.integers(1, 2**42),
    st.one_of(st.none(), st.tuples(st.integers(1, 2**42), st.sampled_from(["metal", "cuda", "cgroup"]))),
)
def test_soft_is_at_most_hard_and_hard_at_most_the_cap(max_memory: int, ram: int, cap: tuple[int, str] | None) -> None:
    machine = Machine(ram, *(cap or (None, None)))  # type: ignore[arg-type]
    limits = resolve_limits(max_memory, None, machine)
    assert 0 <= limits.soft_bytes <= limits.hard_bytes <= machine.cap_bytes
    assert limits.soft_bytes <= max(0, max_memory)
    assert bool(limits.warnings) == (limits.binding != "max_memory")
