"""systemd's journal at the end of a stream: whether it is there, and how lines say their priority."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final, TextIO

from omlxd.core.events import EventLevel

JOURNAL_VARIABLE: Final = "JOURNAL_STREAM"
PRIORITIES: Final[Mapping[EventLevel, int]] = {
    EventLevel.DEBUG: 7,
    EventLevel.INFO: 6,
    EventLevel.WARNING: 4,
    EventLevel.ERROR: 3,
}
"""syslog(3)'s numbers, which systemd takes from the `<N>` at a line's beginning (sd-daemon(3))."""


def journal_of(environ: Mapping[str, str], streams: Sequence[TextIO] | None = None) -> TextIO | None:
    """Stdout, else stderr, whichever is connected to systemd's journal; None when neither is.

    `JOURNAL_STREAM` alone says nothing: it is inherited by whatever a service starts elsewhere (systemd.exec(5)).
    """
    named = environ.get(JOURNAL_VARIABLE)
    for stream in (sys.stdout, sys.stderr) if streams is None else streams:
        try:
            found = os.fstat(stream.fileno())
        except (AttributeError, OSError, ValueError):
            continue  # closed, or replaced by something that is no file
        if named == f"{found.st_dev}:{found.st_ino}":
            return stream
    return None


def with_priority(level: EventLevel, text: str) -> str:
    """Each line of the text as the journal takes it."""
    return "\n".join(f"<{PRIORITIES[level]}>{line}" for line in text.splitlines())
