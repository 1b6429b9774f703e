"""Walks the ladder of rungs: reads memory at rest, decides, acts and records, until nothing is left to do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from omlxd.core.memory import MemoryReading
from omlxd.core.policy import (
    AbortRequests,
    Action,
    CancelLoad,
    Decision,
    DropCache,
    Park,
    TrimPrefixCaches,
    Unload,
    decide,
)
from omlxd.daemon.decisions import DecisionRecord
from omlxd.daemon.pool import EnginePool
from omlxd.daemon.refusals import aborted, cancelled

ACTION_TIMEOUT_S = 30.0  # an engine that is stuck in a step cannot obey; look again at the next tick
MAX_ACTIONS_PER_WALK = 1000


class LadderWalk:
    """Carries out what `core.policy` decides, one action at a time.

    Args:
        pool: whose memory is short.
        clock: monotonic seconds.
        on_action: told before an action that is more than dropping a cache.
    """

    def __init__(self, pool: EnginePool, clock: Callable[[], float], on_action: Callable[[Decision], None]) -> None:
        self._pool = pool
        self._clock = clock
        self._on_action = on_action

    async def walk(self, wanted_by: str | None = None) -> list[Decision]:
        """Read at rest, decide, act, until nothing is left to do; with a model's next block counted as pressure."""
        pool, decisions, futile = self._pool, list[Decision](), frozenset[Action]()
        async with pool.lock:
            reading = await pool.read_rest()
            while reading is not None and len(decisions) < MAX_ACTIONS_PER_WALK:
                decision = self._decide(reading, wanted_by, futile)
                if decisions and decision.action is not None and decision.action == decisions[-1].action:
                    futile |= {decision.action}  # it was done and changed nothing: the next best, or nothing
                    decision = self._decide(reading, wanted_by, futile)
                decisions.append(decision)
                if decision.action is None:
                    break
                reading = await self._do(decision, decision.action, reading, wanted_by)
                if decision.rung.startswith("system"):
                    break  # what the system has is known a moment later; the next tick sees it
        return decisions

    def _decide(self, reading: MemoryReading, wanted_by: str | None, futile: frozenset[Action]) -> Decision:
        pool, limits = self._pool, self._pool.limits
        snapshot = pool.snapshot(reading)
        if wanted_by is None:
            return decide(snapshot, limits, futile)
        if limits.soft_bytes <= 0:  # only the hard limit binds
            limits = replace(limits, soft_bytes=limits.hard_bytes, binding=limits.hard_binding)
        return decide(replace(snapshot, wanted=pool.growth.wanted(snapshot, wanted_by)), limits, futile)

    async def _do(
        self, decision: Decision, action: Action, before: MemoryReading, wanted_by: str | None
    ) -> MemoryReading | None:
        """Act, read again at rest, and tell; None when the engine did not get to rest."""
        pool, begun_s = self._pool, self._clock()
        if not isinstance(action, DropCache):
            self._on_action(decision)
        decision_id, after = pool.decisions.begin(), None
        try:
            async with asyncio.timeout(ACTION_TIMEOUT_S):
                await self._act(action, decision, decision_id)
            after = await pool.read_rest()
        except TimeoutError:
            pass  # what it has begun goes on; the record tells what was seen and asked for
        if isinstance(action, DropCache) and (after is None or after.cache_bytes >= before.cache_bytes):
            return after  # an idle engine keeps its cache until it has a step to take; nothing was done
        record = DecisionRecord(
            trigger="limit" if wanted_by is None else "block",
            rung=decision.rung,
            action=_KINDS[type(action)],
            victim=None if isinstance(action, DropCache | TrimPrefixCaches) else action.model,
            reason=decision.reason,
            before=before,
            after=after or pool.engine.read(),
            candidates=decision.candidates,
            duration_s=self._clock() - begun_s,
            extra={} if wanted_by is None else {"for_model": wanted_by},
            decision=decision_id,
        )
        pool.decisions.add(record, pool.limits)
        return after

    async def _act(self, action: Action, decision: Decision, decision_id: str) -> None:
        levers, reason = self._pool.levers, decision.reason
        match action:
            case Unload(model=model):
                await levers.evict(model, aborted(model, f"the model was unloaded, because {reason}", decision_id))
            case AbortRequests(model=model):
                await levers.abort_requests(model, aborted(model, reason, decision_id))
            case CancelLoad(model=model, retried=False):
                await levers.cancel_load(model, cancelled(model, reason, decision_id))
            case CancelLoad(model=model):
                await levers.postpone_load(model, cancelled(model, reason, decision_id))
            case Park(request=request):
                await levers.park(request, reason, decision_id)
            case TrimPrefixCaches(keep_bytes=keep_bytes):
                await levers.trim_prefix_caches(keep_bytes)
            case DropCache():  # the engine drops it between steps, since it has the hard limit
                self._pool.link.release()
                self._pool.link.changed()
                if decision.rung == "system_cache":  # of which the engine knows nothing
                    self._pool.link.drop_cache()


_KINDS = {
    Unload: "unload",
    AbortRequests: "abort_requests",
    CancelLoad: "cancel_load",
    DropCache: "drop_cache",
    TrimPrefixCaches: "trim_prefix_caches",
    Park: "park",
}
