"""Decode batches grow block by block: each block is in the ledger before the engine may allocate it.

Normally the next block is reserved while the last one is still being filled, and the engine never stops. When it does
not fit, nobody is asked to give way before it is really needed: then idle models go, and then the enforcer's ladder
is walked with the block counted as if it were there.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from omlxd.core.admission import Admission, AdmissionKind, decide_block
from omlxd.core.memory import Policy
from omlxd.core.snapshot import Snapshot, WantedBlock
from omlxd.core.units import format_bytes
from omlxd.daemon.decisions import DecisionRecord
from omlxd.daemon.eviction import make_way
from omlxd.daemon.refusals import aborted
from omlxd.daemon.snapshots import holdings_of

if TYPE_CHECKING:
    from omlxd.daemon.pool import EnginePool


class Growth:
    """Keeps one pool's grants ahead of its decoding requests."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def waiting(self) -> frozenset[str]:
        """The models that stand still until room for their next block is found."""
        return frozenset(self._tasks)

    def grant(self) -> None:
        """Tell the engine how far each model may grow."""
        pool = self._pool
        granted = pool.ledger.granted_tokens() if self.is_bound else {}
        if granted != pool.link.wanted.granted_tokens:
            pool.link.wanted.granted_tokens = granted
            pool.link.changed()

    def generated(self, model: str, request: str, tokens: int) -> None:
        """A request has become longer."""
        pool = self._pool
        if pool.ledger.grow(model, request, tokens) and (not self.is_bound or self._answer(model).fits):
            self._extend(model)

    def needs_block(self, model: str, length_tokens: int) -> None:
        """The model stands still until it is granted more than this length."""
        granted = self._pool.link.wanted.granted_tokens.get(model)
        if granted is None or granted > length_tokens or model in self._tasks:
            return  # a plan that says so is on its way
        task = asyncio.create_task(self._find(model), name=f"omlxd-block-{model}")
        self._tasks[model] = task
        task.add_done_callback(lambda _: self._found(model))

    def wanted(self, snapshot: Snapshot, model: str) -> WantedBlock | None:
        """What the model's next block lacks; None when it fits, or nobody needs it any more."""
        if not self._pool.ledger.requests(model):
            return None
        answer = self._decide(snapshot, model)
        if answer.kind is AdmissionKind.ADMIT:
            return None
        return WantedBlock(model, answer.need_bytes, answer.short_bytes, answer.limit)

    async def close(self) -> None:
        """End what still looks for room."""
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    @property
    def is_bound(self) -> bool:
        """Whether requests have to keep to what was reserved: not without the guard, nor without limits."""
        limits = self._pool.limits
        return self._pool.door.guarded and (limits.soft_bytes > 0 or limits.hard_bytes > 0)

    def _answer(self, model: str) -> Admission:
        return self._decide(holdings_of(self._pool, self._pool.engine.read()), model)

    def _decide(self, snapshot: Snapshot, model: str) -> Admission:
        return decide_block(snapshot, self._pool.limits, self._pool.ledger, model)

    def _extend(self, model: str) -> None:
        self._pool.ledger.extend(model)
        self.grant()

    def _found(self, model: str) -> None:
        self._tasks.pop(model, None)
        self._pool.door.wake()  # which let this go first

    async def _find(self, model: str) -> None:
        """Make room for the block, or end the requests that need it; the model never stands still for good."""
        pool = self._pool
        if await self._evict_for(model):
            return
        if pool.on_wanted_block is not None:
            await pool.on_wanted_block(model)
        if not pool.ledger.requests(model):
            return
        answer = self._answer(model)
        if not answer.fits and self._passes_hard(model):
            await self._end(model, answer)
        else:
            self._extend(model)  # over the soft limit with nothing left to do: the same as ever (R9)

    async def _end(self, model: str, answer: Admission) -> None:
        """The last resort: nobody may pass the hard limit, pinned or not; `graceful` keeps what was answered so far."""
        pool, begun_s = self._pool, self._pool.clock()
        graceful = pool.limits.policy is Policy.GRACEFUL
        hard = f"the hard limit {format_bytes(pool.limits.hard_bytes)} ({pool.limits.hard_binding})"
        need = f"the next block of `{model}`'s KV cache needs {format_bytes(answer.need_bytes)}"
        reason = f"{need} and would pass {hard}, and nobody else can give way"
        before = pool.engine.read()
        async with pool.lock:
            decision = pool.decisions.begin()
            if graceful:
                await self._cut_short(model, reason, decision)
            else:
                await pool.levers.abort_requests(model, aborted(model, reason, decision))
            after = await pool.read_rest() or pool.engine.read()
        record = DecisionRecord(
            trigger="block",
            rung="hard_limit",
            action="cut_short" if graceful else "abort_requests",
            victim=model,
            reason=reason,
            before=before,
            after=after,
            duration_s=pool.clock() - begun_s,
            decision=decision,
        )
        pool.decisions.add(record, pool.limits)

    async def _cut_short(self, model: str, why: str, decision: str) -> None:
        """End the longest request, whose block it is, and the next longest, until the block fits the others."""
        pool, entry = self._pool, self._pool.entries[model]
        while not self._answer(model).fits and self._passes_hard(model):
            running = [entry.requests[each.request] for each in pool.dispatch.running().get(model, ())]
            if not running:
                return
            longest = max(running, key=lambda each: each.prompt_tokens + each.generated_tokens)
            await pool.dispatch.cut_short(longest.id, why, decision)
        self._extend(model)

    async def _evict_for(self, model: str) -> bool:
        """Unload idle models one by one until the block fits; whether it does, and is reserved."""
        pool = self._pool
        async with pool.lock:
            reading = await pool.read_rest() or pool.engine.read()
            while True:
                answer = self._decide(holdings_of(pool, reading), model)
                if answer.fits:
                    self._extend(model)
                    return True
                if answer.kind is not AdmissionKind.EVICT:
                    return False
                reading = await make_way(
                    pool,
                    answer.victims[0],
                    model,
                    trigger="block",
                    why=answer.why,
                    before=reading,
                    candidates=answer.candidates,
                    extra={"need_bytes": answer.need_bytes, "short_bytes": answer.short_bytes},
                )

    def _passes_hard(self, model: str) -> bool:
        pool = self._pool
        difference = pool.ledger.if_extended(model)
        would_be_bytes = pool.ledger.committed_bytes + difference.stays_bytes + difference.transient_bytes
        return 0 < pool.limits.hard_bytes < would_be_bytes
