"""The terminal as a full screen: the alternate buffer, no cursor, single keys; given back in every case.

Signals only leave their number in a pipe, and the loop that waits at its other end acts on them: nothing is
interrupted in the middle of what it writes.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Final, Self

from rich.console import Console, ConsoleDimensions, RenderableType

from omlxd.cli.screen.keys import KeyReader

_NEWS: Final = 0
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_ESCAPE_S: Final = 0.05  # the bytes of one key follow each other at once
_FALLBACK_SIZE: Final = (80, 24)


@dataclass(frozen=True, slots=True)
class Heard:
    """What ended a wait.

    Attributes:
        keys: names of what was typed, in order.
        end: the signal that asks to end, or None.
    """

    keys: tuple[str, ...] = ()
    end: int | None = None


class FullScreen:
    """A context in which stdout is a full screen, and stdin, where it is a terminal, gives single keys.

    Args:
        console: Rich's, on a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._reader = KeyReader()
        self._keyboard = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._saved: list[Any] | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        self._wakeup = -1

    def __enter__(self) -> Self:
        self._heard_at, self._told_at = os.pipe()
        os.set_blocking(self._told_at, False)
        os.set_blocking(self._heard_at, False)
        self._wakeup = signal.set_wakeup_fd(self._told_at, warn_on_full_buffer=False)
        for number in (*_ENDING, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH):
            self._handlers[number] = signal.signal(number, _leave_it_to_the_loop)
        try:
            self._take()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._give_back()
        finally:
            signal.set_wakeup_fd(self._wakeup)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            os.close(self._heard_at)
            self._told_at, told_at = -1, self._told_at
            os.close(told_at)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows now."""
        try:
            columns, rows = os.get_terminal_size(sys.stdout.fileno())
        except OSError:
            return _FALLBACK_SIZE
        return (columns, rows) if columns and rows else _FALLBACK_SIZE

    def tell(self) -> None:
        """End a wait, from any thread."""
        try:
            os.write(self._told_at, bytes([_NEWS]))
        except OSError:
            pass  # it is full of news already, or nobody waits any more

    def paint(self, page: RenderableType) -> None:
        """Draw a page that is as large as `size`."""
        self._console.size = ConsoleDimensions(*self.size)
        self._console.update_screen(page)

    def wait(self, timeout_s: float) -> Heard:
        """Wait for keys, news, a signal or another size; a stop (Ctrl-Z) has passed when it returns."""
        watched = [self._heard_at] + ([] if self._keyboard is None else [self._keyboard])
        ready, _, _ = select.select(watched, [], [], _ESCAPE_S if self._reader.pending else timeout_s)
        keys: list[str] = []
        if self._keyboard in ready:
            typed = _read(self._keyboard)
            if not typed:  # the terminal has gone
                return Heard(end=signal.SIGHUP)
            keys = self._reader.feed(typed)
        elif self._reader.pending:
            keys = self._reader.flush()
        told = _read(self._heard_at) if self._heard_at in ready else b""
        if signal.SIGTSTP in told and not any(number in _ENDING for number in told):
            self._stop()
            told = _read(self._heard_at)  # the SIGCONT that ended the stop, and what came with it
        elif signal.SIGCONT in told:  # stopped by SIGSTOP: the shell has set the terminal as it likes it
            self._give_back()
            self._take()
        return Heard(tuple(keys), next((number for number in told if number in _ENDING), None))

    def _stop(self) -> None:
        """Give the terminal back and stop, as Ctrl-Z asks; take it again afterwards."""
        self._give_back()
        mine = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, mine)
        self._take()

    def _take(self) -> None:
        if self._keyboard is not None:
            self._saved = termios.tcgetattr(self._keyboard)
            tty.setcbreak(self._keyboard, termios.TCSADRAIN)
        self._console.set_alt_screen(True)
        self._console.show_cursor(False)

    def _give_back(self) -> None:
        try:
            self._console.show_cursor(True)
            self._console.set_alt_screen(False)
            self._console.file.flush()
        except OSError:
            pass  # the terminal has gone, and its settings with it
        if self._keyboard is not None and self._saved is not None:
            try:
                termios.tcsetattr(self._keyboard, termios.TCSADRAIN, self._saved)
            except termios.error:
                pass
            self._saved = None


def _leave_it_to_the_loop(number: int, frame: FrameType | None) -> None:
    """Python writes the number into the pipe by itself, but only where a handler is set."""


def _read(descriptor: int | None) -> bytes:
    assert descriptor is not None
    try:
        return os.read(descriptor, 4096)
    except BlockingIOError:
        return b""
    except OSError:
        return b""
