"""Which BLAS multiplies MLX's float32 matrices on the CPU: its wheel's own, or the system's OpenBLAS."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from typing import Final

VARIABLE: Final = "OMLXD_BLAS"
BUNDLED: Final = "bundled"
OPENBLAS: Final = "libopenblas.so.0"


SPIN_VARIABLE: Final = "OPENBLAS_THREAD_TIMEOUT"
SPIN: Final = "25"
"""How long OpenBLAS's threads go round in circles after their last task before they sleep: 2^25 ticks, some 12 ms.

Its own is a tenth of a second. Behind a prompt they took a core from the first dozen tokens of its answer, where there
are two: 7.7 ms a token instead of 5.7. With much less they sleep between the matrices of one step, and are late for
the next."""


def adopt_openblas() -> None:
    """Let MLX find OpenBLAS's functions, where there is one, before those of its wheel, once it is imported.

    The wheel for Linux brings the reference BLAS: one thread, 1.7 GFLOP/s where OpenBLAS has 90 to 125 on the same two
    cores (prompts of 64 tokens and more; 4 for a single row, which waits for memory). A library that is loaded for
    everybody comes first in the search for a symbol, so nothing is replaced and nothing has to be set. Without effect
    when MLX is imported already, and with `OMLXD_BLAS=bundled`. A preloaded one has read its environment before this.
    """
    if is_wanted():
        os.environ.setdefault(SPIN_VARIABLE, SPIN)
        with suppress(OSError):
            ctypes.CDLL(OPENBLAS, mode=ctypes.RTLD_GLOBAL)


def is_wanted() -> bool:
    """Whether OpenBLAS would make a difference here, and nobody has said otherwise."""
    return sys.platform == "linux" and os.environ.get(VARIABLE) != BUNDLED


def has_openblas() -> bool:
    """Whether there is one."""
    with suppress(OSError):
        ctypes.CDLL(OPENBLAS)
        return True
    return False
