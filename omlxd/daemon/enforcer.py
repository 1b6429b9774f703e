"""The enforcer: looks at memory every second and whenever the engine stops for it, and acts until the limit holds.

What to do is decided by `core.policy`; this is the loop around it: read at rest, decide, act, read again, tell.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from omlxd.core.errors import OmlxError
from omlxd.core.events import Emit, Event, EventLevel, EventName
from omlxd.core.limits import Machine, MemoryLimits, resolve_limits
from omlxd.core.memory import Policy
from omlxd.core.policy import Decision, Outcome, decide
from omlxd.core.snapshot import Limits
from omlxd.core.states import EnforcerView, Level, LimitOrigin
from omlxd.daemon.ladder_walk import LadderWalk
from omlxd.daemon.machine import find_machine
from omlxd.daemon.pool import EnginePool
from omlxd.daemon.pressure_level import PressureLevel
from omlxd.engine.events import OverLimit
from omlxd.engine.orders import MIB, EngineLimits

OVERHEAD_STEP_BYTES = 16 * MIB  # so much of it more or less does not change where the engine stands still


@dataclass(frozen=True, slots=True)
class EnforcerSettings:
    """What a manifest says of limits; the arguments of `ProcessMemoryEnforcer` under their names."""

    max_bytes: int
    poll_interval: float = 1.0
    prefill_memory_guard: bool = True
    hard_limit: int | None = None
    min_available: int = 0
    policy: Policy = Policy.GRACEFUL
    limit_origin: LimitOrigin = LimitOrigin.MANIFEST

    def limits(self, machine: Machine) -> MemoryLimits:
        """The limits on this machine; raises InvalidRequest when `hard_limit` contradicts `max_bytes` or it."""
        return resolve_limits(self.max_bytes, self.hard_limit, machine, self.limit_origin)


class ProcessMemoryEnforcer:
    """Keeps the memory of a pool's models at or below `max_bytes`.

    Args:
        engine_pool: whose models are watched.
        max_bytes: the soft limit in bytes; 0 or less means no enforcement (R2).
        poll_interval: seconds between two looks; the engine also stops by itself when it is over.
        prefill_memory_guard: refuse a prefill that would pass the hard limit (R11).
        hard_limit: bytes that loads and prefill may never pass; by default it follows from the machine.
        machine: what there is to share; by default this machine.
        min_available: bytes that other programs must leave the system: with less, caches and idle models go and
            nothing new is admitted; 0 for not looking at it.
        policy: how pressure is answered.
        limit_origin: who said what `max_bytes` is.
        emit: where events go; by default where the pool's go.
        sleep: waits between two looks.
        clock: monotonic seconds.

    Raises:
        InvalidRequest: `hard_limit` is below `max_bytes` or above what the machine has.
    """

    def __init__(
        self,
        engine_pool: EnginePool,
        max_bytes: int,
        poll_interval: float = 1.0,
        prefill_memory_guard: bool = True,
        *,
        hard_limit: int | None = None,
        machine: Machine | None = None,
        min_available: int = 0,
        policy: Policy = Policy.GRACEFUL,
        limit_origin: LimitOrigin = LimitOrigin.MANIFEST,
        emit: Emit | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = engine_pool
        self._max_bytes, self._origin = max_bytes, limit_origin
        self._poll_interval_s = poll_interval
        self._guard = prefill_memory_guard
        self._hard_limit = hard_limit
        self._given_machine = machine
        self._min_available_bytes = min_available
        self._policy = policy
        self._emit = emit or engine_pool.emit
        self._sleep = sleep
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self._tick_lock = asyncio.Lock()
        self._level = PressureLevel(self._emit, engine_pool.link.drop_cache)
        self._ladder = LadderWalk(engine_pool, clock, lambda decision: self._level.become(Level.OVER, decision))
        self._overhead_bytes = 0
        self._last_error: str | None = None
        self._looked_at_s = clock()
        self._limits = self._resolved(max_bytes)

    @property
    def running(self) -> bool:
        """Whether `start` was called and `stop` was not."""
        return self._task is not None

    @property
    def level(self) -> Level:
        """ok, over and acting, or over with nothing left to do (R9)."""
        return self._level.now

    @property
    def limits(self) -> MemoryLimits:
        """The limits in force, what binds, and warnings for the user."""
        return self._limits

    @property
    def max_bytes(self) -> int:
        """The soft limit that was asked for; setting it takes effect at once (R2)."""
        return self._max_bytes

    @max_bytes.setter
    def max_bytes(self, max_bytes: int) -> None:
        self.set_limit(max_bytes, self._origin)

    def set_limit(self, max_bytes: int, origin: LimitOrigin) -> None:
        """Set the soft limit, and who said it; in force at once. Raises InvalidRequest, and changes nothing then."""
        limits = resolve_limits(max_bytes, self._hard_limit, self._machine(), origin)
        self._origin = origin
        self._change_limit(max_bytes, limits)

    def configure(self, settings: EnforcerSettings) -> None:
        """Take over other settings, at once and as a whole.

        Raises:
            InvalidRequest: the limits contradict each other or this machine; nothing was changed.
        """
        limits = settings.limits(self._machine())
        self._hard_limit, self._policy, self._guard = (
            settings.hard_limit,
            settings.policy,
            settings.prefill_memory_guard,
        )
        self._min_available_bytes, self._poll_interval_s = settings.min_available, settings.poll_interval
        self._origin = settings.limit_origin
        if settings.max_bytes != self._max_bytes:
            self._change_limit(settings.max_bytes, limits)
        else:
            self._take(limits)
        self._woken.set()

    def _change_limit(self, max_bytes: int, limits: MemoryLimits) -> None:
        before_bytes, self._max_bytes = self._max_bytes, max_bytes
        self._level.look_anew()
        self._take(limits)
        self._emit(
            Event(
                EventName.LIMIT_CHANGED,
                fields={
                    "before_bytes": before_bytes,
                    "max_memory_bytes": max_bytes,
                    "soft_limit_bytes": limits.soft_bytes,
                    "hard_limit_bytes": limits.hard_bytes,
                    "binding": limits.binding,
                    "limit_origin": limits.origin.value,
                },
            )
        )
        self._woken.set()

    def start(self) -> None:
        """Put the limits in force and begin to watch; the second call does nothing."""
        if self._task is not None:
            return
        self._pool.bind()
        self._pool.on_over_limit = self._on_over_limit
        self._pool.on_engine_started = self._on_engine_started
        self._pool.on_wanted_block = self.relieve
        self._take(self._resolved(self._max_bytes))
        self._looked_at_s = self._clock()
        self._task = asyncio.create_task(self._watch(), name="omlxd-enforcer")

    async def stop(self) -> None:
        """End the watch, lift the limits and clear the flags it set (R13); the second call does nothing."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait([task])
        self._pool.on_over_limit = self._pool.on_engine_started = self._pool.on_wanted_block = None
        for entry in self._pool.entries.values():
            entry.abort_loading = False
        self._level.end()
        self._pool.set_limits(Limits(policy=self._policy), EngineLimits(prefill_memory_guard=False))
        self._pool.link.release()

    async def settle(self) -> list[Decision]:
        """Look now and act until the limit holds or nothing is left to do; returns what was decided and done.

        The last decision is the one that found nothing more to do.
        """
        async with self._tick_lock:
            return await self._tick()

    async def relieve(self, model: str) -> None:
        """Walk the ladder until the next block of the model's decode batch fits, or nothing is left to do."""
        async with self._tick_lock:
            await self._ladder.walk(model)
            self._level.judge(decide(self._pool.snapshot(self._pool.engine.read()), self._pool.limits))

    def view(self) -> EnforcerView:
        """What `status` shows."""
        return EnforcerView(
            policy=self._policy.value,
            poll_interval_s=self._poll_interval_s,
            level=self._level.now,
            decisions=self._pool.decisions.count,
            reason=self._level.reason,
        )

    def overdue_s(self) -> float:
        """Seconds since a look at memory should have ended; 0.0 while they come in time, or when it is stopped."""
        due_s = self._looked_at_s + self._poll_interval_s
        return max(0.0, self._clock() - due_s) if self.running else 0.0

    async def _watch(self) -> None:
        """R1: a tick per poll interval, and at once when woken; an exception in one is told, and the loop goes on."""
        while True:
            self._woken.clear()
            try:
                await self.settle()
                self._last_error = None
            except Exception as error:
                self._tell_error(error)
            self._looked_at_s = self._clock()
            await self._pause()

    async def _pause(self) -> None:
        pause = asyncio.ensure_future(self._sleep(self._poll_interval_s))
        woken = asyncio.ensure_future(self._woken.wait())
        try:
            await asyncio.wait([pause, woken], return_when=asyncio.FIRST_COMPLETED)
        finally:
            pause.cancel()
            woken.cancel()

    async def _tick(self) -> list[Decision]:
        """Decide and act until nothing is left to do; whatever happens, an engine that stands still goes on."""
        pool, decisions = self._pool, list[Decision]()
        try:
            reading = pool.engine.read()
            self._overhead_bytes = reading.pressure_bytes(self._policy) - reading.active_bytes
            glance = decide(pool.snapshot(reading), pool.limits)
            if glance.action is None and glance.outcome is Outcome.WITHIN_LIMIT:
                self._level.become(Level.OK, glance)
                return [glance]
            decisions = await self._ladder.walk()
            if decisions:
                self._level.judge(decisions[-1])
        finally:
            self._send_limits()
            pool.link.release()
        return decisions

    def _take(self, limits: MemoryLimits) -> None:
        """Put these limits in force everywhere, and warn once about what is not as asked."""
        new_warnings = [text for text in limits.warnings if self._task is None or text not in self._limits.warnings]
        self._limits = limits
        self._send_limits()
        for text in new_warnings:
            self._emit(Event(EventName.LIMIT_WARNING, EventLevel.WARNING, fields={"message": text}))

    def _send_limits(self) -> None:
        limits = Limits(
            self._limits.soft_bytes,
            self._limits.hard_bytes,
            self._limits.binding,
            self._policy,
            hard_binding=self._limits.hard_binding,
            tolerated_bytes=self._level.tolerated_bytes,
            min_available_bytes=self._min_available_bytes,
            origin=self._limits.origin,
        )
        engine_limits = EngineLimits(limits.soft_bytes, limits.hard_bytes, self._pause_above(limits), self._guard)
        if (limits, engine_limits) != (self._pool.limits, self._pool.link.wanted.limits):
            self._pool.set_limits(limits, engine_limits)

    def _pause_above(self, limits: Limits) -> int:
        """The active memory above which the engine stands still: overhead is not its concern."""
        if limits.soft_bytes <= 0:
            return 0
        overhead_bytes = self._overhead_bytes // OVERHEAD_STEP_BYTES * OVERHEAD_STEP_BYTES
        return max(1, max(limits.soft_bytes, limits.tolerated_bytes) - overhead_bytes)

    def _on_over_limit(self, event: OverLimit) -> None:
        self._woken.set()

    def _on_engine_started(self) -> None:
        """Only now MLX can say what the device allows."""
        if self._given_machine is None:
            try:
                self._take(self._resolved(self._max_bytes))
            except OmlxError as error:  # an explicit hard limit above what the device has just turned out to allow
                self._emit(Event(EventName.LIMIT_WARNING, EventLevel.WARNING, fields=error.to_json()))
            self._woken.set()

    def _resolved(self, max_bytes: int) -> MemoryLimits:
        return resolve_limits(max_bytes, self._hard_limit, self._machine(), self._origin)

    def _machine(self) -> Machine:
        return self._given_machine or find_machine(self._pool.engine.device_cap())

    def _tell_error(self, error: Exception) -> None:
        """Once per distinct message in a row."""
        text = f"{type(error).__name__}: {error}"
        if text != self._last_error:
            self._last_error = text
            self._emit(Event(EventName.ENFORCER_ERROR, EventLevel.ERROR, fields={"error": text}))
