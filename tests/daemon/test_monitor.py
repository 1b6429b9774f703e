"""What `status` is told of memory, models, requests and decisions (R14)."""

from __future__ import annotations

import asyncio
import json

from omlxd.core.states import EntryState, Level, RequestState
from omlxd.daemon.monitor import MemoryMonitor
from omlxd.engine.orders import MIB
from tests.fakes.clock import on_virtual_time
from tests.fakes.costs import FakeCosts
from tests.fakes.pools import Scene, turns, until, until_decoding


@on_virtual_time
async def test_memory_models_and_requests_are_shown_while_a_model_answers() -> None:
    scene = Scene({"a": 300, "b": 200}, pinned=("b",), answer_tokens=None, step_s=0.1, kv_bytes_per_token=MIB)
    async with scene.pool as pool:
        enforcer = scene.enforcer(1000, hard_mib=1020)
        enforcer.start()
        monitor = MemoryMonitor(pool, enforcer)
        generation = pool.generate("a", prompt="one two three", max_tokens=100)
        await until_decoding(generation)
        await asyncio.sleep(1.0)
        await turns()  # what the engine has posted arrives
        memory, model, (request,) = monitor.memory(), monitor.model("a"), monitor.requests()
        assert model.state is EntryState.LOADED
        assert (model.weights_bytes, model.running, model.waiting, model.last_used_s) == (300 * MIB, 1, 0, 0.0)
        assert model.kv_bytes == (3 + request.generated_tokens) * MIB
        assert model.committed_bytes == memory.committed == memory.used == memory.active
        assert memory.unaccounted == 0
        assert (memory.soft_limit, memory.hard_limit, memory.binding) == (1000 * MIB, 1020 * MIB, "max_memory")
        assert memory.peak >= memory.active
        assert (request.id, request.model, request.state) == ("r1", "a", RequestState.DECODE)
        assert (request.prompt_tokens, request.prefilled_tokens) == (3, 3)
        assert monitor.model("b").pinned
        assert 9 < (model.tokens_per_s or 0) < 11
        assert monitor.backend() == "fake"


@on_virtual_time
async def test_a_model_at_rest_is_not_looked_at_again_until_something_of_it_changes() -> None:
    scene = Scene({"a": 300, "b": 200})
    async with scene.pool as pool:
        monitor = MemoryMonitor(pool)
        first, _ = monitor.models()
        assert monitor.models()[0] is first
        pool.pin("a")
        assert monitor.models()[0].pinned
        await pool.load("a")
        loaded = monitor.models()[0]
        assert loaded.state is EntryState.LOADED
        await asyncio.sleep(1.0)
        assert monitor.models()[0].last_used_s == (loaded.last_used_s or 0.0) + 1.0
        assert monitor.models()[1] is monitor.models()[1]


@on_virtual_time
async def test_memory_that_belongs_to_nobody_is_shown_as_unaccounted() -> None:
    scene = Scene({"a": 300})
    async with scene.pool as pool:
        await pool.load("a")
        scene.engine.leak_bytes = 50 * MIB
        assert MemoryMonitor(pool).memory().unaccounted == 50 * MIB


@on_virtual_time
async def test_what_a_prefill_holds_in_passing_is_not_unaccounted_while_its_step_runs() -> None:
    scene = Scene({"a": 300}, step_s=1.0, costs=FakeCosts(chunk_token_bytes=MIB // 4))
    async with scene.pool as pool:
        scene.enforcer(1000, hard_mib=1020).start()
        await pool.load("a")
        generation = pool.generate("a", prompt="word " * 1000, max_tokens=4)
        await until(lambda: generation.prefilled_tokens > 0)
        passing_bytes = pool.ledger.transient_bytes
        assert passing_bytes > 50 * MIB
        scene.engine.leak_bytes = passing_bytes
        assert not pool.engine.read().at_rest
        assert MemoryMonitor(pool).memory().unaccounted == 0
        scene.engine.leak_bytes = passing_bytes + 40 * MIB
        assert MemoryMonitor(pool).memory().unaccounted == 40 * MIB
        await generation.text()
        assert MemoryMonitor(pool).memory().unaccounted == passing_bytes + 40 * MIB


@on_virtual_time
async def test_progress_of_a_load_and_the_reason_of_a_failure_are_shown() -> None:
    scene = Scene({"a": 640}, step_s=1.0, without_folder=("ghost",))
    async with scene.pool as pool:
        monitor = MemoryMonitor(pool)
        loading = asyncio.create_task(pool.load("a"))
        await asyncio.sleep(4.5)
        assert monitor.model("a").load_progress == 0.5
        await loading
        assert monitor.model("a").load_progress is None
        await asyncio.gather(pool.load("ghost"), return_exceptions=True)
        assert monitor.model("ghost").state is EntryState.FAILED
        assert "does not exist" in (monitor.model("ghost").error or "")


@on_virtual_time
async def test_the_enforcer_and_its_last_decisions_are_shown() -> None:
    scene = Scene({"a": 300, "b": 300})
    async with scene.pool as pool:
        enforcer = scene.enforcer(1000, poll_interval=0.5)
        enforcer.start()
        await pool.load("a")
        await pool.load("b")
        enforcer.max_bytes = 400 * MIB
        await enforcer.settle()
        monitor = MemoryMonitor(pool, enforcer)
        view = monitor.enforcer()
        assert (view.policy, view.poll_interval_s, view.level, view.decisions) == ("graceful", 0.5, Level.OK, 1)
        (decision,) = monitor.recent_decisions()
        assert (decision["decision"], decision["victim"]) == ("d1", "a")
        json.dumps(decision)


@on_virtual_time
async def test_looking_costs_no_model_its_place_in_the_queue() -> None:
    scene = Scene({"a": 300})
    async with scene.pool as pool:
        await pool.load("a")
        before = pool.entries["a"].last_used
        await asyncio.sleep(10)
        MemoryMonitor(pool).models()
        assert pool.entries["a"].last_used == before
        assert MemoryMonitor(pool).model("a").last_used_s == 10.0
