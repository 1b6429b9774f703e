"""The C library keeps what is freed: how it is told to give it back."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

KEPT_BYTES: Final = 1024 * 1024
"""What is freed in larger pieces goes back to the system at once."""


def tame_glibc() -> None:
    """Make glibc give freed memory back: RSS beyond MLX's own grew to 775 MB in 40 requests without.

    A threshold of 128 KiB keeps it at 5 MiB, but every buffer then comes in fresh pages: with a fast BLAS 40 requests
    took 41.8 s, and 34.2 untamed (2 µs a page). With 1 MiB they take 38.3 s and leave 40 to 70 MiB in the heap, which
    the gauges give back once a second (`trim_heap`). Does nothing on other C libraries.
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    m_trim_threshold, m_mmap_threshold = -1, -3
    mallopt(m_mmap_threshold, KEPT_BYTES)
    mallopt(m_trim_threshold, KEPT_BYTES)


def trim_heap() -> None:
    """Give the C library's free pages back to the system (17 ms; 407 -> 138 MB seen after an unload)."""
    if sys.platform != "linux":
        return
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return
