"""Imports of what stays for as long as the process: the garbage collector never goes through it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting_imports() -> Iterator[None]:
    """What is made inside stays for good, and the collector leaves it out, inside and later.

    With all of mlx-lm's modules in it a collection holds the interpreter's lock for 60 to 130 ms, in which nobody is
    answered: while they are imported two of them, and one at each unload. They make hardly any garbage; what there is
    before is collected first, so that it does not stay with them.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
