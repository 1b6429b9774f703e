"""What signals mean to the daemon: the end, another manifest, or every thread's stack."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from omlxd.daemon.app import StopOrder
from omlxd.daemon.files import cannot_write, open_regular


class Hangup:
    """SIGHUP: reload, as soon as the daemon can; but a daemon in the foreground of a closed terminal stops."""

    def __init__(self, stop: StopOrder) -> None:
        self._stop = stop
        self._reload: Callable[[], None] | None = None
        self._missed = False
        self._had_terminal = _has_terminal()

    def received(self) -> None:
        """A signal came."""
        if self._had_terminal and not _has_terminal():
            self._stop.signalled("its terminal was closed")
        elif self._reload is None:
            self._missed = True
        else:
            self._reload()

    def reload_with(self, reload: Callable[[], None]) -> None:
        """From now on there is something to reload, also for a signal that came too early."""
        self._reload = reload
        if self._missed:
            reload()


@contextmanager
def signals_to(stop: StopOrder) -> Iterator[Hangup]:
    """SIGTERM and SIGINT drain, a second one ends at once; SIGHUP goes to what is given."""
    loop, hangup = asyncio.get_running_loop(), Hangup(stop)
    caught: dict[signal.Signals, Callable[[], None]] = {
        signal.SIGTERM: partial(stop.signalled, signal.SIGTERM.name),
        signal.SIGINT: partial(stop.signalled, signal.SIGINT.name),
        signal.SIGHUP: hangup.received,
    }
    for number, received in caught.items():
        loop.add_signal_handler(number, received)
    try:
        yield hangup
    finally:
        for number in caught:
            loop.remove_signal_handler(number)
            # Between here and the end of the process a signal has nothing left to end.
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def stacks_on_request(path: Path) -> Iterator[None]:
    """SIGUSR1 appends every thread's stack to the file, also when the event loop is what hangs.

    A thread of its own waits for the signal and writes while it holds the interpreter's lock. `faulthandler.register`
    writes in the midst of whatever runs, and has ended a busy daemon in a segmentation fault.
    """
    try:
        file = os.fdopen(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")
    except OSError as error:
        raise cannot_write(error, path) from None
    number, ended = signal.SIGUSR1, threading.Event()

    def write(*_: object) -> None:
        with suppress(OSError, ValueError):  # a full disk
            faulthandler.dump_traceback(file, all_threads=True)

    def wait() -> None:
        while True:
            signal.sigwait({number})
            if ended.is_set():
                return
            write()

    waits = threading.Thread(target=wait, name="omlxd-stacks", daemon=True)
    with file:
        signal.signal(number, write)  # a thread that was there before may get it, and has this one write
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
        waits.start()
        try:
            yield
        finally:
            ended.set()
            signal.pthread_kill(waits.ident or 0, number)
            waits.join()
            signal.signal(number, signal.SIG_IGN)  # its default would end the process
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)


def _has_terminal() -> bool:
    """Whether the process runs in a terminal that is still there: asking a closed one fails."""
    try:
        os.tcgetpgrp(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return True
