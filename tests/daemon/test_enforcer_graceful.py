"""The enforcer under the graceful policy: what it takes, in which order, and that nobody loses an answer for it."""

from __future__ import annotations

import asyncio

import pytest

from omlxd.core.errors import OmlxError
from omlxd.core.events import EventName
from omlxd.core.memory import Policy
from omlxd.core.policy import Park, Unload
from omlxd.core.states import EntryState, Level, RequestState
from omlxd.engine.orders import MIB
from tests.daemon.test_admission import scene_of, start
from tests.fakes.clock import on_virtual_time
from tests.fakes.pools import Scene, turns, until, until_decoding

NEVER_S = 3600.0


def words(count: int) -> str:
    return "".join(f"tok{at} " for at in range(count))


def nothing_was_lost(scene: Scene) -> bool:
    return not scene.named(EventName.REQUEST_ABORTED, EventName.REQUEST_FAILED, EventName.ENFORCER_ERROR)


@on_virtual_time
async def test_a_lowered_limit_takes_the_idle_model_and_then_parks_the_newest_and_everybody_is_answered() -> None:
    scene = scene_of({"a": 100, "b": 100, "idle": 100})
    async with scene.pool as pool:
        enforcer = scene.enforcer(1000, poll_interval=NEVER_S)
        enforcer.start()
        await pool.load("idle")
        oldest, second, newest = start(pool, "a", 300, 600), start(pool, "b", 300, 600), start(pool, "b", 300, 600)
        await asyncio.gather(*(until_decoding(each) for each in (oldest, second, newest)))
        enforcer.max_bytes = 240 * MIB
        decisions = await enforcer.settle()
        assert [decision.action for decision in decisions] == [Unload("idle"), Park("b", newest.id), None]
        assert [each.state is RequestState.PARKED for each in (oldest, second, newest)] == [False, False, True]
        assert scene.engine.active_bytes <= 240 * MIB
        assert enforcer.level is Level.OK
        enforcer.max_bytes = 1000 * MIB
        assert [await each.text() for each in (oldest, second, newest)] == [words(600)] * 3
    assert nothing_was_lost(scene)
    _, park = scene.named(EventName.DECISION)
    assert (park.fields["action"], park.fields["victim"], park.fields["requests"]) == ("park", "b", [newest.id])
    assert [each["request"] for each in park.fields["candidates"]] == [newest.id, second.id, oldest.id]
    assert park.fields["freed_bytes"] > 0


@on_virtual_time
async def test_blocks_that_do_not_fit_together_park_the_newest_and_all_answers_are_whole() -> None:
    scene = scene_of({"a": 100, "b": 100})
    async with scene.pool as pool:
        scene.enforcer(300, hard_mib=320).start()
        generations = [start(pool, name, 10, 900) for name in ("a", "b", "a")]
        assert [await each.text() for each in generations] == [words(900)] * 3
        assert scene.engine.peak <= 300 * MIB
    assert nothing_was_lost(scene)
    assert scene.named(EventName.REQUEST_PARKED)


@on_virtual_time
async def test_a_model_whose_weights_alone_are_over_the_limit_goes_once_nothing_of_it_runs() -> None:
    scene = scene_of({"a": 300})
    async with scene.pool as pool:
        enforcer = scene.enforcer(1000, poll_interval=NEVER_S)
        enforcer.start()
        running = start(pool, "a", 100, 400)
        await until_decoding(running)
        enforcer.max_bytes = 200 * MIB
        decisions = await enforcer.settle()
        assert [decision.action for decision in decisions] == [Park("a", running.id), Unload("a"), None]
        assert pool.entries["a"].state is EntryState.UNLOADED
        assert scene.engine.active_bytes == 0
        assert enforcer.level is Level.OK


@on_virtual_time
async def test_memory_that_mlx_does_not_see_counts_and_the_engine_stops_where_it_does() -> None:
    scene = scene_of({"a": 100})
    async with scene.pool as pool:
        enforcer = scene.enforcer(300, hard_mib=1000)
        enforcer.start()
        await pool.load("a")
        scene.engine.overhead_bytes = 90 * MIB
        await asyncio.sleep(1.1)
        limits = scene.engine.plans[-1].limits
        assert (limits.soft_bytes, limits.pause_above_bytes) == (300 * MIB, (300 - 80) * MIB)
        scene.engine.overhead_bytes = 95 * MIB
        plans = len(scene.engine.plans)
        await asyncio.sleep(5)
        assert len(scene.engine.plans) == plans  # a little more or less of it is not worth a plan
        scene.engine.overhead_bytes = 210 * MIB
        await asyncio.sleep(1.1)
        assert enforcer.level is Level.EXHAUSTED
        assert "10.0 MiB over the soft limit" in (enforcer.view().reason or "")


@on_virtual_time
async def test_under_reference_it_does_not_count() -> None:
    scene = scene_of({"a": 100})
    async with scene.pool as pool:
        enforcer = scene.enforcer(300, policy=Policy.REFERENCE)
        enforcer.start()
        await pool.load("a")
        scene.engine.overhead_bytes = 900 * MIB
        await asyncio.sleep(5)
        assert enforcer.level is Level.OK
        assert scene.engine.plans[-1].limits.pause_above_bytes == 300 * MIB


@pytest.mark.parametrize("policy", list(Policy))
def test_what_is_tolerated_when_nothing_can_be_done_does_not_creep_up_with_what_runs(policy: Policy) -> None:
    @on_virtual_time
    async def main() -> None:
        scene = Scene({"a": 100}, answer_tokens=None, context_length=None, kv_bytes_per_token=MIB // 4, step_s=0.05)
        async with scene.pool as pool:
            enforcer = scene.enforcer(200, policy=policy, poll_interval=0.1, prefill_memory_guard=False)
            enforcer.start()
            await pool.load("a")
            scene.engine.leak_bytes = 150 * MIB
            await until(lambda: enforcer.level is Level.EXHAUSTED)
            growing = pool.generate("a", prompt="hi", max_tokens=1000)
            await until(lambda: growing.state is not RequestState.DECODE and growing.generated_tokens > 10)
            assert scene.engine.peak <= (250 + 16 + 1) * MIB
            assert growing.state is RequestState.PARKED or isinstance(growing.error, OmlxError)

    main()


@on_virtual_time
async def test_nothing_more_is_done_while_usage_stays_where_nothing_helps() -> None:
    scene = scene_of({"a": 100}, pinned=("a",))
    async with scene.pool as pool:
        enforcer = scene.enforcer(1000)
        enforcer.start()
        await pool.load("a")
        enforcer.max_bytes = 50 * MIB
        await asyncio.sleep(2)
        told = len(scene.events)
        await asyncio.sleep(60)
        assert len(scene.events) == told
        assert enforcer.level is Level.EXHAUSTED
        await turns()
