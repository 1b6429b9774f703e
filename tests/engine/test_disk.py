"""What the process has read from disks: read where the system counts it, unknown and never wrong elsewhere."""

from __future__ import annotations

import struct

import pytest

from omlxd.engine import disk


def test_macos_counts_disk_reads_behind_the_footprint_and_the_childrens_times() -> None:
    counters = list(range(100, 118))
    raw = bytes(16) + struct.pack("=18Q", *counters)
    assert len(raw) == disk.RUSAGE_INFO_V2_BYTES
    assert disk.disk_read_of(raw) == counters[16]


@pytest.mark.parametrize(
    ("before", "now", "since"),
    [(1000, 5000, 4000), (0, 5000, 5000), (5000, 5000, 0), (0, 0, None)],
)
def test_nobody_counts_where_not_one_byte_was_ever_read(
    before: int, now: int, since: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "disk_read_bytes", lambda: now)
    assert disk.disk_read_since(before) == since


def test_this_system_is_asked_without_an_error() -> None:
    assert disk.disk_read_bytes() >= 0
