"""Notices when the engine has work and takes no step, and says once where its thread stands, and once when it moves.

A driver that hangs or a disk that is gone cannot be helped from here; but nobody should have to guess.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from omlxd.core.events import Emit, Event, EventLevel, EventName
from omlxd.daemon.watcher import Watcher
from omlxd.engine.protocol import Engine

LOOKS_A_TIMEOUT = 4
LONGEST_SLEEP_S = 5.0


class StallWatch(Watcher):
    """Watches one engine.

    Args:
        engine: what runs models.
        timeout_s: seconds without a step, while there is work, that count as a stall.
        emit: where the two records go.
        sleep: waits between two looks.
    """

    task_name = "omlxd-stalls"

    def __init__(
        self,
        engine: Engine,
        timeout_s: float,
        emit: Emit,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._engine, self.timeout_s, self._emit, self._sleep = engine, timeout_s, emit, sleep
        self._longest_s = 0.0

    async def _watch(self) -> None:
        while True:
            await self._sleep(min(self.timeout_s / LOOKS_A_TIMEOUT, LONGEST_SLEEP_S))
            self._look()

    def _look(self) -> None:
        stalled_s = self._engine.stalled_s()
        if stalled_s > self.timeout_s:
            if not self._longest_s:
                fields = {"stalled_s": stalled_s, "stack": list(self._engine.stack())}
                self._emit(Event(EventName.ENGINE_STALLED, EventLevel.ERROR, fields=fields))
            self._longest_s = stalled_s
        elif self._longest_s:
            self._emit(Event(EventName.ENGINE_MOVES, EventLevel.WARNING, fields={"stalled_s": self._longest_s}))
            self._longest_s = 0.0
