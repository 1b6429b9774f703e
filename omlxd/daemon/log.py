"""Events as JSON lines in a file that rotates by size; a full disk costs lines, never the daemon.

The standard library's handler rotates. Library messages (uvicorn, asyncio) become events too, so that there is one log.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from omlxd.core.events import Emit, Event, EventLevel, EventName
from omlxd.daemon.log_console import Console, json_line
from omlxd.daemon.log_file import LogFile

OURS: Final = "omlxd"
"""The logger for what goes wrong where no event can be emitted: in the handing on of events."""
_SEVERITY = {level: number for number, level in enumerate(EventLevel)}
_LEADING = ("ts", "level", "event", "model", "request", "decision")
_LIBRARIES = ("uvicorn.error", "asyncio", "py.warnings", OURS)


class EventLog:
    """Writes events; `write` never raises and never blocks on anything but the file.

    Args:
        path: the current file; older ones are `path.1`, `path.2`, ...
        max_bytes: the size at which it is rotated.
        kept: how many older files stay.
        least: events below this severity are not written.
        console: where else the events go (`--foreground`).
        clock: seconds that only grow, for the file.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int = 20 * 2**20,
        kept: int = 5,
        least: EventLevel = EventLevel.INFO,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._least = least
        self._file = LogFile(path, max_bytes=max_bytes, kept=kept, clock=clock)
        self._console = console

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
        line = event.to_json()
        self._add(line)
        if lost := self._file.lost_to_report():
            told = {"ts": event.ts, "level": EventLevel.ERROR.value, "event": EventName.LOG_ERROR.value}
            self._add(told | {"lost_lines": lost, "reason": self._file.last_error})
        if self._console is not None:
            self._console.show(line)

    @property
    def lost_lines(self) -> int:
        """Lines that could not be written since the last success; 0 when all is well."""
        return self._file.lost

    @property
    def trouble(self) -> str | None:
        """How many lines are lost so far since something fails, and why, in words; None when all is well."""
        lost = self._file.lost
        return f"{lost} line{'s' if lost > 1 else ''} not written: {self._file.last_error}" if lost else None

    def close(self) -> None:
        """Close the file, and let the console finish."""
        self._file.close()
        if self._console is not None:
            self._console.close()

    def _add(self, line: Mapping[str, Any]) -> None:
        ordered = {key: line[key] for key in _LEADING if key in line} | dict(line)
        self._file.handle(logging.LogRecord(OURS, logging.INFO, "", 0, json_line(ordered), None, None))


@contextmanager
def libraries_to(emit: Emit) -> Iterator[None]:
    """While inside, warnings and errors of uvicorn, asyncio and Python arrive as `api_error` events.

    So does what is logged as `OURS`.
    """
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
        bridge.few.tell_left_out()


def trace_of(error: BaseException) -> str:
    """Type and frames of an exception without its message, which may quote a prompt."""
    frames = traceback.format_tb(error.__traceback__)
    return "".join([*frames, f"{type(error).__module__}.{type(error).__qualname__}"])


_CLIENT_LEFT = "socket.send() raised exception."
"""What asyncio says of a client that hung up in the middle of an answer; its request ends with an event of its own."""
ALIKE_S: Final = 60.0
MOST_ALIKE: Final = 5
_MOST_KINDS: Final = 100


class FewAlike:
    """Of complaints that are alike only the first few a minute pass: whoever can cause them must not wash the log.

    Args:
        emit: where they go.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._alike: dict[str, _Alike] = {}

    def emit(self, event: Event) -> None:
        """Hand it on, or count it; those with the same source and message are alike."""
        kind = f"{event.fields.get('source')}: {event.fields.get('message')}"
        alike = self._alike.get(kind)
        if alike is None or time.monotonic() - alike.since_s >= ALIKE_S:
            if len(self._alike) >= _MOST_KINDS:
                self.tell_left_out()
            left_out = alike.left_out if alike is not None else 0
            alike = self._alike[kind] = _Alike(event, time.monotonic(), left_out=left_out)
        alike.add(event, self._emit)

    def tell_left_out(self) -> None:
        """Say how many were left out so far, of each kind, and begin anew."""
        for alike in self._alike.values():
            if alike.left_out:
                self._emit(_with_left_out(alike.first, alike.left_out))
        self._alike.clear()


@dataclass
class _Alike:
    """Complaints of one kind since a moment, how many of them passed, and how many were left out and not told of."""

    first: Event
    since_s: float
    passed: int = 0
    left_out: int = 0

    def add(self, event: Event, emit: Emit) -> None:
        if self.passed >= MOST_ALIKE:
            self.left_out += 1
            return
        self.passed += 1
        left_out, self.left_out = self.left_out, 0
        emit(_with_left_out(event, left_out))


class _Bridge(logging.Handler):
    def __init__(self, emit: Emit) -> None:
        super().__init__(logging.WARNING)
        self.few = FewAlike(emit)

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "asyncio" and record.msg == _CLIENT_LEFT:
            return
        try:
            self.few.emit(_event_of(record))
        except Exception:  # a log record may never end what it is about
            self.handleError(record)


def _with_left_out(event: Event, left_out: int) -> Event:
    return replace(event, fields={**event.fields, "alike_left_out": left_out}) if left_out else event


def _event_of(record: logging.LogRecord) -> Event:
    fields: dict[str, Any] = {"source": record.name}
    error = record.exc_info[1] if record.exc_info else None
    fields["message"] = record.getMessage().strip().splitlines()[0] if record.msg else ""
    if error is not None:
        # Its message may show what a callback was called with; the frames say enough, and quote nobody.
        fields["message"] = fields["message"].partition("(")[0].strip()
        fields["traceback"] = trace_of(error)
    level = EventLevel.ERROR if record.levelno >= logging.ERROR else EventLevel.WARNING
    return Event(EventName.API_ERROR, level=level, fields=fields)
