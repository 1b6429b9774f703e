"""The log beside its file: readable lines for a terminal, and lines with a priority for systemd's journal.

Whoever reads them may stop reading (a pager, a terminal on hold, a journal that is stuck): a thread of its own writes,
and what it does not get rid of is left out and counted.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import queue
import select
import threading
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final, TextIO

from omlxd.core.events import EventLevel
from omlxd.daemon.journal import with_priority

WAITING_LINES: Final = 1000
CLOSE_S: Final = 1.0
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, default=repr)


def json_line(fields: Mapping[str, Any]) -> str:
    """The fields as one line of JSON; a value that JSON does not know as Python writes it."""
    return _ENCODER.encode(fields)


class Console:
    """Shows events somewhere; `show` neither raises nor waits.

    Args:
        stream: where to.
        journal: it is systemd's journal, which dates and colours lines itself.
    """

    def __init__(self, stream: TextIO, *, journal: bool = False) -> None:
        self._render = _journal_line if journal else _terminal_lines(colours=_takes_colours(stream))
        self._waiting: queue.Queue[str | None] = queue.Queue(WAITING_LINES)
        self._left_out = 0
        self._write = _writer(stream)
        self._thread = threading.Thread(target=self._work, name="omlxd-console", daemon=True)
        self._thread.start()

    def show(self, fields: Mapping[str, Any]) -> None:
        """Show an event, given as its JSON object."""
        if not self._thread.is_alive():
            return  # the terminal went away or cannot show it; the file has it all
        try:
            line = self._rendered(fields)
            if self._left_out:
                line = f"({self._left_out} events are missing here: nobody read them; the log file has them)\n{line}"
            self._waiting.put_nowait(line)
            self._left_out = 0
        except queue.Full:
            self._left_out += 1

    def _rendered(self, fields: Mapping[str, Any]) -> str:
        try:
            return self._render(dict(fields))
        except Exception as error:  # of a library; what is logged must go on
            return f"({fields.get('event')}: cannot be shown, {type(error).__name__}; the log file has it)"

    def close(self) -> None:
        """Wait a moment until all is written."""
        try:
            self._waiting.put(None, timeout=CLOSE_S)
        except queue.Full:
            return  # nobody reads
        self._thread.join(CLOSE_S)

    def _work(self) -> None:
        try:
            while (line := self._waiting.get()) is not None:
                self._write(f"{line}\n")
        except (OSError, ValueError):
            pass


def _journal_line(fields: dict[str, Any]) -> str:
    level = EventLevel(fields.pop("level"))
    fields.pop("ts", None)  # the journal has both
    return with_priority(level, json_line(fields))


def _terminal_lines(*, colours: bool) -> Callable[[dict[str, Any]], str]:
    import structlog.dev  # which imports Rich: 4 MB that a daemon in the background need not hold

    renderer = structlog.dev.ConsoleRenderer(colors=colours, sort_keys=False)

    def rendered(fields: dict[str, Any]) -> str:
        if isinstance(stack := fields.get("stack"), list):  # structlog wants a text, and writes it below the line
            fields["stack"] = "\n".join(f"  {frame}" for frame in stack)
        return str(renderer(None, "", _dated(fields)))

    return rendered


def _takes_colours(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _dated(line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    seconds = line.pop("ts", None)
    line.pop("seq", None)
    if isinstance(seconds, int | float):
        moment = dt.datetime.fromtimestamp(seconds, tz=dt.UTC).astimezone()
        line["timestamp"] = moment.strftime("%H:%M:%S.%f")[:-3]
    return line


def _writer(stream: TextIO) -> Callable[[str], None]:
    """Writes to the descriptor and not to the stream, whose lock a write that hangs would keep at the process's end."""
    try:
        fd = stream.fileno()
    except (OSError, ValueError):

        def write_text(text: str) -> None:
            stream.write(text)
            stream.flush()

        return write_text

    def write(text: str) -> None:
        left = text.encode(stream.encoding or "utf-8", errors="backslashreplace")
        while left:
            try:
                left = left[os.write(fd, left) :]
            except BlockingIOError:  # somebody else who has the terminal wants it so
                select.select([], [fd], [])

    return write
