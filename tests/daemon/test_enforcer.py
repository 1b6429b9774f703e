"""The enforcer's rules R1 to R10 and R13 under the reference policy, on the fake engine and virtual time."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from omlxd.core.errors import InvalidRequest, LoadCancelled, RequestAborted
from omlxd.core.events import EventName
from omlxd.core.limits import Machine
from omlxd.core.memory import Policy
from omlxd.core.policy import Outcome, Unload
from omlxd.core.states import EntryState, Level
from omlxd.daemon.enforcer import ProcessMemoryEnforcer
from omlxd.engine.orders import MIB, EngineLimits
from tests.fakes.clock import on_virtual_time
from tests.fakes.engine import GIB
from tests.fakes.pools import Scene, turns, until_decoding


def reference(scene: Scene, max_mib: float, hard_mib: float | None = None, **options: Any) -> ProcessMemoryEnforcer:
    return scene.enforcer(max_mib, hard_mib, policy=Policy.REFERENCE, **options)


def enforcer_tasks() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name() == "omlxd-enforcer"]


@on_virtual_time
async def test_r1_starting_twice_makes_one_task() -> None:
    scene = Scene({"chat": 100})
    async with scene.pool:
        enforcer = reference(scene, 1000)
        enforcer.start()
        enforcer.start()
        await turns()
        assert enforcer_tasks() == ["omlxd-enforcer"]
        await enforcer.stop()


@on_virtual_time
async def test_r1_it_looks_once_per_poll_interval() -> None:
    scene = Scene({"chat": 100})
    async with scene.pool as pool:
        reference(scene, 1000, poll_interval=0.5).start()
        await pool.load("chat")
        await asyncio.sleep(10.2)
        scene.engine.leak_bytes = 2000 * MIB
        await turns()
        assert not scene.named(EventName.LEVEL_CHANGED)
        await asyncio.sleep(0.51)
        assert scene.named(EventName.LEVEL_CHANGED)


@on_virtual_time
async def test_a_look_that_does_not_end_is_overdue_and_one_that_fails_or_comes_in_time_is_not() -> None:
    scene = Scene({"chat": 100})
    async with scene.pool as pool:
        enforcer = reference(scene, 1000)
        assert enforcer.overdue_s() == 0.0
        enforcer.start()
        await asyncio.sleep(10.5)
        assert enforcer.overdue_s() == 0.0
        async with pool.lock:
            scene.engine.leak_bytes = 2000 * MIB
            await asyncio.sleep(20)
            assert 18.0 <= enforcer.overdue_s() <= 20.0
        await asyncio.sleep(2.5)
        assert enforcer.overdue_s() == 0.0
        await enforcer.stop()
        await asyncio.sleep(60)
        assert enforcer.overdue_s() == 0.0


@on_virtual_time
async def test_r1_an_exception_in_a_tick_is_told_once_and_the_loop_goes_on() -> None:
    scene = Scene({"a": 400, "b": 400})
    async with scene.pool as pool:
        enforcer = reference(scene, 1000)
        enforcer.start()
        await pool.load("a")
        await pool.load("b")
        read = scene.engine.read

        def broken() -> None:
            raise RuntimeError("the gauge is broken")

        scene.engine.read = broken  # type: ignore[assignment, method-assign]
        await asyncio.sleep(5.5)
        scene.engine.read = read  # type: ignore[method-assign]
        scene.engine.leak_bytes = 300 * MIB
        await asyncio.sleep(1.5)
        assert scene.states == {"a": "unloaded", "b": "loaded"}
    (event,) = scene.named(EventName.ENFORCER_ERROR)
    assert "the gauge is broken" in event.fields["error"]


@on_virtual_time
async def test_r2_a_lower_limit_evicts_at_once_without_waiting_for_a_poll() -> None:
    scene = Scene({"a": 400, "b": 400})
    async with scene.pool as pool:
        enforcer = reference(scene, 1000, poll_interval=3600.0)
        enforcer.start()
        await pool.load("a")
        await pool.load("b")
        before_s = scene.clock()
        enforcer.max_bytes = 500 * MIB
        decisions = await enforcer.settle()
        assert scene.clock() - before_s < 1.0
        assert [decision.action for decision in decisions] == [Unload("a"), None]
        assert scene.states == {"a": "unloaded", "b": "loaded"}


@pytest.mark.parametrize("max_mib", [0, -5])
def test_r2_a_limit_of_zero_or_less_enforces_nothing(max_mib: int) -> None:
    @on_virtual_time
    async def main() -> None:
        scene = Scene({"a": 400, "b": 400})
        async with scene.pool as pool:
            enforcer = reference(scene, max_mib)
            enforcer.start()
            await pool.load("a")
            await pool.load("b")
            await asyncio.sleep(5)
            assert scene.states == {"a": "loaded", "b": "loaded"}
            assert enforcer.level is Level.OK
            enforcer.max_bytes = 500 * MIB
            await enforcer.settle()
            assert scene.states == {"a": "unloaded", "b": "loaded"}

    main()


@on_virtual_time
async def test_r3_the_hard_limit_follows_from_the_machine_and_an_impossible_one_is_refused() -> None:
    scene = Scene({"a": 400})
    async with scene.pool:
        assert reference(scene, 1000).limits.hard_bytes == 60 * GIB
        assert reference(scene, 1000, hard_mib=1020).limits.hard_bytes == 1020 * MIB
        with pytest.raises(InvalidRequest):
            reference(scene, 1000, hard_mib=900)


@on_virtual_time
async def test_r3_what_the_device_allows_binds_and_is_told_once() -> None:
    scene = Scene({"a": 400})
    machine = Machine(ram_bytes=64 * GIB, device_cap_bytes=10 * GIB, device_cap_source="metal")
    async with scene.pool:
        enforcer = reference(scene, 20 * 1024, machine=machine)
        enforcer.start()
        assert enforcer.limits.binding == "metal"
        assert enforcer.limits.soft_bytes < 10 * GIB
        await asyncio.sleep(5)
    assert len(scene.named(EventName.LIMIT_WARNING)) == 1


@on_virtual_time
async def test_r4_usage_equal_to_the_limit_is_not_over_it() -> None:
    scene = Scene({"a": 500, "b": 500})
    async with scene.pool as pool:
        enforcer = reference(scene, 1000)
        enforcer.start()
        await pool.load("a")
        await pool.load("b")
        assert scene.engine.active_bytes == 1000 * MIB
        await asyncio.sleep(3)
        assert scene.states == {"a": "loaded", "b": "loaded"}
        scene.engine.leak_bytes = 1
        await enforcer.settle()
        assert scene.states == {"a": "unloaded", "b": "loaded"}


@on_virtual_time
async def test_r5_limits_and_guard_are_in_the_plan_before_a_model_and_after_a_change() -> None:
    scene = Scene({"a": 400})
    async with scene.pool as pool:
        enforcer = reference(scene, 1000, hard_mib=1020, prefill_memory_guard=True)
        enforcer.start()
        await pool.load("a")
        wanted = EngineLimits(1000 * MIB, 1020 * MIB, 1000 * MIB, True)
        with_load = [plan.limits for plan in scene.engine.plans if plan.load is not None or plan.resident]
        assert set(with_load) == {wanted}
        enforcer.max_bytes = 900 * MIB
        await turns()
        assert scene.engine.plans[-1].limits == EngineLimits(900 * MIB, 1020 * MIB, 900 * MIB, True)


@on_virtual_time
async def test_r6_models_are_unloaded_least_recently_used_first_until_the_limit_holds() -> None:
    scene = Scene({"a": 300, "b": 300, "c": 300})
    async with scene.pool as pool:
        enforcer = reference(scene, 1000)
        enforcer.start()
        for name in ("c", "a", "b"):
            await pool.load(name)
            await asyncio.sleep(1)
        enforcer.max_bytes = 350 * MIB
        decisions = await enforcer.settle()
        assert [decision.action for decision in decisions] == [Unload("c"), Unload("a"), None]
        assert scene.states == {"a": "unloaded", "b": "loaded", "c": "unloaded"}
    events = scene.named(EventName.DECISION)
    assert [event.fields["victim"] for event in events] == ["c", "a"]
    assert [event.fields["freed_bytes"] for event in events] == [300 * MIB, 300 * MIB]
    assert all(event.fields["seen"]["at_rest"] for event in events)


@on_virtual_time
async def test_r6_a_busy_model_is_unloaded_when_it_must_be_and_its_requests_get_one_error() -> None:
    scene = Scene({"a": 300, "b": 300}, answer_tokens=None, step_s=0.01)
    async with scene.pool as pool:
        enforcer = reference(scene, 1000)
        enforcer.start()
        first, second = pool.generate("a", prompt="hi"), pool.generate("b", prompt="hi")
        await asyncio.gather(until_decoding(first), until_decoding(second))
        enforcer.max_bytes = 400 * MIB
        await enforcer.settle()
        assert scene.states == {"a": "unloaded", "b": "loaded"}
        with pytest.raises(RequestAborted, match="soft limit"):
            await first.text()
        assert not second.ended
        await second.aclose()
    assert len(scene.named(EventName.REQUEST_ABORTED)) == 2


@on_virtual_time
async def test_r6_an_idle_model_goes_before_a_busy_one_that_was_used_earlier() -> None:
    scene = Scene({"a": 300, "b": 300}, answer_tokens=None, step_s=0.01)
    async with scene.pool as pool:
        enforcer = reference(scene, 1000)
        enforcer.start()
        busy = pool.generate("a", prompt="hi")
        await until_decoding(busy)
        await pool.load("b")
        enforcer.max_bytes = 400 * MIB
        await enforcer.settle()
        assert scene.states == {"a": "loaded", "b": "unloaded"}
        assert not busy.ended


@on_virtual_time
async def test_r7_the_only_model_stays_and_its_requests_end_with_one_clear_error() -> None:
    scene = Scene({"a": 300}, answer_tokens=None, kv_bytes_per_token=MIB)
    async with scene.pool as pool:
        enforcer = reference(scene, 350)
        enforcer.start()
        generations = [pool.generate("a", prompt="hi", max_tokens=1000) for _ in range(2)]
        results = await asyncio.gather(*(each.text() for each in generations), return_exceptions=True)
        assert [type(result) for result in results] == [RequestAborted] * 2
        assert all("soft limit" in str(result) for result in results)
        assert scene.states == {"a": "loaded"}
        assert await pool.generate("a", prompt="short", max_tokens=3).text() == "tok0 tok1 tok2 "
        assert enforcer.level is Level.OK
    assert len(scene.named(EventName.REQUEST_ABORTED)) == 2
    assert scene.engine.peak <= 353 * MIB  # a step of each request past the limit, then the engine stood still


@on_virtual_time
async def test_r7_a_busy_step_is_not_needed_to_notice_the_engine_stops_by_itself() -> None:
    scene = Scene({"a": 300}, answer_tokens=None, kv_bytes_per_token=MIB)
    async with scene.pool as pool:
        reference(scene, 350, poll_interval=3600.0).start()
        with pytest.raises(RequestAborted):
            await pool.generate("a", prompt="hi", max_tokens=1000).text()


@on_virtual_time
async def test_r8_a_load_in_progress_is_cancelled_when_nothing_can_be_unloaded() -> None:
    scene = Scene({"a": 800}, step_s=0.1)
    async with scene.pool as pool:
        enforcer = reference(scene, 1000)
        enforcer.start()
        loading = asyncio.create_task(pool.load("a"))
        await asyncio.sleep(0.5)
        assert scene.states == {"a": "loading"}
        enforcer.max_bytes = 100 * MIB
        await enforcer.settle()
        assert scene.engine.active_bytes == 0
        with pytest.raises(LoadCancelled, match="soft limit"):
            await loading
        assert scene.states == {"a": "unloaded"}
        enforcer.max_bytes = 1000 * MIB
        await pool.load("a")
        assert scene.states == {"a": "loaded"}
    (event,) = scene.named(EventName.DECISION)
    assert event.fields["action"] == "cancel_load"


@on_virtual_time
async def test_r8_abort_loading_is_set_while_the_load_is_being_stopped() -> None:
    scene = Scene({"a": 800}, drive="manual")
    async with scene.pool as pool:
        enforcer = reference(scene, 1000)
        enforcer.start()
        loading = asyncio.create_task(pool.load("a"))
        while not scene.engine.active_bytes:
            await turns()
            scene.engine.step()
        enforcer.max_bytes = 10 * MIB
        await turns(20)
        assert pool.entries["a"].abort_loading
        await turns()
        scene.engine.step()
        await turns(20)
        assert not pool.entries["a"].abort_loading
        with pytest.raises(LoadCancelled):
            await loading


@on_virtual_time
async def test_r9_all_pinned_and_over_the_limit_is_one_record_and_a_level() -> None:
    scene = Scene({"a": 300, "b": 300}, pinned=("a", "b"))
    async with scene.pool as pool:
        enforcer = reference(scene, 1000)
        enforcer.start()
        await pool.load("a")
        await pool.load("b")
        enforcer.max_bytes = 400 * MIB
        (decision,) = await enforcer.settle()
        assert decision.outcome is Outcome.ALL_PINNED
        await asyncio.sleep(60)
        assert enforcer.level is Level.EXHAUSTED
        assert "pinned" in (enforcer.view().reason or "")
        assert scene.states == {"a": "loaded", "b": "loaded"}
        (event,) = scene.named(EventName.LEVEL_CHANGED)
        assert event.fields["level_now"] == "exhausted"
        enforcer.max_bytes = 1000 * MIB
        await enforcer.settle()
        assert enforcer.level is Level.OK
    assert scene.named(EventName.DECISION) == []


@on_virtual_time
async def test_r9_small_requests_still_run_when_nothing_more_can_be_done() -> None:
    scene = Scene({"a": 300, "b": 300}, pinned=("a", "b"))
    async with scene.pool as pool:
        enforcer = reference(scene, 1000)
        enforcer.start()
        await pool.load("a")
        await pool.load("b")
        enforcer.max_bytes = 400 * MIB
        await enforcer.settle()
        assert (await pool.generate("a", prompt="hi").text()).startswith("tok0")


@on_virtual_time
async def test_r9_memory_that_nobody_accounts_for_is_reported_once() -> None:
    scene = Scene({"a": 300})
    async with scene.pool as pool:
        enforcer = reference(scene, 1000)
        enforcer.start()
        await pool.load("a")
        scene.engine.leak_bytes = 900 * MIB
        await asyncio.sleep(30)
        assert enforcer.level is Level.EXHAUSTED
        (event,) = scene.named(EventName.LEVEL_CHANGED)
        assert event.fields["outcome"] == "unaccounted"
        assert "900 MiB" in event.fields["reason"]


@on_virtual_time
async def test_r10_a_pinned_model_survives_pressure_that_a_newer_one_does_not() -> None:
    scene = Scene({"a": 300, "b": 300}, pinned=("a",))
    async with scene.pool as pool:
        enforcer = reference(scene, 1000)
        enforcer.start()
        await pool.load("a")
        await asyncio.sleep(5)
        await pool.load("b")
        enforcer.max_bytes = 400 * MIB
        await enforcer.settle()
        assert scene.states == {"a": "loaded", "b": "unloaded"}


@on_virtual_time
async def test_r13_stopping_cancels_the_task_clears_the_limits_and_may_be_repeated() -> None:
    scene = Scene({"a": 300})
    async with scene.pool as pool:
        enforcer = reference(scene, 1000)
        await enforcer.stop()
        enforcer.start()
        await pool.load("a")
        await enforcer.stop()
        await enforcer.stop()
        assert enforcer_tasks() == []
        await turns()
        limits = scene.engine.plans[-1].limits
        assert (limits.soft_bytes, limits.hard_bytes, limits.pause_above_bytes) == (0, 0, 0)
        scene.engine.leak_bytes = 5000 * MIB
        assert (await pool.generate("a", prompt="hi").text()).startswith("tok0")
        enforcer.start()
        await turns(20)
        assert enforcer.level is not Level.OK


@on_virtual_time
async def test_r13_stopping_while_it_waits_for_the_engine_ends_at_once_and_the_engine_goes_on() -> None:
    scene = Scene({"a": 300, "b": 300})
    async with scene.pool as pool:
        enforcer = reference(scene, 1000)
        enforcer.start()
        await pool.load("a")
        await pool.load("b")
        scene.engine.hold_rests = True
        enforcer.max_bytes = 400 * MIB
        await turns(10)
        await enforcer.stop()
        scene.engine.hold_rests = False
        assert not pool.lock.locked()
        assert (await pool.generate("a", prompt="hi").text()).startswith("tok0")


@on_virtual_time
async def test_a_step_that_does_not_end_costs_nobody_anything() -> None:
    scene = Scene({"a": 300, "b": 300})
    async with scene.pool as pool:
        enforcer = reference(scene, 1000)
        enforcer.start()
        await pool.load("a")
        await pool.load("b")
        scene.engine.hold_rests = True
        enforcer.max_bytes = 400 * MIB
        await asyncio.sleep(20)
        assert scene.states == {"a": "loaded", "b": "loaded"}
        scene.engine.hold_rests = False
        await asyncio.sleep(10)
        assert scene.states == {"a": "unloaded", "b": "loaded"}


@on_virtual_time
async def test_the_cache_is_dropped_for_the_hard_limit_and_costs_no_model() -> None:
    scene = Scene({"a": 300, "b": 300}, answer_tokens=None, step_s=0.1)
    async with scene.pool as pool:
        reference(scene, 1000, hard_mib=1020).start()
        await pool.load("a")
        await pool.load("b")
        generation = pool.generate("a", prompt="hi", max_tokens=100)
        await until_decoding(generation)
        scene.engine.cache_bytes = 600 * MIB
        await asyncio.sleep(3)
        assert scene.engine.cache_bytes == 0
        assert scene.states == {"a": "loaded", "b": "loaded"}
        assert not generation.ended


@on_virtual_time
async def test_a_cache_that_an_idle_engine_keeps_is_not_logged_every_second() -> None:
    scene = Scene({"a": 300})
    async with scene.pool as pool:
        reference(scene, 1000, hard_mib=1020).start()
        await pool.load("a")
        scene.engine.cache_bytes = 900 * MIB
        told = len(scene.events)
        await asyncio.sleep(60)
        assert len(scene.events) - told <= 1


@on_virtual_time
async def test_nothing_is_told_while_nothing_happens() -> None:
    scene = Scene({"a": 300})
    async with scene.pool as pool:
        reference(scene, 1000).start()
        await pool.load("a")
        told = len(scene.events)
        await asyncio.sleep(600)
        assert len(scene.events) == told


@on_virtual_time
async def test_waiting_requests_survive_an_eviction_and_load_the_model_again() -> None:
    scene = Scene({"a": 300, "b": 300}, max_batch=1, step_s=0.01)
    async with scene.pool as pool:
        enforcer = reference(scene, 1000)
        enforcer.start()
        await pool.load("b")
        running, waiting = pool.generate("a", prompt="hi"), pool.generate("a", prompt="hi")
        await until_decoding(running)
        keep = pool.generate("b", prompt="hi", max_tokens=8)
        await until_decoding(keep)
        pool.pin("b")
        enforcer.max_bytes = 400 * MIB
        await enforcer.settle()
        with pytest.raises(RequestAborted):
            await running.text()
        enforcer.max_bytes = 1000 * MIB
        assert (await waiting.text()).startswith("tok0")
        assert (await keep.text()).startswith("tok0")


@on_virtual_time
async def test_a_model_whose_weights_alone_are_over_the_limit_answers_does_not_fit() -> None:
    scene = Scene({"a": 300})
    async with scene.pool as pool:
        enforcer = reference(scene, 1000)
        enforcer.start()
        await pool.load("a")
        enforcer.max_bytes = 200 * MIB
        await enforcer.settle()
        assert pool.entries["a"].state is EntryState.LOADED
        with pytest.raises(Exception, match="alone are over the soft limit"):
            await pool.generate("a", prompt="hi").text()


def test_a_program_that_uses_a_threaded_engine_leaves_no_thread_behind() -> None:
    async def main() -> None:
        scene = Scene({"a": 10}, drive="thread")
        async with scene.pool as pool:
            enforcer = reference(scene, 1000, poll_interval=0.01)
            enforcer.start()
            assert (await pool.generate("a", prompt="hi").text()).startswith("tok0")
            await enforcer.stop()

    asyncio.run(main())
    assert [thread.name for thread in threading.enumerate() if "fake" in thread.name] == []
