"""A wait that ends by itself after a while, made for one that mostly ends early and begins anew at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Patience:
    """Calls `gives_up` when a wait has lasted too long.

    A stream waits for each of its tokens. A timer for each, set and taken back, was an eighth of what the event loop
    did for a token: here the one that is set stays, sees at its time whether a wait is over its own, and is set anew.

    Args:
        gives_up: called on the loop's thread.
    """

    def __init__(self, gives_up: Callable[[], object]) -> None:
        self._gives_up = gives_up
        self._until_s: float | None = None
        self._timeout_s = 0.0
        self._goes_on = False
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, timeout_s: float) -> None:
        """A wait begins, for so long at most; it replaces the one before."""
        loop = asyncio.get_running_loop()
        self._until_s, self._timeout_s, self._goes_on = loop.time() + timeout_s, timeout_s, False
        if self._timer is not None and self._timer.when() > self._until_s:
            self.close()
        if self._timer is None:
            self._timer = loop.call_at(self._until_s, self._look)

    def go_on(self) -> None:
        """What is waited for has come; the wait begins anew when the timer looks, so it may be twice as long."""
        self._goes_on = True

    def end(self) -> None:
        """It is over."""
        self._until_s = None

    def close(self) -> None:
        """Take the timer back: it would keep its owner until then."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._until_s is None:
            return
        loop = asyncio.get_running_loop()
        if self._goes_on:
            self.begin(self._timeout_s)
        elif loop.time() < self._until_s:
            self._timer = loop.call_at(self._until_s, self._look)
        else:
            self._gives_up()
