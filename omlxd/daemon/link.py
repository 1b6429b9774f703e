"""The pool's end of the plan/event seam: keeps what should be, and sends it as one plan per turn of the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from omlxd.core.memory import MemoryReading
from omlxd.daemon.memory_terms import MemoryTerms
from omlxd.engine.events import EngineEvent, OverLimit
from omlxd.engine.orders import EngineLimits, GenerationOrder, LoadOrder, Plan
from omlxd.engine.protocol import Engine

THEN_AT_ONCE: Final = 32
"""Of those that wait for the engine in one turn of the loop: a thousand requests may go away together."""


@dataclass
class Wanted:
    """What should be, as the pool edits it; `EngineLink.changed` sends it."""

    resident: set[str] = field(default_factory=set)
    load: LoadOrder | None = None
    requests: dict[str, GenerationOrder] = field(default_factory=dict)
    limits: EngineLimits = field(default_factory=EngineLimits)
    granted_tokens: dict[str, int] = field(default_factory=dict)
    cache_drops: int = 0
    coming: Counter[str] = field(default_factory=Counter)


class EngineLink:
    """Carries plans down and events up; binds to the running loop and starts the engine on first use.

    Args:
        engine: what runs models.
        on_events: called on the loop's thread with each batch of events, in order.
        prefill_chunk_tokens: tokens of one prefill step at most.
        max_batch: requests of one model that decode together.
        terms: what is said of memory, asked for each plan.
    """

    def __init__(
        self,
        engine: Engine,
        on_events: Callable[[Sequence[EngineEvent]], None],
        *,
        prefill_chunk_tokens: int,
        max_batch: int,
        terms: Callable[[], MemoryTerms],
    ) -> None:
        self.engine = engine
        self.wanted = Wanted()
        self._on_events = on_events
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.max_batch = max_batch
        self._terms = terms
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False
        self._seen_seq = 0
        self._held_seq: int | None = None
        self._closed = False
        self._fences: set[asyncio.Task[None]] = set()
        self._behind_fence: list[Callable[[], None]] = []
        self._told_coming: Mapping[str, int] = {}

    @property
    def bound(self) -> bool:
        """Whether the engine was started and not closed."""
        return self._loop is not None and not self._closed

    def bind(self) -> None:
        """Start the engine for the running loop; does nothing the second time.

        Raises:
            RuntimeError: another loop uses it, or it was closed.
        """
        loop = asyncio.get_running_loop()
        if self._closed:
            raise RuntimeError("the pool is closed")
        if self._loop is None:
            self._loop = loop
            self.engine.start(self._post)
        elif self._loop is not loop:
            raise RuntimeError("the pool belongs to another event loop")

    def changed(self) -> None:
        """Send what is wanted with the next turn of the loop; many changes of one turn make one plan."""
        if self._loop is None or self._closed or self._scheduled:
            return
        self._scheduled = True
        self._loop.call_soon(self._apply)

    @contextmanager
    def coming(self, model: str) -> Iterator[None]:
        """While a short prompt is being made ready for the engine, which then waits a moment for it."""
        coming = self.wanted.coming
        coming[model] += 1
        try:
            yield
        finally:
            coming[model] -= 1
            if model in self._told_coming:
                self.changed()

    def drop_cache(self) -> None:
        """Have MLX's buffer cache given back, whatever the limits say."""
        self.wanted.cache_drops += 1
        self.changed()

    def hold(self, event: OverLimit) -> None:
        """Do not acknowledge this event yet: the engine stands still until `release`."""
        if self._held_seq is None:
            self._held_seq = event.seq

    def release(self) -> None:
        """Acknowledge what was held; the engine goes on after it has obeyed the next plan."""
        if self._held_seq is not None:
            self._held_seq = None
            self.changed()

    def after_fence(self, then: Callable[[], None]) -> None:
        """Call `then` once the engine has obeyed what is wanted now and its events of that have been handled.

        A plan may be replaced before the engine looks at it, so what was wanted for a moment only may never have begun,
        and no event will say that it ended. A reading at rest is answered after the newest plan was obeyed, and the
        events of that are posted before the next one is answered.
        """
        self._behind_fence.append(then)
        if len(self._behind_fence) > 1:
            return  # the next fence has not begun: it is behind it too

        async def fence() -> None:
            behind, self._behind_fence = self._behind_fence, []
            await self.read_rest(None)
            await self.read_rest(None)
            for number, each in enumerate(behind, 1):
                if number % THEN_AT_ONCE == 0:
                    await asyncio.sleep(0)
                try:
                    each()
                except Exception as error:  # a bug of ours; the others behind it must not get lost with it
                    logging.getLogger("omlxd").error("what waited for the engine failed", exc_info=error)

        task = asyncio.create_task(fence())
        self._fences.add(task)
        task.add_done_callback(self._fences.discard)

    async def read_rest(self, timeout_s: float | None) -> MemoryReading | None:
        """A reading with no step in flight, or None when the running step does not end in time."""
        if self._scheduled:
            self._apply()  # what was just asked for counts from this reading on
        future = asyncio.wrap_future(self.engine.rest())
        done, _ = await asyncio.wait([future], timeout=timeout_s)
        if not done:
            future.add_done_callback(lambda late: late.cancelled() or late.exception())
            return None
        return future.result()

    async def close(self, timeout_s: float) -> bool:
        """End the engine without blocking the loop; True when it ended in time."""
        started, self._closed = self._loop is not None, True
        for fence in self._fences:
            fence.cancel()
        return await asyncio.to_thread(self.engine.close, timeout_s) if started else True

    def _apply(self) -> None:
        self._scheduled = False
        if self._closed:
            return
        wanted, seen_seq, terms = self.wanted, self._seen_seq, self._terms()
        self._told_coming = {model: count for model, count in wanted.coming.items() if count}
        if self._held_seq is not None:
            seen_seq = min(seen_seq, self._held_seq - 1)
        self.engine.apply(
            Plan(
                resident=frozenset(wanted.resident),
                load=wanted.load,
                requests=dict(wanted.requests),
                limits=wanted.limits,
                prefill_chunk_tokens=self.prefill_chunk_tokens,
                max_batch=self.max_batch,
                seen_seq=seen_seq,
                granted_tokens=dict(wanted.granted_tokens),
                cache_drops=wanted.cache_drops,
                transient_bytes=terms.transient_bytes,
                promised_bytes=terms.promised_bytes,
                group_tokens=terms.group_tokens,
                coming=self._told_coming,
                prefix_cache_bytes=terms.prefix_cache_bytes,
            )
        )

    def _post(self, events: Sequence[EngineEvent]) -> None:
        """Called on the engine's thread."""
        if self._loop is None or self._loop.is_closed():
            return
        try:
            self._loop.call_soon_threadsafe(self._receive, tuple(events))
        except RuntimeError:
            pass  # the loop closed in between; nobody is left to tell

    def _receive(self, events: Sequence[EngineEvent]) -> None:
        if self._closed or not events:
            return
        self._seen_seq = max(self._seen_seq, events[-1].seq)
        self._on_events(events)
