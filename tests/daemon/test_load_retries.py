"""A load that has to give way is tried again by itself; those who wait for it never notice, on virtual time."""

from __future__ import annotations

import asyncio

import pytest

from omlxd.core.errors import LoadCancelled, ShuttingDown
from omlxd.core.events import Event, EventName
from omlxd.core.memory import Policy
from omlxd.core.policy import CancelLoad
from omlxd.core.states import EntryState
from omlxd.daemon.enforcer import ProcessMemoryEnforcer
from omlxd.daemon.refusals import cancelled
from omlxd.engine.orders import MIB
from tests.fakes.clock import on_virtual_time
from tests.fakes.pools import Scene, turns, until


def graceful(scene: Scene, max_mib: int = 1000) -> ProcessMemoryEnforcer:
    enforcer = scene.enforcer(max_mib, policy=Policy.GRACEFUL, poll_interval=0.05)
    enforcer.start()
    return enforcer


async def squeeze(scene: Scene, enforcer: ProcessMemoryEnforcer, name: str) -> None:
    """Memory runs short in the middle of the model's load, for a moment."""
    await until(lambda: scene.pool.entries[name].state is EntryState.LOADING and scene.engine.active_bytes > 0)
    scene.engine.leak_bytes = 2000 * MIB
    await enforcer.settle()
    scene.engine.leak_bytes = 0


@on_virtual_time
async def test_a_load_that_gave_way_is_tried_again_after_a_second_and_nobody_who_waits_is_told_an_error() -> None:
    scene = Scene({"a": 800}, step_s=0.1)
    async with scene.pool as pool:
        enforcer = graceful(scene)
        asked, request = asyncio.create_task(pool.load("a")), pool.generate("a", prompt="hi")
        await squeeze(scene, enforcer, "a")
        assert scene.engine.active_bytes == 0
        assert scene.states == {"a": "unloaded"}
        began_s = scene.clock()
        await asked
        assert scene.states == {"a": "loaded"}
        assert 1.0 <= scene.clock() - began_s < 3.0
        assert (await request.text()).startswith("tok0")
    (retried,) = scene.named(EventName.LOAD_RETRIED)
    (decision,) = scene.named(EventName.DECISION)
    assert retried.fields["after_s"] == 1.0
    assert retried.decision == decision.decision
    assert decision.fields["action"] == "cancel_load"
    assert "tried again" in decision.fields["reason"]
    assert not scene.named(EventName.LOAD_CANCELLED, EventName.LOAD_FAILED)


@on_virtual_time
async def test_whoever_was_asked_for_before_a_retry_and_comes_after_it_is_loaded_too() -> None:
    scene = Scene({"first": 200, "long": 500, "last": 200}, step_s=0.3)
    async with scene.pool as pool:
        enforcer = graceful(scene)
        first = asyncio.create_task(pool.load("first"))
        await squeeze(scene, enforcer, "first")
        others = [asyncio.create_task(pool.load(name)) for name in ("long", "last")]
        await asyncio.wait_for(asyncio.gather(first, *others), 600)
    began = [event.model for event in scene.named(EventName.LOAD_STARTED)]
    assert began == ["first", "long", "first", "last"]


@on_virtual_time
async def test_it_waits_longer_each_time_and_is_cancelled_when_it_has_to_give_way_once_more() -> None:
    scene = Scene({"a": 800}, step_s=0.1)

    def short_while_it_loads(event: Event) -> None:
        if event.event in (EventName.LOAD_STARTED, EventName.LOAD_RETRIED):
            scene.engine.leak_bytes = 2000 * MIB if event.event is EventName.LOAD_STARTED else 0

    scene.on_event = short_while_it_loads
    async with scene.pool as pool:
        graceful(scene)
        with pytest.raises(LoadCancelled, match="soft limit"):
            await pool.load("a")
        assert scene.states == {"a": "unloaded"}
        assert pool.entries["a"].ticket is None
        scene.on_event = lambda event: None
        scene.engine.leak_bytes = 0
        await pool.load("a")
    assert [event.fields["after_s"] for event in scene.named(EventName.LOAD_RETRIED)] == [1.0, 2.0, 4.0]
    assert len(scene.named(EventName.LOAD_CANCELLED)) == 1


