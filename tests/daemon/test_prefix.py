"""Prefix caches in the pool: within what is left, the first to go, in nobody's way, told in status and in answers."""

from __future__ import annotations

from typing import Any

from omlxd.core.events import EventName
from omlxd.core.memory import Policy
from omlxd.core.states import Level
from omlxd.daemon.monitor import MemoryMonitor
from omlxd.daemon.pool import EnginePool
from omlxd.daemon.prefix import TRIMMED_FOR_S
from omlxd.daemon.request import Generation
from omlxd.engine.orders import MIB
from tests.fakes.clock import on_virtual_time
from tests.fakes.costs import FakeCosts
from tests.fakes.pools import Scene, turns

TOKEN = 64 * 1024  # so that a block of 256 tokens is 16 MiB


def scene_of(sizes: dict[str, float], **options: Any) -> Scene:
    options = {"kv_bytes_per_token": TOKEN, "answer_tokens": 4, "context_length": None, "step_s": 0.001, **options}
    return Scene(sizes, costs=FakeCosts(TOKEN), prefix_cache_bytes=1000 * MIB, **options)


def prompt(seed: int, tokens: int = 796) -> list[int]:
    return [1 + (seed * 7 + at * at) % 500 for at in range(tokens)]


def ask(pool: EnginePool, model: str, seed: int, tokens: int = 796) -> Generation:
    """A prompt that, with its answer of 4 tokens, leaves 50 MiB unless it is longer."""
    return pool.generate(model, tokens=prompt(seed, tokens))


def kept_mib(pool: EnginePool) -> float:
    return sum(pool.engine.prefix_bytes().values()) / MIB


@on_virtual_time
async def test_what_an_ended_request_leaves_is_shown_and_the_next_prompt_goes_on_from_it() -> None:
    scene = scene_of({"a": 100})
    async with scene.pool as pool:
        scene.enforcer(400, hard_mib=420, policy=Policy.GRACEFUL).start()
        first = ask(pool, "a", 1)
        text = await first.text()
        assert first.reused_tokens == 0
        await turns()
        monitor = MemoryMonitor(pool)
        memory, model = monitor.memory(), monitor.model("a")
        assert memory.prefix_cache == model.prefix_cache_bytes == 50 * MIB
        assert memory.used == 150 * MIB
        assert memory.unaccounted == 0
        assert (memory.committed, model.kv_bytes) == (100 * MIB, 0)
        again = ask(pool, "a", 1)
        assert await again.text() == text
        assert again.reused_tokens == 795


@on_virtual_time
async def test_they_stay_below_the_limit_and_the_oldest_goes_first() -> None:
    scene = scene_of({"a": 100})
    async with scene.pool as pool:
        scene.enforcer(300, hard_mib=320, policy=Policy.GRACEFUL).start()
        for seed in (1, 2, 3, 4):
            await ask(pool, "a", seed).text()
            await turns()
        assert kept_mib(pool) == 100  # a request of 800 tokens has 80 of the 200 MiB
        for seed, tokens in ((3, 795), (4, 795), (1, 0), (4, 795), (3, 0)):
            generation = ask(pool, "a", seed)
            await generation.text()
            assert generation.reused_tokens == tokens
        assert scene.engine.peak <= 300 * MIB


@on_virtual_time
async def test_a_load_takes_their_room_and_no_model_is_unloaded_for_it() -> None:
    scene = scene_of({"a": 100, "b": 200})
    async with scene.pool as pool:
        scene.enforcer(340, hard_mib=360, policy=Policy.GRACEFUL).start()
        for seed in (1, 2):
            await ask(pool, "a", seed).text()
        await turns()
        assert kept_mib(pool) == 100
        await pool.load("b")
        assert scene.states == {"a": "loaded", "b": "loaded"}
        assert kept_mib(pool) == 0
        assert scene.engine.peak <= 340 * MIB
        assert scene.named(EventName.LOAD_WAITING, EventName.DECISION) == []


@on_virtual_time
async def test_a_request_takes_their_room_at_once_and_the_hard_limit_holds() -> None:
    scene = scene_of({"a": 100})
    async with scene.pool as pool:
        scene.enforcer(300, hard_mib=320, policy=Policy.GRACEFUL).start()
        for seed in (1, 2):
            await ask(pool, "a", seed).text()
        await turns()
        assert kept_mib(pool) == 100
        scene.events.clear()
        await ask(pool, "a", 3, tokens=2000).text()
        assert scene.named(EventName.REQUEST_WAITING, EventName.DECISION) == []
        assert scene.engine.peak <= 300 * MIB


@on_virtual_time
async def test_a_growing_answer_takes_their_room() -> None:
    scene = scene_of({"a": 100}, answer_tokens=None)
    async with scene.pool as pool:
        scene.enforcer(300, hard_mib=320, policy=Policy.GRACEFUL).start()
        for seed in (1, 2):
            await pool.generate("a", tokens=prompt(seed), max_tokens=4).text()
        await turns()
        assert kept_mib(pool) == 100
        long = pool.generate("a", tokens=prompt(3), max_tokens=2000)
        await long.text()
        assert long.generated_tokens == 2000
        assert scene.engine.peak <= 300 * MIB
        assert scene.named(EventName.DECISION) == []


@on_virtual_time
async def test_a_lower_limit_takes_them_and_no_model() -> None:
    scene = scene_of({"a": 100})
    async with scene.pool as pool:
        enforcer = scene.enforcer(400, hard_mib=420, policy=Policy.GRACEFUL)
        enforcer.start()
        for seed in (1, 2):
            await ask(pool, "a", seed).text()
        await turns()
        assert kept_mib(pool) == 100
        enforcer.max_bytes = 160 * MIB
        await enforcer.settle()
        assert kept_mib(pool) == 50
        assert scene.states == {"a": "loaded"}
        assert enforcer.level is Level.OK


@on_virtual_time
async def test_trimmed_ones_are_gone_when_the_call_returns_and_stay_small_for_a_while() -> None:
    scene = scene_of({"a": 100})
    async with scene.pool as pool:
        for seed in (1, 2, 3):
            await ask(pool, "a", seed).text()
        await turns()
        assert kept_mib(pool) == 150
        await pool.levers.trim_prefix_caches(60 * MIB)
        assert scene.engine.active_bytes == 150 * MIB
        now_s = scene.clock()
        await ask(pool, "a", 4).text()
        assert kept_mib(pool) == 50
        assert scene.clock() < now_s + TRIMMED_FOR_S
        await pool.levers.trim_prefix_caches(-1)
        assert scene.engine.active_bytes == 100 * MIB


@on_virtual_time
async def test_they_may_grow_again_some_time_after_they_were_trimmed() -> None:
    import asyncio

    scene = scene_of({"a": 100})
    async with scene.pool as pool:
        await pool.load("a")
        await pool.levers.trim_prefix_caches(0)
        await ask(pool, "a", 1).text()
        assert kept_mib(pool) == 0
        await asyncio.sleep(TRIMMED_FOR_S)
        await ask(pool, "a", 1).text()
        assert kept_mib(pool) == 50


@on_virtual_time
async def test_the_reference_policy_keeps_none_for_its_ladder_would_unload_models_for_them() -> None:
    scene = scene_of({"a": 100})
    async with scene.pool as pool:
        scene.enforcer(400, hard_mib=420, policy=Policy.REFERENCE).start()
        await ask(pool, "a", 1).text()
        await turns()
        assert kept_mib(pool) == 0
        assert scene.engine.active_bytes == 100 * MIB
