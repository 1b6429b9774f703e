"""What this process has read from disks: tells a load from the disk from one out of the system's page cache."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path

RUSAGE_INFO_V2 = 2
RUSAGE_INFO_V2_BYTES = 160
DISK_READ_OFFSET = 144  # ri_diskio_bytesread: after a 16-byte uuid and sixteen 64-bit counters (<sys/resource.h>)


def disk_read_bytes() -> int:
    """Bytes that this process has had read from disks so far, mapped files included; 0 where nobody counts them.

    Linux counts in /proc/self/io, macOS in `rusage_info_v2` (not yet verified on hardware).
    """
    try:
        return _read_on_macos(os.getpid()) if sys.platform == "darwin" else _read_on_linux()
    except (OSError, AttributeError):
        return 0


def disk_read_since(before_bytes: int) -> int | None:
    """What was read since `disk_read_bytes` gave this; None where nobody counts: not one byte since the process began.

    That may also be said of a process that has found all it ever read in the page cache.
    """
    now_bytes = disk_read_bytes()
    return max(0, now_bytes - before_bytes) if now_bytes else None


def _read_on_linux() -> int:
    found = re.search(r"^read_bytes: (\d+)$", Path("/proc/self/io").read_text(encoding="ascii"), re.MULTILINE)
    return int(found[1]) if found else 0


def _read_on_macos(pid: int) -> int:
    buffer = ctypes.create_string_buffer(RUSAGE_INFO_V2_BYTES)
    if ctypes.CDLL("libproc.dylib").proc_pid_rusage(pid, RUSAGE_INFO_V2, buffer) != 0:
        return 0
    return disk_read_of(buffer.raw)


def disk_read_of(rusage_info_v2: bytes) -> int:
    """`ri_diskio_bytesread` of a raw `rusage_info_v2`."""
    return int.from_bytes(rusage_info_v2[DISK_READ_OFFSET : DISK_READ_OFFSET + 8], sys.byteorder)
