"""What the machine has: RAM, the container's limit, the device's cap."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from omlxd.daemon.machine import find_machine

RAM_BYTES = psutil.virtual_memory().total


def test_without_any_cap_the_machine_is_its_memory(tmp_path: Path) -> None:
    machine = find_machine(None, tmp_path)
    assert (machine.ram_bytes, machine.device_cap_bytes, machine.cap_source) == (RAM_BYTES, None, "ram")


@pytest.mark.parametrize("source", ["metal", "cuda"])
def test_the_device_caps(tmp_path: Path, source: str) -> None:
    machine = find_machine((RAM_BYTES // 2, source), tmp_path)
    assert (machine.cap_bytes, machine.cap_source) == (RAM_BYTES // 2, source)


def test_a_container_caps_and_the_tighter_of_the_two_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{RAM_BYTES // 4}\n")
    assert find_machine(None, tmp_path).cap_source == "cgroup"
    assert find_machine((RAM_BYTES // 2, "metal"), tmp_path).cap_bytes == RAM_BYTES // 4
    assert find_machine((RAM_BYTES // 8, "metal"), tmp_path).cap_source == "metal"


@pytest.mark.parametrize("text", ["max\n", "", "-1\n", "9223372036854771712\n", "nonsense\n"])
def test_a_container_without_a_limit_does_not_cap(tmp_path: Path, text: str) -> None:
    (tmp_path / "memory.max").write_text(text)
    assert find_machine(None, tmp_path).cap_source == "ram"


def test_the_old_layout_of_cgroups_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(str(RAM_BYTES // 2))
    assert find_machine(None, tmp_path).cap_source == "cgroup"
