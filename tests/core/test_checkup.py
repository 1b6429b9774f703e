"""What the doctor concludes, by tables."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from omlxd.core.checkup import (
    EARLIEST_S,
    MIB,
    MLX_SERIES,
    Finding,
    Health,
    judge_clock,
    judge_device,
    judge_disk,
    judge_limits,
    judge_lock,
    judge_logs,
    judge_promised,
    judge_running,
    judge_service,
    judge_stale,
    judge_version,
    wired_limit_command,
)
from omlxd.core.limits import GIB, Machine, resolve_limits

OK, WARNING, WRONG = Health.OK, Health.WARNING, Health.WRONG
NOW_S = 1_800_000_000.0


def serviced(state: str = "running", **seen: Any) -> Finding:
    plain = {"enabled": True, "edited": False, "last_exit": None, "missing": None, "other": None}
    return judge_service("systemd", state, **(plain | seen))


@pytest.mark.parametrize(
    ("finding", "health"),
    [
        (judge_version("mlx", "0.32.4"), OK),
        (judge_version("mlx", "0.32"), OK),
        (judge_version("mlx", "0.3.2"), WRONG),
        (judge_version("mlx", "0.33.0"), WRONG),
        (judge_version("mlx", None), WRONG),
        (judge_device(Machine(16 * GIB), None), OK),
        (judge_device(Machine(16 * GIB, 12 * GIB, "metal"), 0), OK),
        (judge_device(Machine(16 * GIB, 15 * GIB, "metal"), 15 * GIB), OK),
        (judge_device(Machine(16 * GIB, 16 * GIB, "metal"), 15565 * MIB), WARNING),
        (judge_lock(False, None), OK),
        (judge_lock(True, 4711), OK),
        (judge_lock(True, None), WARNING),
        (judge_promised(4 * GIB, 4 * GIB, 8 * GIB), OK),
        (judge_promised(4 * GIB, 4 * GIB + 1, 8 * GIB), WARNING),
        (judge_promised(8 * GIB + 1, 0, 8 * GIB), WRONG),
        (judge_promised(80 * GIB, 0, 0), OK),
        (judge_disk(10 * GIB), OK),
        (judge_disk(500 * MIB), WARNING),
        (judge_disk(99 * MIB), WRONG),
        (judge_logs(10, 10), OK),
        (judge_logs(11, 10), WARNING),
        (judge_stale([]), OK),
        (judge_stale(["state.toml.damaged"]), WARNING),
        (judge_clock(NOW_S, NOW_S + 60), OK),
        (judge_clock(NOW_S, NOW_S + 3600), WARNING),
        (judge_clock(EARLIEST_S - 1.0, 0.0), WRONG),
        (serviced(), OK),
        (serviced(edited=True), OK),
        (serviced("stopped"), OK),
        (serviced("failed", last_exit=78), WRONG),
        (serviced(enabled=False), WARNING),
        (serviced(missing="/opt/old/bin/python"), WRONG),
        (serviced("stopped", other=4711), WARNING),
        (judge_running("1.0", "1.0", "ready", "ok"), OK),
        (judge_running("0.9", "1.0", "ready", "ok"), WARNING),
        (judge_running("1.0", "1.0", "ready", "exhausted"), WARNING),
    ],
)
def test_a_finding_has_a_remedy_where_something_is_to_be_done(finding: Finding, health: Health) -> None:
    assert finding.health is health
    assert (finding.remedy is None) == (health is OK)


def test_a_limit_above_what_metal_allows_names_the_exact_command() -> None:
    machine = Machine(16 * GIB, 12 * GIB, "metal")
    finding = judge_limits(resolve_limits(14 * GIB, None, machine), machine)
    assert finding.health is WARNING
    assert finding.remedy == "lower `max_memory`, or `sudo sysctl iogpu.wired_limit_mb=15564`"
    assert judge_limits(resolve_limits(10 * GIB, None, machine), machine).health is OK


def test_the_device_line_tells_what_metal_would_allow_and_what_the_user_has_set() -> None:
    machine = Machine(16 * GIB, 12 * GIB, "metal")
    command = "`sudo sysctl iogpu.wired_limit_mb=15564`"
    assert judge_device(machine, 0).found == f"metal allows 12.0 GiB of 16.0 GiB, until the next boot more by {command}"
    assert judge_device(machine, 12 * GIB).found.endswith("by `iogpu.wired_limit_mb`")
    greedy = judge_device(Machine(16 * GIB, 16 * GIB, "metal"), 16 * GIB)
    assert greedy.found == "the wired limit 16.0 GiB leaves the system less than 5 %"
    assert greedy.remedy == command
    assert judge_device(Machine(16 * GIB, 4 * GIB, "cgroup"), None).found == "cgroup allows 4.00 GiB of 16.0 GiB"


def test_elsewhere_no_sysctl_helps() -> None:
    machine = Machine(16 * GIB, 12 * GIB, "cgroup")
    assert judge_limits(resolve_limits(14 * GIB, None, machine), machine).remedy == "lower `max_memory`"


@pytest.mark.parametrize("ram_gib", [8, 16, 36, 192])
def test_the_wired_limit_leaves_the_system_five_percent(ram_gib: int) -> None:
    wired_bytes = int(wired_limit_command(ram_gib * GIB).rpartition("=")[2]) * MIB
    assert 0.05 <= 1 - wired_bytes / (ram_gib * GIB) < 0.0502


def test_the_series_is_the_one_that_is_asked_for_at_installation() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for package in ("mlx", "mlx-lm"):
        (wanted,) = [each for each in project["dependencies"] if each.startswith(f"{package}>")]
        assert f">={MLX_SERIES}" in wanted
        assert wanted.endswith(",<0.33")
