"""Memory used in the last minutes, a figure a second: what the status screen shows to who begins to look now."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

from omlxd.daemon.watcher import Watcher

INTERVAL_S: Final = 1.0
KEPT: Final = 300


class MemoryHistory(Watcher):
    """The last `KEPT` figures; times are seconds of a monotonic clock.

    Args:
        read: bytes in use now, as the policy compares them with the limits; must be cheap.
        sleep: waits between two figures.
    """

    task_name = "omlxd-history"

    def __init__(
        self,
        read: Callable[[], int],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._sleep, self._clock = read, sleep, clock
        self._figures: deque[tuple[float, int]] = deque(maxlen=KEPT)

    def to_json(self) -> dict[str, Any]:
        """`ages_s`, how long ago in seconds, and `used`, bytes; oldest first."""
        now_s = self._clock()
        return {
            "ages_s": [round(now_s - at_s, 1) for at_s, _ in self._figures],
            "used": [used_bytes for _, used_bytes in self._figures],
        }

    async def _watch(self) -> None:
        while True:
            self._figures.append((self._clock(), self._read()))
            await self._sleep(INTERVAL_S)
