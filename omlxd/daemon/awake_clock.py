"""The clock of the daemon: seconds in which it could have worked. Time asleep is no idle time, and no delay.

While a machine sleeps, CLOCK_MONOTONIC of Linux and mach_absolute_time of macOS, which Python's `time.monotonic` reads,
stand still (clock_gettime(3), PEP 418). They go on while the process alone is stopped: by SIGSTOP, a frozen cgroup, a
debugger, or with a virtual machine. Then every timer would be due in the first second after it: models would be
unloaded as unused, requests end as too late, and the engine be called stuck. So a gap between two readings that no
working daemon makes counts as nothing, and the event loop's own timers run on this clock too. The wall clock decides
nothing: it only dates events.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Final

from omlxd.core.events import Emit, Event, EventName
from omlxd.daemon.watcher import Watcher

LONGEST_GAP_S: Final = 15.0  # a daemon that works reads its clock each second at least: the server's tick
LOOK_EACH_S: Final = 5.0
LEAST_TOLD_S: Final = 10.0

# Clocks that count the machine's sleep: Linux's has this name, macOS's that one (there CLOCK_BOOTTIME does not exist).
_WITH_SLEEP: Final = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC_RAW", time.CLOCK_MONOTONIC))


class AwakeClock:
    """Monotonic seconds without those in which the process did not run; from any thread.

    Args:
        monotonic: seconds that stand still while the machine sleeps.
        longest_gap_s: a longer time between two readings counts as none.
    """

    def __init__(self, monotonic: Callable[[], float] | None = None, longest_gap_s: float = LONGEST_GAP_S) -> None:
        self._monotonic = monotonic or time.monotonic
        self._longest_gap_s = longest_gap_s
        self._lock = threading.Lock()
        self._seen_s = self._awake_s = self._monotonic()
        self._stopped_s = 0.0

    def __call__(self) -> float:
        with self._lock:
            now_s = self._monotonic()
            gap_s, self._seen_s = now_s - self._seen_s, now_s
            if gap_s > self._longest_gap_s:
                self._stopped_s += gap_s
            else:
                self._awake_s += gap_s  # summed up: a difference of large numbers could go back by a rounding
            return self._awake_s

    @property
    def stopped_s(self) -> float:
        """Seconds left out so far."""
        return self._stopped_s


_BELL_BYTES: Final = 4096
_write: Final = ctypes.PyDLL(None).write


class AwakeEventLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers run on an `AwakeClock`, and that others wake without letting go of the interpreter."""

    def __init__(self, clock: AwakeClock | None = None) -> None:
        self.clock = clock or AwakeClock()
        self.time = self.clock  # type: ignore[method-assign]  # asked three times for each token
        super().__init__()

    def _write_to_self(self) -> None:
        """What asyncio calls behind `call_soon_threadsafe`; its own is as right, and slower.

        It lets go of the interpreter over the write. The loop wakes and takes it, and the engine's thread, which
        wanted to begin its next step, waits until the loop's turn has ended: 0.3 ms of a step of 9, in which the device
        does nothing. So the interpreter is held (`PyDLL`): the loop gets it once the engine's thread is inside MLX.
        """
        if (bell := getattr(self, "_csock", None)) is not None:
            _write(bell.fileno(), b"\0", 1)  # a full one is no failure: the loop has not heard the last yet
        else:
            super()._write_to_self()  # type: ignore[misc]

    def _read_from_self(self) -> None:
        """asyncio's own, without its second read, which an exception tells that there is nothing more."""
        ear = getattr(self, "_ssock", None)
        if ear is None:
            super()._read_from_self()  # type: ignore[misc]
            return
        try:
            rung = ear.recv(_BELL_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        self._process_self_data(rung)  # type: ignore[attr-defined]  # numbers of signals; what is left wakes the loop again


class PauseWatch(Watcher):
    """Tells when the machine slept or the process stood still: nothing comes of it, but clients may have given up.

    Args:
        emit: where the event goes.
        absent_s: seconds lost so far; by default those of the running loop's clock and of the machine's sleep.
        sleep: waits between two looks.
    """

    task_name = "omlxd-pauses"

    def __init__(
        self,
        emit: Emit,
        absent_s: Callable[[], float] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._emit, self._absent_s, self._sleep = emit, absent_s or _absent_s, sleep

    async def _watch(self) -> None:
        known_s = self._absent_s()
        while True:
            await self._sleep(LOOK_EACH_S)
            now_s = self._absent_s()
            if now_s - known_s >= LEAST_TOLD_S:
                fields = {"paused_s": round(now_s - known_s, 1)}
                self._emit(Event(EventName.DAEMON_PAUSED, fields=fields))
                known_s = now_s


def _absent_s() -> float:
    loop = asyncio.get_running_loop()
    stopped_s = loop.clock.stopped_s if isinstance(loop, AwakeEventLoop) else 0.0
    return stopped_s + time.clock_gettime(_WITH_SLEEP) - time.monotonic()
