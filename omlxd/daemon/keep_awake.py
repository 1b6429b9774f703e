"""Keeps the machine from falling asleep of idleness while requests are in flight, and no longer.

On macOS only. A Linux server does not sleep by itself, and on a Linux desktop that is the user's own setting, for which
`systemd-inhibit --what=idle omlxd start --foreground` is at hand.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Final, Protocol

from omlxd.core.errors import OmlxError
from omlxd.core.events import Emit, Event, EventLevel, EventName
from omlxd.core.wakefulness import Wakefulness
from omlxd.daemon.caffeinate import Caffeinate
from omlxd.daemon.pool import EnginePool
from omlxd.daemon.watcher import Watcher

LINGER_S: Final = 30.0  # the pause between two questions of a chat; a Mac falls asleep after minutes


class SleepAssertion(Protocol):
    """What the system offers against idle sleep; gone with the process at the latest."""

    async def hold(self) -> None:
        """Hold it, if it is not held already; raises OmlxError when that does not work."""
        ...

    async def release(self) -> None:
        """Let it go; idempotent."""
        ...


def sleep_assertion(platform: str = sys.platform) -> SleepAssertion | None:
    """This system's, or None where there is nothing to hold off."""
    return Caffeinate() if platform == "darwin" else None


class KeepAwake(Watcher):
    """Watches the requests of one pool; the machine may sleep again when it is stopped.

    Args:
        pool: whose requests must not be interrupted by sleep.
        assertion: what holds it off; None for not at all.
        emit: where events go.
        linger_s: seconds that it is held after the last request.

    Attributes:
        wanted: whether sleep is held off at all; a change counts from the pool's next one on.
    """

    task_name = "omlxd-awake"

    def __init__(
        self, pool: EnginePool, assertion: SleepAssertion | None, emit: Emit, linger_s: float = LINGER_S
    ) -> None:
        self._pool, self._assertion, self._emit, self._linger_s = pool, assertion, emit, linger_s
        self.wanted = True
        self._now = Wakefulness()
        self._vain = False
        self._last_error: str | None = None

    @property
    def _has_something_to_watch(self) -> bool:
        return self._assertion is not None

    async def _watch(self) -> None:
        if (assertion := self._assertion) is None:
            return
        try:
            while True:
                change = self._pool.change  # taken before the look: what happens meanwhile is not missed
                now_s, busy = self._pool.clock(), self.wanted and self._pool.serves_any
                self._vain = self._vain and busy  # not tried again before these requests are over
                if not self._vain:
                    await self._become(self._now.look(busy, now_s, self._linger_s), assertion)
                try:
                    async with asyncio.timeout(self._now.left_s(now_s, self._linger_s)):
                        await change.wait()
                except TimeoutError:
                    pass
        finally:
            await assertion.release()

    async def _become(self, now: Wakefulness, assertion: SleepAssertion) -> None:
        before, self._now = self._now, now
        if now.held:
            try:
                await assertion.hold()
            except OmlxError as error:
                self._now, self._vain = Wakefulness(), True
                self._tell_vain(error.message)
                return
            self._last_error = None
        elif before.held:
            await assertion.release()
        if now.held is not before.held:
            self._emit(Event(EventName.SLEEP_PREVENTED if now.held else EventName.SLEEP_ALLOWED, EventLevel.DEBUG))

    def _tell_vain(self, message: str) -> None:
        """Once per distinct message in a row."""
        if message != self._last_error:
            self._last_error = message
            self._emit(Event(EventName.SLEEP_NOT_PREVENTED, EventLevel.WARNING, fields={"error": message}))
