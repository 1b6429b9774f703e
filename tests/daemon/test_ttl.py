"""Time to live, on the fake engine and virtual time."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from omlxd.core.errors import ContextExceeded
from omlxd.core.events import EventName
from omlxd.daemon.keep_alive import granted_s
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


async def said(scene: Scene, keep_alive_s: float | None, model: str = "chat") -> None:
    await scene.pool.generate(model, prompt="hi", max_tokens=2, keep_alive_s=keep_alive_s).text()
    for _ in range(20):  # turns of the loop, until its memory is back
        await asyncio.sleep(0)
    assert not scene.pool.entries[model].requests


@on_virtual_time
async def test_a_request_says_how_long_its_model_is_kept() -> None:
    for model, kept_s in (("chat", 5), ("forever", 5), ("chat", 300)):
        async with timed({"chat": 60.0}) as scene:
            await said(scene, kept_s, model)
            assert ttl_left_s(scene.pool.entries[model], scene.pool.clock()) == kept_s
            await asyncio.sleep(kept_s - 0.5)
            assert scene.states[model] == "loaded"
            await asyncio.sleep(1)
            assert scene.states[model] == "unloaded"
            (decision,) = scene.named(EventName.DECISION)
            assert "its last request's keep_alive was" in decision.fields["reason"]


@on_virtual_time
async def test_a_request_may_have_its_model_unloaded_at_once_or_never() -> None:
    async with timed({"chat": 60.0}) as scene:
        await said(scene, math.inf)
        assert ttl_left_s(scene.pool.entries["chat"], scene.pool.clock()) is None
        await asyncio.sleep(10_000)
        assert scene.states["chat"] == "loaded"
        await said(scene, 0)
        await asyncio.sleep(0.01)
        assert scene.states["chat"] == "unloaded"


@on_virtual_time
async def test_the_last_request_decides_and_a_later_load_begins_anew() -> None:
    async with timed({"chat": 60.0}) as scene:
        entry = scene.pool.entries["chat"]
        await said(scene, math.inf)
        await said(scene, None)
        assert ttl_left_s(entry, scene.pool.clock()) == 60
        await said(scene, 0)
        await asyncio.sleep(0.01)
        await scene.pool.load("chat")
        assert ttl_left_s(entry, scene.pool.clock()) == 60
        await said(scene, 5)
        scene.pool.pin("chat")
        await asyncio.sleep(1000)
        assert scene.states["chat"] == "loaded"


@on_virtual_time
async def test_a_request_that_never_ran_changes_nothing() -> None:
    async with timed({"chat": 60.0}) as scene:
        await scene.pool.load("chat")
        generation = scene.pool.generate("chat", tokens=[5] * 5000, keep_alive_s=0)
        with pytest.raises(ContextExceeded):
            await generation.text()
        await asyncio.sleep(1)
        assert scene.states["chat"] == "loaded"


@pytest.mark.parametrize(
    ("wanted_s", "ttl_s", "most_s", "granted"),
    [
        (None, 60, 10, None),
        (5, None, None, 5),
        (math.inf, None, None, math.inf),
        (5, 60, None, 5),
        (300, 60, None, 60),
        (math.inf, 60, None, 60),
        (300, 60, 120, 120),
        (300, None, 120, 120),
        (0, 60, 120, 0),
    ],
)
def test_the_manifest_bounds_what_requests_may_want(
    wanted_s: float | None, ttl_s: float | None, most_s: float | None, granted: float | None
) -> None:
    assert granted_s(wanted_s, ttl_s, most_s) == granted