@on_virtual_time
async def test_another_model_is_loaded_while_it_waits_for_its_next_try() -> None:
    scene = Scene({"a": 400, "b": 400}, step_s=0.01)
    async with scene.pool as pool:
        enforcer = graceful(scene)
        first = asyncio.create_task(pool.load("a"))
        await squeeze(scene, enforcer, "a")
        began_s = scene.clock()
        await pool.load("b")
        assert scene.clock() - began_s < 0.5
        await first
        assert scene.states == {"a": "loaded", "b": "loaded"}


@pytest.mark.parametrize("back_off", [False, True])
def test_what_a_user_unloads_is_not_tried_again(back_off: bool) -> None:
    @on_virtual_time
    async def main() -> None:
        scene = Scene({"a": 800}, step_s=0.1)
        async with scene.pool as pool:
            enforcer = graceful(scene)
            asked = asyncio.create_task(pool.load("a"))
            if back_off:
                await squeeze(scene, enforcer, "a")
            else:
                await until(lambda: scene.engine.active_bytes > 0)
            began_s = scene.clock()
            await pool.unload("a")
            assert scene.clock() - began_s < 0.5
            with pytest.raises(LoadCancelled, match="it was unloaded"):
                await asked
            await asyncio.sleep(10)
            assert scene.states == {"a": "unloaded"}
            await pool.load("a")
            assert scene.states == {"a": "loaded"}

    main()


@on_virtual_time
async def test_one_that_a_user_unloads_while_it_gives_way_ends_for_good() -> None:
    scene = Scene({"a": 800}, drive="manual")
    async with scene.pool as pool:
        asked = asyncio.create_task(pool.load("a"))
        while not scene.engine.active_bytes:
            await turns()
            scene.engine.step()
        postponed = asyncio.create_task(pool.levers.postpone_load("a", cancelled("a", "memory is short")))
        await turns()
        unloaded = asyncio.create_task(pool.unload("a"))
        await turns()
        scene.engine.step()
        await asyncio.gather(postponed, unloaded)
        with pytest.raises(LoadCancelled, match="it was unloaded"):
            await asked
    assert not scene.named(EventName.LOAD_RETRIED)


@on_virtual_time
async def test_one_that_the_engine_has_not_seen_yet_is_tried_again_too() -> None:
    scene = Scene({"a": 800}, drive="manual")
    async with scene.pool as pool:
        asked = asyncio.create_task(pool.load("a"))
        await until(lambda: pool.entries["a"].state is EntryState.LOADING)
        assert await pool.levers.postpone_load("a", cancelled("a", "memory is short"))
        await asyncio.sleep(1.1)
        while not asked.done():
            scene.engine.step()
            await turns()
        await asked
        assert scene.states == {"a": "loaded"}
    assert len(scene.named(EventName.LOAD_RETRIED)) == 1


@on_virtual_time
async def test_closing_the_pool_ends_a_load_that_waits_for_its_next_try() -> None:
    scene = Scene({"a": 800}, step_s=0.1)
    async with scene.pool as pool:
        enforcer = graceful(scene)
        asked = asyncio.create_task(pool.load("a"))
        await squeeze(scene, enforcer, "a")
        await enforcer.stop()
    with pytest.raises(ShuttingDown):
        await asked


@on_virtual_time
async def test_under_reference_a_load_that_is_stopped_is_cancelled() -> None:
    scene = Scene({"a": 800}, step_s=0.1)
    async with scene.pool as pool:
        enforcer = scene.enforcer(1000, policy=Policy.REFERENCE)
        enforcer.start()
        asked = asyncio.create_task(pool.load("a"))
        await until(lambda: scene.engine.active_bytes > 0)
        enforcer.max_bytes = 10 * MIB
        decisions = await enforcer.settle()
        assert CancelLoad("a", retried=False) in [decision.action for decision in decisions]
        with pytest.raises(LoadCancelled):
            await asked
