"""Making room for a load: who is evicted for it, who blocks it, and how the wait ends."""

from __future__ import annotations

import asyncio

import pytest

from omlxd.core.errors import Busy, DoesNotFit, LoadCancelled, LoadFailed
from omlxd.core.events import EventName
from omlxd.engine.orders import MIB
from tests.fakes.clock import on_virtual_time
from tests.fakes.pools import Scene, until, until_decoding


@on_virtual_time
async def test_the_least_recently_used_idle_model_makes_room_and_one_record_says_so() -> None:
    scene = Scene({"a": 400, "b": 400, "c": 400})
    async with scene.pool as pool:
        scene.enforcer(1000).start()
        await pool.load("a")
        await asyncio.sleep(1)
        await pool.load("b")
        await asyncio.sleep(1)
        await pool.generate("a", prompt="hi").text()
        entry = await pool.load("c")
        assert scene.states == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        assert entry.last_load is not None
        assert entry.last_load.evicted == ("b",)
    (event,) = scene.named(EventName.DECISION)
    assert event.fields["victim"] == "b"
    assert event.fields["freed_bytes"] == 400 * MIB
    assert event.fields["trigger"] == "load"
    assert [(each["model"], each["chosen"]) for each in event.fields["candidates"]] == [("b", True), ("a", False)]
    assert event.decision == "d1"


@on_virtual_time
async def test_no_load_takes_memory_over_the_limit() -> None:
    scene = Scene({"a": 400, "b": 400, "c": 900})
    async with scene.pool as pool:
        scene.enforcer(1000, hard_mib=1000).start()
        for name in ("a", "b", "c", "a", "b"):
            await pool.load(name)
        assert scene.engine.peak <= 1000 * MIB
        assert scene.engine.loaded == {"a", "b"}


@on_virtual_time
async def test_a_pinned_model_is_not_evicted_for_a_load() -> None:
    scene = Scene({"a": 400, "b": 400, "c": 400}, pinned=("a",))
    async with scene.pool as pool:
        scene.enforcer(1000).start()
        for name in ("a", "b", "c"):
            await pool.load(name)
        assert scene.states == {"a": "loaded", "b": "unloaded", "c": "loaded"}


@on_virtual_time
async def test_what_does_not_fit_beside_the_pinned_models_is_refused_at_once() -> None:
    scene = Scene({"a": 400, "b": 300, "c": 700}, pinned=("a",))
    async with scene.pool as pool:
        scene.enforcer(1000).start()
        await pool.load("a")
        await pool.load("b")
        with pytest.raises(DoesNotFit, match="pinned") as raised:
            await pool.load("c")
        assert raised.value.details["binding"] == "pinned"
        assert scene.states == {"a": "loaded", "b": "loaded", "c": "unloaded"}


@on_virtual_time
async def test_the_reason_of_a_load_that_did_not_fit_goes_with_the_limit_that_it_names() -> None:
    scene = Scene({"a": 400}, without_folder=("ghost",))
    async with scene.pool as pool:
        enforcer = scene.enforcer(300)
        enforcer.start()
        for name in ("a", "ghost"):
            with pytest.raises((DoesNotFit, LoadFailed)):
                await pool.load(name)
        enforcer.max_bytes = 300 * MIB  # the same again
        assert "more than the soft limit" in str(pool.entries["a"].error)
        enforcer.max_bytes = 350 * MIB
        assert pool.entries["a"].error is None
        assert pool.entries["ghost"].error is not None


@on_virtual_time
async def test_a_load_waits_for_a_busy_model_and_takes_its_place_when_it_is_idle() -> None:
    scene = Scene({"a": 600, "b": 600}, step_s=1.0, slice_bytes=1024 * MIB)
    async with scene.pool as pool:
        scene.enforcer(1000).start()
        generation = pool.generate("a", prompt="hi")
        await until_decoding(generation)
        notes: list[str | None] = []
        await pool.load("b", on_progress=lambda status: notes.append(status.note))
        assert "waiting for `a` to finish, 200 MiB short" in notes
        assert (await generation.text()).startswith("tok0")
        assert scene.states == {"a": "unloaded", "b": "loaded"}
    (waiting,) = scene.named(EventName.LOAD_WAITING)
    assert waiting.fields["blockers"] == ["a"]
    assert 200 * MIB <= waiting.fields["short_bytes"] <= 201 * MIB


@on_virtual_time
async def test_without_turns_a_load_that_waits_too_long_says_who_blocks_it_and_what_is_missing() -> None:
    scene = Scene({"a": 600, "b": 600}, step_s=1.0, answer_tokens=None, load_wait_s=20.0, fair_wait_s=None)
    async with scene.pool as pool:
        scene.enforcer(1000).start()
        generation = pool.generate("a", prompt="hi", max_tokens=1000)
        await until_decoding(generation)
        begun_s = scene.clock()
        with pytest.raises(Busy) as raised:
            await pool.generate("b", prompt="hi").text()
        assert 20.0 <= scene.clock() - begun_s <= 22.0
        assert raised.value.details["blockers"] == ["a"]
        assert raised.value.details["short_bytes"] >= 200 * MIB
        assert not generation.ended
        assert scene.states == {"a": "loaded", "b": "unloaded"}


