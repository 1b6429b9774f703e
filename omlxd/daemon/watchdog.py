"""Feeds the service manager's watchdog, and only while both the enforcer and the thread that owns MLX get on.

An event loop that runs proves little: it would go on feeding while a driver hangs and nobody gets an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from omlxd.daemon.notify import ServiceManager

FEEDS_A_TIMEOUT = 4


class Steps(Protocol):
    """The engine, as far as it is watched."""

    def stalled_s(self) -> float:
        """Seconds since the last step while there is work."""
        ...


class Looks(Protocol):
    """The enforcer, as far as it is watched."""

    def overdue_s(self) -> float:
        """Seconds since a look at memory should have ended."""
        ...


class Watchdog:
    """Signs of life, four in the manager's time; nothing where it does not ask for them.

    Args:
        manager: who waits for them.
        engine, enforcer: who must get on, within half of that time.
        sleep: waits between two looks.
    """

    def __init__(
        self,
        manager: ServiceManager,
        engine: Steps,
        enforcer: Looks,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._manager, self._engine, self._enforcer, self._sleep = manager, engine, enforcer, sleep
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to feed; the second call does nothing."""
        if self._task is None and self._manager.watchdog_s is not None:
            self._task = asyncio.create_task(self._feed(self._manager.watchdog_s), name="omlxd-watchdog")

    async def stop(self) -> None:
        """End it; idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _feed(self, watchdog_s: float) -> None:
        while True:
            if max(self._engine.stalled_s(), self._enforcer.overdue_s()) <= watchdog_s / 2:
                self._manager.alive()
            await self._sleep(watchdog_s / FEEDS_A_TIMEOUT)
