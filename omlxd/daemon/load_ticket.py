"""One load from the request for it to its end, and what is told about it meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from omlxd.core.errors import OmlxError
from omlxd.core.memory import MemoryReading
from omlxd.core.states import EntryState
from omlxd.core.turnover import WaitingLoad

if TYPE_CHECKING:
    from omlxd.daemon.entry import EnginePoolEntry


SPEED_SEEN_S: Final = 0.5  # slices are told in crowds while the loop is busy: less says nothing about their speed
NO_NOTE: Final = "waiting for its turn"


@dataclass(frozen=True, slots=True)
class LoadStatus:
    """How a load gets on: `state` is `waiting` or `loading`, `note` says what it waits for, `left_s` is a guess."""

    model: str
    state: str
    done_bytes: int
    total_bytes: int
    note: str | None = None
    left_s: float | None = None


OnProgress = Callable[[LoadStatus], None]


class LoadTicket:
    """One load, from the request for it to its end."""

    def __init__(self, entry: EnginePoolEntry, stop: Callable[[LoadTicket], None]) -> None:
        self.entry = entry
        self.order_id = 0  # given when its turn comes, another one at each try
        self.begun = False  # the engine has told something about it
        self.done_bytes = 0
        self.total_bytes = entry.weights_bytes or 0
        self.note: str | None = NO_NOTE
        self.by_user = False  # somebody asked for the model itself, and not only for an answer of it
        self.modest = False  # it takes nobody's memory: it loads if it fits as things are
        self.asked_s = entry.clock()
        self.unwanted_since_s: float | None = None  # when the last of those who wait for it went away
        self.evicted: list[str] = []
        self.for_request: str | None = None  # None when somebody asked for the load itself
        self.cancelled: OmlxError | None = None
        self.too_large: MemoryReading | None = None  # what was read when it turned out larger than predicted
        self.task: asyncio.Task[None] | None = None
        self.gives_way: OmlxError | None = None  # why it stops for now; it is tried again by itself
        self.retries = 0
        self.not_before_s = 0.0  # on the loop's clock
        self.put_off: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # this try is over
        self.listeners: list[OnProgress] = []
        self._began_s: float | None = None
        self._first: tuple[float, int] | None = None  # when the engine told of the first bytes, and how many
        self._asking = 0
        self._stop = stop
        self.result: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.result.add_done_callback(_retrieved)

    @property
    def status(self) -> LoadStatus:
        """For listeners and views."""
        state = "loading" if self.entry.state is EntryState.LOADING else "waiting"
        return LoadStatus(self.entry.name, state, self.done_bytes, self.total_bytes, self.note, self.left_s)

    @property
    def left_s(self) -> float | None:
        """Seconds that the rest will take if it goes on as it did; before that as the last time; None if unknown."""
        if self._began_s is None:
            return None
        now_s, left_bytes = self.entry.clock(), max(0, self.total_bytes - self.done_bytes)
        first_s, first_bytes = self._first or (now_s, 0)
        if now_s - first_s < SPEED_SEEN_S:  # its beginning is slower than the rest, but better than no measure
            first_s, first_bytes = self._began_s, 0
        if self.done_bytes > first_bytes and now_s > first_s:
            return left_bytes * (now_s - first_s) / (self.done_bytes - first_bytes)
        last = self.entry.last_load
        return None if last is None else max(0.0, last.load_s - (now_s - self._began_s))

    @property
    def waiting(self) -> WaitingLoad:
        """What decides when its turn comes."""
        since_s = min([self.asked_s, *(each.waits_since_s for each in self.entry.requests.values() if not each.ended)])
        return WaitingLoad(self.entry.name, since_s, self.asked_s, self.by_user, wanted=self._asking > 0)

    @property
    def abandoned(self) -> bool:
        """Whether it is only for requests, and all of them have gone."""
        wanted = self._asking or any(not each.ended for each in self.entry.requests.values())
        return not (wanted or self.by_user or self.modest)

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Somebody waits for it."""
        self._asking, self.unwanted_since_s = self._asking + 1, None
        try:
            yield
        finally:
            self._asking -= 1
            if not self._asking:
                self.unwanted_since_s = self.entry.clock()

    def stop(self) -> None:
        """Stop the load wherever it is (`EnginePoolEntry.abort_loading`)."""
        self._stop(self)

    def try_again_after(self, delay_s: float) -> None:
        """The try that stopped is over and its memory is back; the next one comes after `delay_s`."""
        loop = asyncio.get_running_loop()
        self.begun, self.done_bytes = False, 0
        self._began_s = self._first = None
        self.gives_way, self.task = None, None
        self.retries, self.not_before_s = self.retries + 1, loop.time() + delay_s
        self.put_off.set_result(None)
        self.put_off = loop.create_future()

    def begin(self) -> None:
        """There is room, and the engine is given the order."""
        self._began_s = self.entry.clock()
        self.tell(None)

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """The engine has so much of it."""
        self.done_bytes, self.total_bytes, self.begun = done_bytes, total_bytes, True
        if self._first is None and done_bytes:
            self._first = (self.entry.clock(), done_bytes)
        self.tell(None)

    def tell(self, note: str | None) -> None:
        """Tell the listeners how it gets on."""
        self.note = note
        if self.listeners:
            status = self.status
            for listener in tuple(self.listeners):
                listener(status)


def _retrieved(future: asyncio.Future[None]) -> None:
    """Nobody may be left who asked; asyncio would complain about an exception that was never looked at."""
    if not future.cancelled():
        future.exception()
