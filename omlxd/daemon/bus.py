"""The event bus: numbers and dates what happened, keeps the last thousand, and wakes whoever listens.

Everything runs on the event loop's thread. A listener that falls behind by more than the ring holds misses the oldest
events and is told so; it never slows anybody down.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

from omlxd.core.events import Emit, Event


@dataclass(frozen=True, slots=True)
class Missed:
    """Events that the ring had lost before the listener came to them: how many, and the number of the last of them."""

    count: int
    seq: int


@dataclass(frozen=True, slots=True)
class Quiet:
    """Nothing has happened for a while; the number of the newest event."""

    seq: int


class EventBus:
    """Where events go; `emit` is what pool and enforcer are given.

    Args:
        clock: seconds since the epoch, for `ts`.
        keep: how many events the ring holds.
        sinks: called with each numbered event at once, in order (the log's writer); must not raise.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.time, keep: int = 1000, sinks: tuple[Emit, ...] = ()
    ) -> None:
        self._clock = clock
        self._ring: deque[Event] = deque(maxlen=keep)
        self._sinks = list(sinks)
        self._last_seq = 0
        self._news = asyncio.Event()
        self._closed = False
        self._telling = False

    @property
    def last_seq(self) -> int:
        """The number of the newest event; 0 before the first."""
        return self._last_seq

    def add_sink(self, sink: Emit) -> None:
        """Also call `sink` with every event from now on."""
        self._sinks.append(sink)

    def emit(self, event: Event) -> None:
        """Number and date the event, keep it, hand it to the sinks and wake the listeners."""
        self._last_seq += 1
        stamped = replace(event, seq=self._last_seq, ts=self._clock())
        self._ring.append(stamped)
        for sink in self._sinks:
            try:
                sink(stamped)
            except Exception as error:  # who emits is in the middle of something that must not stop there
                self._tell(error)
        self._wake()

    def since(self, seq: int = 0) -> list[Event]:
        """The kept events with a number above `seq`, oldest first."""
        return [event for event in self._ring if event.seq > seq]

    async def follow(
        self, since: int = 0, *, quiet_s: float | None = None
    ) -> AsyncGenerator[Event | Missed | Quiet, None]:
        """The kept events above `since`, then each new one until `close`.

        Args:
            since: the number of the last event that is known; 0 for none, when whatever is kept will do.
            quiet_s: after so many seconds without an event a `Quiet` comes; by default never.
        """
        seen = since
        while True:
            news = self._news  # taken before reading the ring: an event in between is not missed
            kept = self.since(seen)
            if kept and seen and kept[0].seq > seen + 1:
                yield Missed(kept[0].seq - seen - 1, kept[0].seq - 1)
            for event in kept:
                seen = event.seq
                yield event
            if self._closed:
                return
            if self._last_seq <= seen:
                try:
                    async with asyncio.timeout(quiet_s):
                        await news.wait()
                except TimeoutError:
                    yield Quiet(self._last_seq)

    def close(self) -> None:
        """End all listeners once they have read what is there."""
        self._closed = True
        self._wake()

    def _tell(self, error: Exception) -> None:
        """By way of the log, as an event that must not come back here."""
        if not self._telling:
            self._telling = True
            try:
                logging.getLogger("omlxd").error("an event could not be handed on", exc_info=error)
            finally:
                self._telling = False

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
