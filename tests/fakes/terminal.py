"""A terminal for tests: a virtual screen, and a real command that runs on one at the end of a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from types import TracebackType
from typing import Self

import pyte
from rich.console import Console, RenderableType

TIMEOUT_S = 30.0
ENTERS, LEAVES = b"\x1b[?1049h", b"\x1b[?1049l"


def written(page: RenderableType, columns: int, rows: int, *, no_color: bool = True) -> str:
    """What a terminal of this size is sent for a page."""
    file = StringIO()
    console = Console(
        file=file,
        width=columns,
        height=rows,
        force_terminal=True,
        color_system="standard",
        no_color=no_color,
        highlight=False,
        markup=False,
        emoji=False,
    )
    console.set_alt_screen(True)
    console.update_screen(page)
    return file.getvalue()


def seen(page: RenderableType, columns: int, rows: int) -> list[str]:
    """The lines that stand on such a terminal then, without the blanks at their ends."""
    screen = pyte.Screen(columns, rows)
    pyte.Stream(screen).feed(written(page, columns, rows))
    return lines_of(screen)


def lines_of(screen: pyte.Screen) -> list[str]:
    """What stands on it."""
    return [line.rstrip() for line in screen.display]


class Terminal:
    """A command on a terminal of its own, of which it is the only user; gone at the end.

    Attributes:
        raw: all that the command wrote.
        screen: what stands on it now, `pyte` knows no alternate buffer.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], *, columns: int = 80, rows: int = 24
    ) -> None:
        self.raw = b""
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self._master, self.slave = pty.openpty()
        self.resize(columns, rows)
        self.settings_before = self.settings
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._master)
        os.close(self.slave)

    @property
    def lines(self) -> list[str]:
        """What stands on the screen."""
        return lines_of(self.screen)

    @property
    def settings(self) -> list[object]:
        """The terminal's settings now (termios)."""
        return list(termios.tcgetattr(self.slave))

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._master, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        """Make the window larger or smaller; whoever runs in it is told."""
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(rows, columns)

    def until(self, condition: Callable[[], bool]) -> None:
        """Read what is written until the condition holds."""
        ends_s = time.monotonic() + TIMEOUT_S
        while not condition():
            left_s = ends_s - time.monotonic()
            if left_s <= 0 or not self._read(left_s):
                raise AssertionError("it never came; the screen shows:\n" + "\n".join(self.lines))

    def until_shown(self, *texts: str) -> None:
        """Read until all of these stand on the screen."""
        self.until(lambda: all(any(text in line for line in self.lines) for text in texts))

    def ended(self) -> int:
        """Read to the end; the exit status, negative for a signal."""
        ends_s = time.monotonic() + TIMEOUT_S
        while (status := self._process.poll()) is None:
            self._read(0.05)
            if time.monotonic() > ends_s:
                raise AssertionError("it does not end; the screen shows:\n" + "\n".join(self.lines))
        while self._read(0.0):
            pass
        return status

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._master], [], [], timeout_s)[0]:
            return False
        piece = os.read(self._master, 65_536)
        self.raw += piece
        self._stream.feed(piece)
        return bool(piece)


def _take_terminal() -> None:
    """In the child, which leads a session of its own: its stdin is the terminal of that session."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def omlxd(*arguments: str) -> list[str]:
    """The command line as a process."""
    return [sys.executable, "-m", "omlxd", *arguments]
