"""Unloads a model that nobody uses, for somebody who needs its memory or because its time is over, and records why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omlxd.core.memory import MemoryReading
from omlxd.core.snapshot import Candidate
from omlxd.daemon.decisions import DecisionRecord
from omlxd.daemon.refusals import aborted

if TYPE_CHECKING:
    from omlxd.daemon.pool import EnginePool


async def make_way(
    pool: EnginePool,
    victim: str,
    for_model: str,
    *,
    trigger: str,
    why: str,
    before: MemoryReading,
    candidates: Sequence[Candidate],
    extra: Mapping[str, Any],
) -> MemoryReading:
    """Unload `victim` for `for_model`; returns what is in use afterwards, at rest. Hold the pool's lock.

    Args:
        trigger: what needs the memory: `load`, `request` or `block`.
        why: the reason in plain words with numbers.
        before: the reading that was decided on.
        extra: numbers of this kind of decision.
    """
    begun_s = pool.clock()
    decision = pool.decisions.begin()
    await pool.levers.evict(victim, aborted(victim, f"`{for_model}` needs its memory", decision))
    after = await pool.read_rest() or pool.engine.read()
    record = DecisionRecord(
        trigger=trigger,
        rung="make_room",
        action="unload",
        victim=victim,
        reason=why,
        before=before,
        after=after,
        candidates=candidates,
        duration_s=pool.clock() - begun_s,
        extra={"for_model": for_model, **extra},
        decision=decision,
    )
    pool.decisions.add(record, pool.limits)
    return after


async def unload(pool: EnginePool, victim: str, reason: str, *, trigger: str, told: str) -> None:
    """Unload `victim` for its own sake, and not for somebody else's; returns when it is gone. Hold the pool's lock.

    Args:
        reason: in plain words with numbers, for the record.
        trigger: what is behind it: `ttl` or `reload`.
        told: the reason in the words for a request that it may still have.
    """
    begun_s, before, decision = pool.clock(), pool.engine.read(), pool.decisions.begin()
    await pool.levers.evict(victim, aborted(victim, told, decision))
    record = DecisionRecord(
        trigger=trigger,
        rung=trigger,
        action="unload",
        victim=victim,
        reason=reason,
        before=before,
        after=pool.engine.read(),
        duration_s=pool.clock() - begun_s,
        decision=decision,
    )
    pool.decisions.add(record, pool.limits)
