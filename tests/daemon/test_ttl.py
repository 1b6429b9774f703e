"""Time to live, on the fake engine and virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from omlxd.core.events import EventName
from omlxd.daemon.ttl import IdleTimer, ttl_left_s
from tests.fakes.clock import on_virtual_time
from tests.fakes.pools import Scene, until_decoding


@asynccontextmanager
async def timed(ttls: dict[str, float], **options: object) -> AsyncIterator[Scene]:
    """A pool whose models have these times to live, watched."""
    scene = Scene(dict.fromkeys(["forever", *ttls], 100), **options)
    for name, ttl_s in ttls.items():
        entry = scene.pool.entries[name]
        entry.settings = replace(entry.settings, ttl_s=ttl_s)
    timer = IdleTimer(scene.pool)
    async with scene.pool:
        timer.start()
        yield scene
        await timer.stop()


@on_virtual_time
async def test_an_idle_model_is_unloaded_when_its_time_is_up_and_not_before() -> None:
    async with timed({"chat": 60.0}) as scene:
        await scene.pool.load("forever")
        await scene.pool.load("chat")
        await asyncio.sleep(59.5)
        assert scene.states == {"forever": "loaded", "chat": "loaded"}
        await asyncio.sleep(1.0)
        assert scene.states == {"forever": "loaded", "chat": "unloaded"}
        (decision,) = scene.named(EventName.DECISION)
        assert decision.model == "chat"
        assert decision.fields["trigger"] == "ttl"
        assert "unused for" in decision.fields["reason"]


@on_virtual_time
async def test_a_request_starts_the_time_again_and_a_busy_model_has_none_left_to_show() -> None:
    async with timed({"chat": 60.0}, drive="manual") as scene:
        loading = asyncio.create_task(scene.pool.load("chat"))
        while not loading.done():
            scene.engine.step()
            await asyncio.sleep(0)
        entry = scene.pool.entries["chat"]
        await asyncio.sleep(50)
        assert ttl_left_s(entry, scene.pool.clock()) == 10
        generation = scene.pool.generate("chat", prompt="hi", max_tokens=3)
        decoding = asyncio.create_task(until_decoding(generation))
        while not decoding.done():
            scene.engine.step()
            await asyncio.sleep(0)
        assert ttl_left_s(entry, scene.pool.clock()) is None
        await asyncio.sleep(100)
        assert scene.states["chat"] == "loaded"
        while not generation.ended or entry.requests:
            scene.engine.step()
            await asyncio.sleep(0)
        assert ttl_left_s(entry, scene.pool.clock()) == 60


@on_virtual_time
async def test_a_pin_stops_the_time_and_unpinning_lets_it_run_out() -> None:
    async with timed({"chat": 60.0}) as scene:
        await scene.pool.load("chat")
        scene.pool.pin("chat")
        await asyncio.sleep(500)
        assert scene.states["chat"] == "loaded"
        scene.pool.unpin("chat")
        await asyncio.sleep(1)
        assert scene.states["chat"] == "unloaded"


@on_virtual_time
async def test_a_request_after_the_time_loads_the_model_again() -> None:
    async with timed({"chat": 60.0}) as scene:
        await scene.pool.load("chat")
        await asyncio.sleep(61)
        text = [chunk.text async for chunk in scene.pool.generate("chat", prompt="hi", max_tokens=3)]
        assert text
        assert scene.states["chat"] == "loaded"


@on_virtual_time
async def test_no_timer_survives_its_end() -> None:
    async with timed({"chat": 60.0}) as scene:
        assert "omlxd-ttl" in {task.get_name() for task in asyncio.all_tasks()}
    assert "omlxd-ttl" not in {task.get_name() for task in asyncio.all_tasks()}
    assert not scene.pool.entries["chat"].loaded


@on_virtual_time
async def test_a_request_at_the_very_moment_of_the_unload_is_served_each_of_500_times() -> None:
    async with timed({"chat": 60.0}) as scene:
        pool, entry = scene.pool, scene.pool.entries["chat"]
        found: Counter[str] = Counter()
        await pool.load("chat")
        for number in range(500):
            assert entry.used_at_s is not None
            await asyncio.sleep(entry.used_at_s + 60.0 - pool.clock())  # in the same turn of the loop as the timer
            for _ in range(number % 25):  # and in every turn after it, until the model is gone
                await asyncio.sleep(0)
            found[entry.state.value] += 1
            text = await pool.generate("chat", prompt="hi", max_tokens=2).text()
            assert text.split() == ["tok0", "tok1"], (number, entry.state)
        assert set(found) == {"loaded", "unloading", "unloaded"}
        assert not scene.named(EventName.REQUEST_ABORTED, EventName.REQUEST_FAILED)
