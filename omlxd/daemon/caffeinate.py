"""Holds off the idle sleep of a Mac by `caffeinate -i -w PID`, a child of the daemon's.

The command is part of macOS and documented (caffeinate(8)); `pmset -g assertions` names it; it ends with the process of
that number, so that a daemon that is killed leaves nothing behind. IOKit's `IOPMAssertionCreateWithName` by ctypes
would save the child, but a wrong signature there ends the process with all of its models, and only a Mac would tell.
The lid of a notebook, the power button and an empty battery win over it, as they should.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from omlxd.core.errors import OmlxError

CAFFEINATE = Path("/usr/bin/caffeinate")
END_TIMEOUT_S = 2.0
_BY_SOMEBODY = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, -signal.SIGKILL)


class Caffeinate:
    """One assertion against idle sleep.

    Args:
        program: what holds it.
    """

    def __init__(self, program: Path = CAFFEINATE) -> None:
        self._program = program
        self._process: asyncio.subprocess.Process | None = None

    async def hold(self) -> None:
        """Hold it; nothing happens when it is held already, and one that somebody has ended is taken anew.

        Raises:
            OmlxError: it cannot be held, or the program has given it up by itself.
        """
        if self._process is not None:
            if (status := self._process.returncode) is None:
                return
            self._process = None
            if status not in _BY_SOMEBODY:
                raise OmlxError(f"`{self._program}` ended by itself (status {status})")
        try:
            self._process = await asyncio.create_subprocess_exec(
                self._program,
                "-i",
                "-w",
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                close_fds=False,  # ours do not pass to children anyway, and so no copy of a process of 100 GB is made
            )
        except OSError as error:
            raise OmlxError(f"`{self._program}` cannot be run ({error.strerror})") from None

    async def release(self) -> None:
        """Let it go, and return when its process is gone; idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        for end in (process.terminate, process.kill):
            with contextlib.suppress(ProcessLookupError):
                end()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_TIMEOUT_S):
                    await process.wait()
                return
