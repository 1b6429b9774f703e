"""An event loop whose time passes only when nothing else is left to do, so that no test waits and none is late.

`run(main())` runs a coroutine to its end: whenever every task waits for a timer, the clock jumps to the nearest one.
Work for other threads (`asyncio.to_thread`) is done at once, in the loop's own thread. Give a pool the running loop's
`time` as its clock. Nothing may wait for a real thread or socket under it.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.SelectSelector):
    """Instead of sleeping until the next timer, moves the clock there."""

    now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise AssertionError("every task waits for something that nobody will do")
        if not ready and timeout:
            self.now_s += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop on virtual time."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def on_virtual_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Decorates a test that is a coroutine: it runs on a loop of its own, on virtual time."""

    def wrapper() -> None:
        run(test())

    wrapper.__name__, wrapper.__doc__ = test.__name__, test.__doc__
    return wrapper


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine on virtual time, and close everything after it."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
