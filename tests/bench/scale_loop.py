"""What the pool's event loop does with many models and many who wait: no MLX, no HTTP, no real time that is waited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omlxd.core.memory import MemoryReading
from omlxd.core.policy import decide
from omlxd.core.snapshot import Limits
from omlxd.daemon.monitor import MemoryMonitor
from omlxd.daemon.pool import EnginePool
from omlxd.daemon.ttl import IdleTimer
from omlxd.engine.events import Generated
from omlxd.engine.orders import MIB, EngineLimits, Plan
from tests.fakes.costs import FakeCosts
from tests.fakes.engine import FakeEngine
from tests.fakes.pools import FakeFolders

RUNNING = 8
PROMPT = [1] * 20
LOADED_SHARE = 10


class _Engine(FakeEngine):
    """It tells when it is sent a plan. Once `frozen`, its gauges no longer look at all of its models, which the real
    ones never do."""

    def __init__(self) -> None:
        super().__init__("manual", answer_tokens=None)
        self.sent, self.plan = asyncio.Event(), Plan()
        self.frozen: tuple[MemoryReading, Mapping[str, int]] | None = None

    def apply(self, plan: Plan) -> None:
        super().apply(plan)
        self.plans.clear()
        self.plan = plan
        self.sent.set()

    def read(self) -> MemoryReading:
        return super().read() if self.frozen is None else self.frozen[0]

    def kv_bytes(self) -> Mapping[str, int]:
        return super().kv_bytes() if self.frozen is None else self.frozen[1]

    def prefix_bytes(self) -> Mapping[str, int]:
        return super().prefix_bytes() if self.frozen is None else {}

    async def until_sent(self, requests: Sequence[str]) -> None:
        """Until the newest plan has them all."""
        while not all(request in self.plan.requests for request in requests):
            self.sent.clear()
            await self.sent.wait()


class _Loop:
    """A pool of `size` models, a tenth of them loaded, `RUNNING` requests that decode and `size` that wait for models
    which are not loaded; its engine stands still."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._names = [f"model-{number:05d}" for number in range(size)]
        self._loaded = self._names[: max(1, size // LOADED_SHARE)]
        folders = FakeFolders(dict.fromkeys(self._names, 1.0))
        self._engine = _Engine()
        self.pool = EnginePool(
            {name: f"/models/{name}" for name in self._names},
            engine=self._engine,
            read_folder=folders,
            fingerprint=folders.fingerprint,
            costs_of=lambda files, learned, backend: FakeCosts(),
        )
        self._timer = IdleTimer(self.pool)  # looks at the models when something changes, as in a daemon
        self._seq = 1_000_000
        self._running: list[str] = []

    async def prepare(self) -> None:
        """Load, and let the requests come."""
        self.pool.bind()
        self._timer.start()
        loads = [asyncio.ensure_future(self.pool.load(name)) for name in self._loaded]
        while not all(load.done() for load in loads):
            self._engine.step()
            await asyncio.sleep(0)
        soft_bytes = 4 * self._size * MIB
        limits = Limits(soft_bytes, 2 * soft_bytes)
        self.pool.set_limits(limits, EngineLimits(soft_bytes, 2 * soft_bytes, soft_bytes, True))
        running = [self.pool.generate(self._loaded[0], tokens=PROMPT, max_tokens=1000) for _ in range(RUNNING)]
        self._running = [generation.id for generation in running]
        await self._engine.until_sent(self._running)
        others = self._names[len(self._loaded) :]
        for number in range(self._size):
            self.pool.generate(others[number % len(others)], tokens=PROMPT, max_tokens=8)
        await asyncio.sleep(0.1)  # the first load begins, and all others stand behind it
        self._engine.frozen = (self._engine.read(), self._engine.kv_bytes())

    async def close(self) -> None:
        """End it all."""
        await self._timer.stop()
        await self.pool.close()

    async def way_to_the_engine(self) -> float:
        """Milliseconds from a request for a loaded model to the plan that has it."""
        began_s = time.perf_counter()
        generation = self.pool.generate(self._loaded[0], tokens=PROMPT, max_tokens=8)
        await self._engine.until_sent([generation.id])
        took_ms = 1000 * (time.perf_counter() - began_s)
        await generation.aclose()
        while self.pool.entries[self._loaded[0]].requests.get(generation.id) is not None:
            self._engine.rest()  # it follows the plan, and tells that the request has gone
            await asyncio.sleep(0)
        return took_ms

    async def tokens_of_a_step(self) -> float:
        """Milliseconds for one more token of each running request, with all that is woken by it."""
        events = []
        for request in self._running:
            self._seq += 1
            events.append(Generated(self._seq, request, "word ", 1, (7,)))
        return await self._until_quiet(lambda: self.pool.dispatch.handle(events))

    async def change(self) -> float:
        """Milliseconds for a change that anybody might wait for, with all that is woken by it."""
        return await self._until_quiet(self.pool.notify)

    async def decision(self) -> float:
        """Milliseconds from a reading over the limit to what is to be done about it."""
        reading = MemoryReading(active_bytes=8 * self._size * MIB)
        began_s = time.perf_counter()
        decide(self.pool.snapshot(reading), self.pool.limits)
        return 1000 * (time.perf_counter() - began_s)

    async def views(self) -> float:
        """Milliseconds for the models, requests and memory of a status, without the JSON."""
        monitor = MemoryMonitor(self.pool)
        began_s = time.perf_counter()
        monitor.memory(), monitor.models(), monitor.requests()
        return 1000 * (time.perf_counter() - began_s)

    async def _until_quiet(self, act: Callable[[], Any]) -> float:
        began_s = time.perf_counter()
        act()
        for _ in range(3):  # the tasks that are woken, and what those wake
            await asyncio.sleep(0)
        return 1000 * (time.perf_counter() - began_s)


FIGURES: dict[str, str] = {
    "decision": "a decision over the limit, with its snapshot",
    "way_to_the_engine": "a request's way to the engine",
    "tokens_of_a_step": f"a step's {RUNNING} tokens on the loop",
    "change": "a change that anybody might wait for",
    "views": "the views of a status",
}


def measure(size: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds by the names of `FIGURES`."""

    async def run() -> dict[str, list[float]]:
        loop = _Loop(size)
        await loop.prepare()
        times: dict[str, list[float]] = {}
        for name in FIGURES:
            work = getattr(loop, name)
            await work()
            times[name] = [await work() for _ in range(rounds)]
        await loop.close()
        return times

    return asyncio.run(run())