@on_virtual_time
async def test_a_load_that_waits_for_room_can_be_cancelled() -> None:
    scene = Scene({"a": 600, "b": 600}, step_s=1.0, answer_tokens=None)
    async with scene.pool as pool:
        scene.enforcer(1000).start()
        generation = pool.generate("a", prompt="hi", max_tokens=1000)
        await until_decoding(generation)
        loading = asyncio.create_task(pool.load("b"))
        await asyncio.sleep(3.0)
        await pool.unload("b")
        with pytest.raises(LoadCancelled):
            await loading
        assert not generation.ended


@on_virtual_time
async def test_a_load_whose_only_request_has_gone_before_it_began_takes_nobody_s_memory() -> None:
    scene = Scene({"a": 300, "b": 300, "c": 600}, slice_bytes=MIB, step_s=0.01)
    async with scene.pool as pool:
        scene.enforcer(1000).start()
        await pool.load("a")
        loading = asyncio.create_task(pool.load("b"))
        await until(lambda: scene.states["b"] == "loading")
        asked = pool.generate("c", prompt="hi")
        await asyncio.sleep(0.1)
        await asked.aclose()
        await loading
        await asyncio.sleep(5.0)
        assert scene.states == {"a": "loaded", "b": "loaded", "c": "unloaded"}
        (cancelled,) = scene.named(EventName.LOAD_CANCELLED)
        assert (cancelled.model, pool.entries["c"].ticket) == ("c", None)
        assert "`a` would have to make way, and nobody asks for it any more" in cancelled.fields["reason"]
        assert not scene.named(EventName.DECISION)
        assert (await pool.generate("c", prompt="hi").text()).startswith("tok0")


@on_virtual_time
async def test_a_load_that_takes_nobody_s_memory_outlives_impatient_clients() -> None:
    scene = Scene({"a": 300, "b": 300}, slice_bytes=MIB, step_s=0.01)
    async with scene.pool as pool:
        scene.enforcer(1000).start()
        loading = asyncio.create_task(pool.load("a"))
        await until(lambda: scene.states["a"] == "loading")
        for _ in range(5):
            asked = pool.generate("b", prompt="hi")
            await asyncio.sleep(0.1)
            await asked.aclose()
        await loading
        await until(lambda: pool.entries["b"].ticket is None)
        assert scene.states == {"a": "loaded", "b": "loaded"}
        assert [event.model for event in scene.named(EventName.LOAD_STARTED)] == ["a", "b"]


@on_virtual_time
async def test_a_load_goes_on_when_it_has_begun_or_somebody_else_or_a_user_wants_it() -> None:
    scene = Scene({"a": 300, "b": 300, "c": 300, "d": 800}, slice_bytes=MIB, step_s=0.01)
    async with scene.pool as pool:
        scene.enforcer(1200).start()
        begun = pool.generate("a", prompt="hi")
        await until(lambda: scene.states["a"] == "loading")
        first, second = (pool.generate("b", prompt="hi") for _ in range(2))
        by_user, by_request = asyncio.create_task(pool.load("c")), pool.generate("d", prompt="hi")
        await asyncio.sleep(0.1)
        for each in (begun, first, by_request):
            await each.aclose()
        by_user.cancel()
        assert (await second.text()).startswith("tok0")
        await until(lambda: pool.entries["d"].ticket is None)
        assert scene.states == {"a": "loaded", "b": "loaded", "c": "loaded", "d": "unloaded"}


@on_virtual_time
async def test_two_big_models_asked_for_at_the_same_instant_take_turns() -> None:
    scene = Scene({"a": 600, "b": 600})
    async with scene.pool as pool:
        scene.enforcer(1000, hard_mib=1000).start()
        texts = await asyncio.gather(pool.generate("a", prompt="hi").text(), pool.generate("b", prompt="hi").text())
        assert texts[0] == texts[1] != ""
        assert scene.engine.peak <= 1000 * MIB


@on_virtual_time
async def test_memory_that_nobody_accounts_for_blocks_a_load_without_evicting_for_nothing() -> None:
    scene = Scene({"a": 100, "b": 600}, load_wait_s=5.0)
    async with scene.pool as pool:
        scene.enforcer(1000).start()
        await pool.load("a")
        scene.engine.leak_bytes = 700 * MIB
        with pytest.raises(Busy, match="not accounted for"):
            await pool.load("b")
        assert scene.states == {"a": "loaded", "b": "unloaded"}
        scene.engine.leak_bytes = 0
        await pool.load("b")
        assert scene.states == {"a": "loaded", "b": "loaded"}


@on_virtual_time
async def test_raising_the_limit_lets_a_waiting_load_begin() -> None:
    scene = Scene({"a": 600, "b": 600}, step_s=0.1, answer_tokens=None)
    async with scene.pool as pool:
        enforcer = scene.enforcer(1000)
        enforcer.start()
        generation = pool.generate("a", prompt="hi", max_tokens=1000)
        await until_decoding(generation)
        loading = asyncio.create_task(pool.load("b"))
        await asyncio.sleep(1.0)
        enforcer.max_bytes = 2000 * MIB
        await loading
        assert not generation.ended
