"""What an exception inside a step means: to the request that hears of it, and to the log."""

from __future__ import annotations

import errno
import os
import re
import traceback
from pathlib import Path
from typing import Final

from omlxd.core.errors import Busy, EngineFailed

_OUT_OF_MEMORY: Final = re.compile(
    r"out of memory|unable to allocate|attempting to allocate|resource limit \(\d+\) exceeded|bad_alloc"
    r"|insufficient memory|OutOfMemory",
    re.IGNORECASE,
)
"""How MLX says so: `[malloc] Unable to allocate`, `[metal::malloc] Attempting to allocate ... greater than` or
`Resource limit (N) exceeded`, a Metal command buffer's `Insufficient Memory`, CUDA's `out of memory`."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device, or the system, had no memory left for an array."""
    return isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error)) is not None


def is_out_of_files(error: BaseException) -> bool:
    """Whether it was raised for lack of a file descriptor; libraries say so in words of their own, so one is tried."""
    lacking = (errno.EMFILE, errno.ENFILE)
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in lacking
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as failed:
        return failed.errno in lacking
    return False


def no_files_left(model: str) -> Busy:
    """What a load hears that found no descriptor: nothing is wrong with its files, and the next try may go well."""
    return Busy(
        f"no file descriptor is left to load `{model}` with",
        hint="close some connections, or raise the limit of open files (`ulimit -n`) and restart omlxd",
        details={"retry_after_s": 5.0, "kind": "no_descriptors"},
    )


def failure(model: str, error: BaseException) -> EngineFailed:
    """What a request of the model hears when its step ended with this exception."""
    if is_out_of_memory(error):
        return EngineFailed(
            f"the device ran out of memory while `{model}` ran this request",
            hint="send a shorter prompt, unload a model, or lower `max_memory`",
            details={"kind": "out_of_memory"},
        )
    kind, text = type(error).__name__, " ".join(str(error).split())[:300]
    failed = EngineFailed(
        f"`{model}` failed while it ran this request: {kind}: {text}",
        hint="try again; if it comes back, try a shorter prompt or another model",
    )
    if may_quote(error):
        failed.logged = f"`{model}` failed while it ran this request: {kind}"
    return failed


def may_quote(error: BaseException) -> bool:
    """Whether its text may hold what the user wrote: not that of MLX's errors, which speak of arrays."""
    return not isinstance(error, RuntimeError | MemoryError)


def frames(error: BaseException) -> tuple[str, ...]:
    """Where it was raised, outermost first: files, lines and names, and nothing of what they held."""
    found = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)
    return tuple(f"{'/'.join(Path(each.filename).parts[-2:])}:{each.lineno} {each.name}" for each in found)
