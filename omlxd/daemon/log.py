"""Events as JSON lines in a file that rotates by size; a full disk costs lines, never the daemon.

structlog renders, the standard library's handler rotates. Library messages (uvicorn, asyncio) become events too, so
that there is one log.
"""

from __future__ import annotations

import datetime as dt
import logging
import logging.handlers
import os
import stat
import sys
import traceback
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import structlog

from omlxd.core.events import Emit, Event, EventLevel, EventName

_SEVERITY = {level: number for number, level in enumerate(EventLevel)}
_LEADING = ("ts", "level", "event", "model", "request", "decision")
_LIBRARIES = ("uvicorn.error", "asyncio", "py.warnings")


class EventLog:
    """Writes events; `write` never raises and never blocks on anything but the file.

    Args:
        path: the current file; older ones are `path.1`, `path.2`, ...
        max_bytes: the size at which it is rotated.
        kept: how many older files stay.
        least: events below this severity are not written.
        console: where else the events go, readable (`--foreground`).
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int = 20 * 2**20,
        kept: int = 5,
        least: EventLevel = EventLevel.INFO,
        console: TextIO | None = None,
    ) -> None:
        self._least = least
        self._file = _PatientHandler(path, max_bytes=max_bytes, kept=kept)
        self._lines = structlog.wrap_logger(
            _LineWriter(self._file),
            processors=[_in_order, structlog.processors.JSONRenderer(ensure_ascii=False)],
            wrapper_class=structlog.BoundLogger,
        )
        self._console = _console_logger(console) if console is not None else None

    def configure(self, least: EventLevel, max_bytes: int, kept: int) -> None:
        """Other bounds from now on; older files than `kept` go."""
        path, before = Path(self._file.baseFilename), self._file.backupCount
        self._least, self._file.maxBytes, self._file.backupCount = least, max_bytes, kept
        for number in range(kept + 1, before + 1):
            with suppress(OSError):
                path.with_name(f"{path.name}.{number}").unlink()

    def write(self, event: Event) -> None:
        """Write one event; lines that a full disk swallowed are counted and told once it takes some again."""
        if _SEVERITY[event.level] < _SEVERITY[self._least]:
            return
        fields = {key: value for key, value in event.to_json().items() if key != "event"}
        if lost := self._file.lost_to_report():
            lost_fields = {"lost_lines": lost, "reason": self._file.last_error}
            self._lines.msg(EventName.LOG_ERROR.value, ts=event.ts, level=EventLevel.ERROR.value, **lost_fields)
        self._lines.msg(event.event.value, **fields)
        if self._console is not None:
            try:
                self._console.msg(event.event.value, **fields)
            except (OSError, ValueError):
                self._console = None  # the terminal went away or cannot show it; the file has it all

    @property
    def lost_lines(self) -> int:
        """Lines that could not be written since the last success; 0 when all is well."""
        return self._file.lost

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@contextmanager
def libraries_to(emit: Emit) -> Iterator[None]:
    """While inside, warnings and errors of uvicorn, asyncio and Python arrive as `api_error` events."""
    bridge = _Bridge(emit)
    before: list[tuple[logging.Logger, int, bool]] = []
    for name in _LIBRARIES:
        logger = logging.getLogger(name)
        before.append((logger, logger.level, logger.propagate))
        logger.addHandler(bridge)
        logger.setLevel(logging.WARNING)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, level, propagate in before:
            logger.removeHandler(bridge)
            logger.setLevel(level)
            logger.propagate = propagate


def trace_of(error: BaseException) -> str:
    """Type and frames of an exception without its message, which may quote a prompt."""
    frames = traceback.format_tb(error.__traceback__)
    return "".join([*frames, f"{type(error).__module__}.{type(error).__qualname__}"])


class _PatientHandler(logging.handlers.RotatingFileHandler):
    def __init__(self, path: Path, *, max_bytes: int, kept: int) -> None:
        super().__init__(
            path, maxBytes=max_bytes, backupCount=kept, encoding="utf-8", errors="backslashreplace", delay=True
        )
        self.setFormatter(logging.Formatter("%(message)s"))
        self.lost = 0
        self.last_error = ""
        self._failed = False

    def lost_to_report(self) -> int:
        """The count to tell, once, when the last line went through again."""
        if self._failed or not self.lost:
            return 0
        lost, self.lost = self.lost, 0
        return lost

    def emit(self, record: logging.LogRecord) -> None:
        self._failed = False
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        self.lost += 1
        self._failed = True
        self.last_error = (isinstance(error, OSError) and error.strerror) or type(error).__name__
        # What could not be written waits in the stream and would fail again with every later line.
        stream, self.stream = self.stream, None
        try:
            if stream is not None:
                stream.close()
        except OSError:
            pass

    def _open(self) -> Any:
        return self._after_a_torn_line(
            open(self.baseFilename, self.mode, encoding=self.encoding, errors=self.errors, opener=_private)
        )

    def _after_a_torn_line(self, stream: Any) -> Any:
        if _is_torn(Path(self.baseFilename)):
            stream.write("\n")  # goes out with the next line, which then stands alone
        return stream


def _is_torn(path: Path) -> bool:
    """Whether the file ends within a line: a full disk took a part of it, or the process was killed."""
    try:
        with path.open("rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode) or file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:
        return False


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class _LineWriter:
    """What structlog hands a rendered line to."""

    def __init__(self, handler: logging.Handler) -> None:
        self._handler = handler

    def msg(self, line: str) -> None:
        self._handler.handle(logging.LogRecord("omlxd", logging.INFO, "", 0, line, None, None))


_CLIENT_LEFT = "socket.send() raised exception."
"""What asyncio says of a client that hung up in the middle of an answer; its request ends with an event of its own."""


class _Bridge(logging.Handler):
    def __init__(self, emit: Emit) -> None:
        super().__init__(logging.WARNING)
        self._emit = emit

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "asyncio" and record.msg == _CLIENT_LEFT:
            return
        try:
            self._emit(_event_of(record))
        except Exception:  # a log record may never end what it is about
            self.handleError(record)


def _event_of(record: logging.LogRecord) -> Event:
    fields: dict[str, Any] = {"source": record.name}
    error = record.exc_info[1] if record.exc_info else None
    # With an exception the message may be its repr; the frames say enough and quote nobody.
    fields["message"] = record.getMessage().strip().splitlines()[0] if record.msg else ""
    if error is not None:
        fields["traceback"] = trace_of(error)
    level = EventLevel.ERROR if record.levelno >= logging.ERROR else EventLevel.WARNING
    return Event(EventName.API_ERROR, level=level, fields=fields)


def _in_order(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> Mapping[str, Any]:
    return {key: line[key] for key in _LEADING if key in line} | dict(line)


def _console_logger(console: TextIO) -> Any:
    colours = console.isatty()
    return structlog.wrap_logger(
        structlog.PrintLogger(console),
        processors=[_dated, structlog.dev.ConsoleRenderer(colors=colours, sort_keys=False)],
        wrapper_class=structlog.BoundLogger,
    )


def _dated(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    seconds = line.pop("ts", None)
    line.pop("seq", None)
    if isinstance(seconds, int | float):
        moment = dt.datetime.fromtimestamp(seconds, tz=dt.UTC).astimezone()
        line["timestamp"] = moment.strftime("%H:%M:%S.%f")[:-3]
    return line
