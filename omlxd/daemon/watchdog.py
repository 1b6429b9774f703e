"""Feeds the service manager's watchdog, and only while both the enforcer and the thread that owns MLX get on.

An event loop that runs proves little: it would go on feeding while a driver hangs and nobody gets an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from omlxd.daemon.notify import ServiceManager
from omlxd.daemon.watcher import Watcher

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


class Watchdog(Watcher):
    """Signs of life, four in the manager's time; nothing where it does not ask for them.

    Args:
        manager: who waits for them.
        engine, enforcer: who must get on, within half of that time.
        sleep: waits between two looks.
    """

    task_name = "omlxd-watchdog"

    def __init__(
        self,
        manager: ServiceManager,
        engine: Steps,
        enforcer: Looks,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._manager, self._engine, self._enforcer, self._sleep = manager, engine, enforcer, sleep

    @property
    def _has_something_to_watch(self) -> bool:
        return self._manager.watchdog_s is not None

    async def _watch(self) -> None:
        while (watchdog_s := self._manager.watchdog_s) is not None:
            if max(self._engine.stalled_s(), self._enforcer.overdue_s()) <= watchdog_s / 2:
                self._manager.alive()
            await self._sleep(watchdog_s / FEEDS_A_TIMEOUT)
