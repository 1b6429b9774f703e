"""Any order of loads, unloads, pins, requests, aborts, limits and steps: nothing is lost, wedged or evicted wrongly."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from omlxd.core.costs import NO_COSTS, KvCosts
from omlxd.core.errors import OmlxError
from omlxd.core.events import Event, EventName
from omlxd.core.ledger import Share
from omlxd.core.memory import Policy
from omlxd.core.states import EntryState, Level
from omlxd.daemon.enforcer import ProcessMemoryEnforcer
from omlxd.daemon.entry import EnginePoolEntry
from omlxd.daemon.monitor import MemoryMonitor
from omlxd.daemon.request import Generation
from omlxd.engine.orders import MIB
from tests.fakes.clock import VirtualTimeLoop
from tests.fakes.costs import FakeCosts
from tests.fakes.pools import Scene, turns

SIZES = {"a": 100, "b": 200, "c": 300, "d": 400}
names = st.sampled_from(sorted(SIZES))
T = TypeVar("T")

LEGAL = {
    (EntryState.UNLOADED, EntryState.LOADING),
    (EntryState.LOADING, EntryState.LOADED),
    (EntryState.LOADING, EntryState.UNLOADED),
    (EntryState.LOADING, EntryState.UNLOADING),
    (EntryState.LOADING, EntryState.FAILED),
    (EntryState.LOADED, EntryState.UNLOADING),
    (EntryState.UNLOADING, EntryState.UNLOADED),
    (EntryState.UNLOADED, EntryState.FAILED),
    (EntryState.FAILED, EntryState.UNLOADED),
    (EntryState.FAILED, EntryState.LOADING),
}


class WatchedEntry(EnginePoolEntry):
    """An entry that takes only the legal turns of its life, and remembers whether it was pinned when it was evicted."""

    was_pinned = False

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "state" and value is not self.state:
            assert (self.state, value) in LEGAL, f"`{self.name}`: {self.state} -> {value}"
            if value is EntryState.UNLOADING:
                self.was_pinned = self.pinned
        super().__setattr__(name, value)


class PoolMachine(RuleBasedStateMachine):
    """Hypothesis plays users, enforcer and engine; the engine takes a step only when told to."""

    prompt_tokens = 5
    token_bytes = MIB
    costs: KvCosts = NO_COSTS

    @initialize(
        limit_mib=st.sampled_from([0, 350, 500, 700, 1100]),
        policy=st.sampled_from(Policy),
        answer=st.sampled_from([1, 8, None]),
        loaded=st.lists(names, unique=True),
        pinned=st.sets(names),
    )
    def begin(self, limit_mib: int, policy: Policy, answer: int | None, loaded: list[str], pinned: set[str]) -> None:
        self.runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
        self.requests: dict[Generation, asyncio.Task[list[End]]] = {}
        self.tasks: list[asyncio.Task[Any]] = []
        self.wrong: list[str] = []
        self.run(self._begin(policy, answer, loaded, pinned))
        self.enforcer.max_bytes = limit_mib * MIB

    async def _begin(self, policy: Policy, answer: int | None, loaded: list[str], pinned: set[str]) -> None:
        self.scene = Scene(
            SIZES,
            drive="manual",
            answer_tokens=answer,
            kv_bytes_per_token=self.token_bytes,
            load_wait_s=20.0,
            drain_timeout_s=5.0,
            park_deadline_s=30.0,
            costs=self.costs,
        )
        self.pool, self.engine = self.scene.pool, self.scene.engine
        self.scene.on_event = self.watched
        for entry in self.pool.entries.values():
            entry.__class__ = WatchedEntry
        self.enforcer: ProcessMemoryEnforcer = self.scene.enforcer(0, min_available=1024 * MIB, policy=policy)
        self.enforcer.start()
        self.monitor = MemoryMonitor(self.pool)
        for name in loaded:
            loading = asyncio.create_task(self.pool.load(name))
            while not loading.done():
                self.engine.step()
                await turns()
        for name in pinned:
            self.pool.pin(name)

    def watched(self, event: Event) -> None:
        """What goes wrong is kept for the invariant: an exception here would be the enforcer's to report."""
        if event.event is EventName.ENFORCER_ERROR:
            self.wrong.append(event.fields["error"])
        evicted = event.fields["victim"] if event.event is EventName.DECISION else None
        if evicted and event.fields["action"] == "unload" and self.pool.entries[evicted].was_pinned:
            self.wrong.append(f"the pinned `{evicted}` was evicted")

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def until_quiet() -> T:
            result = await work
            await turns(3)
            return result

        return self.runner.run(until_quiet())

    @rule(name=names, max_tokens=st.sampled_from([1, 3, 60]))
    def generate(self, name: str, max_tokens: int) -> None:
        async def ask() -> None:
            tokens = [1] * self.prompt_tokens
            generation = self.pool.generate(name, tokens=tokens, max_tokens=max_tokens)
            self.requests[generation] = asyncio.create_task(ends_of(generation))

        self.run(ask())

    @rule(name=names)
    def load(self, name: str) -> None:
        self._spawn(self.pool.load(name))

    @rule(name=names, now=st.booleans())
    def unload(self, name: str, now: bool) -> None:
        self._spawn(self.pool.unload(name, now=now))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        async def spawn() -> None:
            self.tasks.append(asyncio.create_task(quietly(work)))

        self.run(spawn())

    @rule(name=names)
    def pin(self, name: str) -> None:
        # an eviction under way was decided before the pin
        if self.pool.entries[name].state is not EntryState.UNLOADING:
            self.run(_call(self.pool.pin, name))

    @rule(name=names)
    def unpin(self, name: str) -> None:
        self.run(_call(self.pool.unpin, name))

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if running := [generation for generation in self.requests if not generation.ended]:
            chosen = data.draw(st.sampled_from(running))
            self.run(_call(self.pool.abort, chosen.id, "a test asked for it"))

    @rule(data=st.data(), count=st.integers(1, 3))
    def park(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            if running := [generation for generation in self.requests if not generation.ended]:
                chosen = data.draw(st.sampled_from(running))
                self._spawn(self.pool.levers.park(chosen.id, "a test asks for it"))

    @rule(data=st.data())
    def caller_goes_away(self, data: st.DataObject) -> None:
        if running := [generation for generation in self.requests if not generation.ended]:
            chosen = data.draw(st.sampled_from(running))
            self.requests[chosen].cancel()
            self.run(turns())

    @rule(limit_mib=st.sampled_from([0, 50, 350, 500, 1100]))
    def limit(self, limit_mib: int) -> None:
        self.enforcer.max_bytes = limit_mib * MIB
        self.run(turns())

    @rule(leak_mib=st.sampled_from([0, 0, 400]))
    def leak(self, leak_mib: int) -> None:
        self.engine.leak_bytes = leak_mib * MIB

    @rule(steps=st.integers(1, 12))
    def engine_steps(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()
            self.run(turns())

    @rule(count=st.integers(1, 5), name=names)
    def generate_and_decode(self, count: int, name: str) -> None:
        for _ in range(count):
            self.generate(name, 60)
        self.engine_steps(12)

    @rule(seconds=st.sampled_from([0.1, 1.1, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @invariant()
    def states_are_legal_and_true(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.wrong == []
        for name, entry in self.pool.entries.items():
            if entry.state is EntryState.LOADED:
                assert name in self.engine.loaded
            assert entry.running <= len(entry.requests)
        assert sum(entry.state is EntryState.LOADING for entry in self.pool.entries.values()) <= 1

    @invariant()
    def views_that_were_kept_are_what_they_would_be_made_now(self) -> None:
        if hasattr(self, "monitor"):
            self.run(self._look())

    async def _look(self) -> None:
        assert self.monitor.models() == MemoryMonitor(self.pool).models()

    def teardown(self) -> None:
        if not hasattr(self, "runner"):
            return
        try:
            self.run(self._finish())
        finally:
            self.runner.close()

    async def _finish(self) -> None:
        """Everything ends when the engine works on: no request, load or unload waits for ever."""
        self.engine.leak_bytes = 0
        for _ in range(2_000):  # over a limit for pinned models alone, a request may get on by one token a stay
            if all(task.done() for task in (*self.requests.values(), *self.tasks)):
                break
            self.engine.step()
            await turns()
            if not self.engine.step():
                await asyncio.sleep(0.5)
        for generation, task in self.requests.items():
            assert task.done(), f"a request to `{generation.model}` never ended: {self.scene.states}"
            if not task.cancelled():
                (end,) = task.result()  # a request ends exactly once
                assert end.text == "".join(f"tok{at} " for at in range(generation.generated_tokens))
        assert all(task.done() for task in self.tasks), f"a load or unload never ended: {self.scene.states}"
        await turns(20)
        while self.engine.step():
            await turns()
        assert all(not entry.requests for entry in self.pool.entries.values())
        assert all(kv == 0 for kv in self.engine.kv_bytes().values())
        await asyncio.gather(*(self._settled() for _ in range(2)))
        if self.enforcer.level is Level.OK and self.enforcer.max_bytes > 0:
            assert self.engine.active_bytes <= self.enforcer.max_bytes
        await self.enforcer.stop()
        await self.pool.close()
        assert self.engine.active_bytes == 0
        assert self.wrong == []
        ends = [event.request for event in self.scene.events if event.event in ENDS]
        assert len(ends) == len(set(ends)), "an end was told twice"

    async def _settled(self) -> None:
        settling = asyncio.create_task(self.enforcer.settle())
        while not settling.done():
            self.engine.step()
            await turns()
        settling.result()


ENDS = (EventName.REQUEST_FINISHED, EventName.REQUEST_ABORTED, EventName.REQUEST_FAILED)


@dataclass(frozen=True)
class End:
    """How a stream ended, and its text."""

    how: str
    text: str


async def ends_of(generation: Generation) -> list[End]:
    """How the stream ended, each time it was asked."""
    ends, text = [], ""
    for _ in range(2):
        try:
            async for chunk in generation:
                text += chunk.text
        except OmlxError as error:
            ends.append(End(type(error).__name__, text))
        else:
            if generation.finish_reason is not None and not ends:
                ends.append(End(generation.finish_reason.value, text))
    return ends


async def quietly(work: Coroutine[Any, Any, Any]) -> None:
    """Loads and unloads may be refused; they must not be lost."""
    try:
        await work
    except OmlxError:
        pass


async def _call(function: Any, *arguments: Any) -> None:
    function(*arguments)


EXAMPLES = int(os.environ.get("OMLXD_TEST_EXAMPLES", "60"))


class ReservingPoolMachine(PoolMachine):
    """The same with requests whose memory is predicted: nothing is allocated that was not promised first."""

    prompt_tokens = 440  # so that a short answer needs another block
    token_bytes = 64 * 1024
    costs = FakeCosts(token_bytes=64 * 1024)

    @rule(name=names, steps=st.integers(10, 60))
    def generate_into_the_next_block(self, name: str, steps: int) -> None:
        self.generate(name, 120)
        self.engine_steps(steps)

    @rule(available_mib=st.sampled_from([100, 4000, 4000]))
    def other_programs_take_memory(self, available_mib: int) -> None:
        self.engine.system_available_bytes = available_mib * MIB

    @invariant()
    def everything_was_promised_first(self) -> None:
        if hasattr(self, "pool"):
            promised_bytes = self.pool.ledger.committed_bytes
            others_bytes = self.engine.leak_bytes + sum(self.engine.prefix_bytes().values())
            assert self.engine.active_bytes - others_bytes <= promised_bytes

    async def _finish(self) -> None:
        self.engine.system_available_bytes = 4000 * MIB
        await super()._finish()
        assert self.pool.ledger.total() == Share()


PoolMachine.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
ReservingPoolMachine.TestCase.settings = PoolMachine.TestCase.settings
TestReservingPoolMachine = ReservingPoolMachine.TestCase
