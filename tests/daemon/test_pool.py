"""The pool: loading on demand, sharing loads, pins, leases, unloads, and how requests end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from omlxd.core.errors import (
    Busy,
    ContextExceeded,
    DoesNotFit,
    EngineFailed,
    InvalidRequest,
    LoadCancelled,
    LoadFailed,
    RequestAborted,
    ShuttingDown,
    UnknownModel,
)
from omlxd.core.events import Event, EventName
from omlxd.core.manifest import ModelSettings
from omlxd.core.states import EntryState, FinishReason
from omlxd.daemon.load_ticket import LoadStatus
from omlxd.daemon.log import libraries_to
from omlxd.daemon.pool import EnginePool
from omlxd.engine.orders import MIB, Plan
from tests.fakes.clock import on_virtual_time, run
from tests.fakes.engine import FakeEngine
from tests.fakes.pools import FakeFolders, Scene, turns, until_decoding

CHAT = [{"role": "user", "content": "why is the sky blue"}]
EIGHT = "".join(f"tok{n} " for n in range(8))


@on_virtual_time
async def test_a_request_loads_its_model_and_streams_its_text() -> None:
    scene = Scene({"chat": 100})
    async with scene.pool as pool:
        generation = pool.generate("chat", messages=CHAT)
        chunks = [chunk async for chunk in generation]
    assert "".join(chunk.text for chunk in chunks) == EIGHT
    assert generation.finish_reason is FinishReason.STOP
    assert (generation.prompt_tokens, generation.generated_tokens) == (6, 8)
    assert generation.first_token_s is not None


@on_virtual_time
async def test_everything_is_given_back_when_the_pool_closes() -> None:
    scene = Scene({"chat": 100, "code": 100})
    async with scene.pool as pool:
        await pool.load("code")
        generation = pool.generate("chat", prompt="hello", max_tokens=1000)
        await generation.wait()
    assert scene.engine.active_bytes == 0
    assert scene.engine.closed
    with pytest.raises(ShuttingDown):
        await generation.text()
    assert set(scene.states.values()) == {"unloaded"}


@on_virtual_time
async def test_however_many_ask_a_model_is_loaded_once() -> None:
    scene = Scene({"chat": 100})
    async with scene.pool as pool:
        texts = await asyncio.gather(
            pool.load("chat"), *(pool.generate("chat", prompt=f"question {n}").text() for n in range(20))
        )
        assert texts[1:] == [EIGHT] * 20
    assert len(scene.named(EventName.LOAD_STARTED)) == 1
    assert scene.folders.reads == ["chat"]


@on_virtual_time
async def test_a_load_goes_on_when_the_one_who_asked_first_gives_up() -> None:
    scene = Scene({"chat": 1000})
    async with scene.pool as pool:
        first = asyncio.create_task(pool.load("chat"))
        second = asyncio.create_task(pool.load("chat"))
        await turns()
        first.cancel()
        await second
        assert pool.entries["chat"].state is EntryState.LOADED
        with pytest.raises(asyncio.CancelledError):
            await first


@on_virtual_time
async def test_a_load_goes_on_when_everybody_has_given_up() -> None:
    scene = Scene({"chat": 1000})
    async with scene.pool as pool:
        only = asyncio.create_task(pool.load("chat"))
        await turns()
        only.cancel()
        await turns(100)
        assert pool.entries["chat"].state is EntryState.LOADED


@on_virtual_time
async def test_loads_take_turns_in_the_order_of_asking() -> None:
    scene = Scene({"a": 200, "b": 200, "c": 200})
    async with scene.pool as pool:
        await asyncio.gather(pool.load("b"), pool.load("c"), pool.load("a"))
    started = [event.model for event in scene.named(EventName.LOAD_STARTED, EventName.LOAD_FINISHED)]
    assert started == ["b", "b", "c", "c", "a", "a"]


@on_virtual_time
async def test_progress_is_told_from_waiting_to_the_last_slice() -> None:
    scene = Scene({"chat": 200})
    told: list[LoadStatus] = []
    async with scene.pool as pool:
        entry = await pool.load("chat", on_progress=told.append)
        assert entry.last_load is not None
        assert entry.last_load.load_s == 0.25
    assert told[0].state == "waiting"
    assert [status.done_bytes // MIB for status in told if status.state == "loading"] == [0, 64, 128, 192, 200]


@on_virtual_time
async def test_an_unknown_model_is_named_with_the_nearest_and_costs_nothing() -> None:
    scene = Scene({"chat": 100})
    async with scene.pool as pool:
        await pool.load("chat")
        with pytest.raises(UnknownModel) as raised:
            pool.generate("chta", messages=CHAT)
        assert raised.value.hint == "did you mean `chat`?"
        with pytest.raises(UnknownModel):
            await pool.load("nothing-like-it")
        assert scene.states == {"chat": "loaded"}


@on_virtual_time
async def test_an_alias_names_the_same_model() -> None:
    settings = ModelSettings(name="chat", path="/models/chat", aliases=("default",))
    pool = EnginePool({"chat": settings}, engine=FakeEngine("loop"), read_folder=FakeFolders({"chat": 10}))
    async with pool:
        assert (await pool.load("default")).name == "chat"
        assert pool.generate("default", prompt="hi").model == "chat"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
    ],
)
def test_an_option_out_of_range_is_refused_before_anything_is_loaded(options: dict[str, Any], param: str) -> None:
    async def main() -> None:
        scene = Scene({"chat": 100})
        async with scene.pool as pool:
            with pytest.raises(InvalidRequest) as raised:
                pool.generate("chat", prompt="hi", **options)
            assert raised.value.details["param"] == param
            await turns()
            assert scene.folders.reads == []

    run(main())


@pytest.mark.parametrize(
    "prompt", [{}, {"prompt": ""}, {"tokens": []}, {"messages": []}, {"prompt": "a", "tokens": [1]}]
)
def test_a_prompt_is_exactly_one_and_not_empty(prompt: dict[str, Any]) -> None:
    async def main() -> None:
        async with Scene({"chat": 100}).pool as pool:
            with pytest.raises(InvalidRequest):
                pool.generate("chat", **prompt)

    run(main())


@pytest.mark.parametrize("token", [-1, 1000, 2**40])
def test_token_ids_beyond_the_vocabulary_never_reach_the_engine(token: int) -> None:
    async def main() -> None:
        scene = Scene({"chat": 100})
        async with scene.pool as pool:
            with pytest.raises(InvalidRequest, match=str(token)):
                await pool.generate("chat", tokens=[1, token, 2]).text()
            assert all(not plan.requests for plan in scene.engine.plans)
            assert await pool.generate("chat", tokens=[1, 999]).text() == EIGHT

    run(main())


@on_virtual_time
async def test_a_prompt_as_long_as_the_context_is_refused_with_the_numbers() -> None:
    scene = Scene({"chat": 100}, context_length=10)
    async with scene.pool as pool:
        with pytest.raises(ContextExceeded) as raised:
            await pool.generate("chat", tokens=[1] * 10).text()
        assert raised.value.details == {"prompt_tokens": 10, "context_length": 10, "param": "prompt"}
        generation = pool.generate("chat", tokens=[1] * 9)
        assert await generation.text() == "tok0 "
        assert generation.finish_reason is FinishReason.LENGTH


@on_virtual_time
async def test_a_prompt_that_is_too_long_for_an_unloaded_model_known_before_does_not_load_it() -> None:
    scene = Scene({"chat": 100}, context_length=10)
    async with scene.pool as pool:
        await pool.load("chat")
        await pool.unload("chat")
        with pytest.raises(ContextExceeded):
            await pool.generate("chat", tokens=[1] * 20).text()
        assert scene.states == {"chat": "unloaded"}


@on_virtual_time
async def test_an_event_of_the_engine_that_cannot_be_handled_takes_no_other_with_it() -> None:
    def broken(*_: object) -> None:
        raise KeyError("a bug of ours")

    events: list[Event] = []
    with libraries_to(events.append):
        async with Scene({"chat": 100}).pool as pool:
            pool.dispatch._prefilled = broken  # type: ignore[method-assign]
            assert await pool.generate("chat", prompt="hi").text() == EIGHT
    assert events[0].fields["message"] == "`Prefilled` of the engine could not be handled"


@on_virtual_time
async def test_a_chat_template_that_refuses_ends_the_request_with_its_reason() -> None:
    async with Scene({"chat": 100}).pool as pool:
        with pytest.raises(InvalidRequest, match="nobody"):
            await pool.generate("chat", messages=[{"role": "nobody", "content": "x"}]).text()


@on_virtual_time
async def test_a_stop_text_ends_the_answer_and_is_not_part_of_it() -> None:
    async with Scene({"chat": 100}).pool as pool:
        generation = pool.generate("chat", prompt="hi", stop="tok3")
        assert await generation.text() == "tok0 tok1 tok2 "
        assert generation.finish_reason is FinishReason.STOP


@on_virtual_time
async def test_a_missing_folder_fails_the_model_and_no_other() -> None:
    scene = Scene({"chat": 100}, without_folder=("ghost",))
    async with scene.pool as pool:
        await pool.load("chat")
        with pytest.raises(LoadFailed, match="does not exist"):
            await pool.generate("ghost", prompt="hi").text()
        assert scene.states == {"chat": "loaded", "ghost": "failed"}
        assert pool.entries["ghost"].error is not None
        assert await pool.generate("chat", prompt="hi").text() == EIGHT


@on_virtual_time
async def test_a_failed_model_answers_at_once_with_the_same_reason_until_a_while_has_passed() -> None:
    scene = Scene({}, without_folder=("ghost",))
    async with scene.pool as pool:
        for _ in range(3):
            with pytest.raises(LoadFailed):
                await pool.generate("ghost", prompt="hi").text()
        assert len(scene.folders.reads) == 1
        await asyncio.sleep(31)
        with pytest.raises(LoadFailed):
            await pool.generate("ghost", prompt="hi").text()
        assert len(scene.folders.reads) == 2


@on_virtual_time
async def test_a_failed_model_is_tried_again_as_soon_as_its_files_have_changed() -> None:
    scene = Scene({"chat": 100})
    scene.engine.load_errors["chat"] = ValueError("missing parameters")
    async with scene.pool as pool:
        for _ in range(2):
            with pytest.raises(LoadFailed, match="missing parameters"):
                await pool.generate("chat", prompt="hi").text()
        assert len(scene.named(EventName.LOAD_STARTED)) == 1
        del scene.engine.load_errors["chat"]
        scene.folders.sizes["chat"] = 101
        assert await pool.generate("chat", prompt="hi").text() == EIGHT


@on_virtual_time
async def test_a_load_that_failed_on_files_in_change_is_not_held_against_those_that_were_there_before() -> None:
    scene = Scene({"chat": 100})
    scene.engine.load_errors["chat"] = ValueError("cut in the middle")

    def damage(event: Event) -> None:
        if event.event is EventName.LOAD_STARTED:
            scene.folders.sizes["chat"] = 50

    async with scene.pool as pool:
        scene.on_event = damage
        with pytest.raises(LoadFailed, match="cut in the middle"):
            await pool.generate("chat", prompt="hi").text()
        await asyncio.sleep(0.1)
        del scene.engine.load_errors["chat"]
        scene.on_event, scene.folders.sizes["chat"] = lambda _: None, 100
        assert await pool.generate("chat", prompt="hi").text() == EIGHT


@on_virtual_time
async def test_files_put_right_at_the_moment_of_a_failure_are_not_blamed_for_it() -> None:
    scene = Scene({"chat": 100})
    scene.engine.load_errors["chat"] = ValueError("cut in the middle")

    def put_right(event: Event) -> None:
        if event.event is EventName.LOAD_FAILED:
            scene.folders.sizes["chat"] = 101  # before the pool looks at them again

    async with scene.pool as pool:
        scene.on_event = put_right
        with pytest.raises(LoadFailed, match="cut in the middle"):
            await pool.generate("chat", prompt="hi").text()
        await asyncio.sleep(0.1)
        del scene.engine.load_errors["chat"]
        assert await pool.generate("chat", prompt="hi").text() == EIGHT


@on_virtual_time
async def test_an_explicit_load_tries_a_failed_model_again() -> None:
    scene = Scene({}, without_folder=("ghost",))
    async with scene.pool as pool:
        with pytest.raises(LoadFailed):
            await pool.load("ghost")
        scene.folders.sizes["ghost"] = 10
        await pool.load("ghost")
        assert scene.states == {"ghost": "loaded"}
        assert pool.entries["ghost"].error is None


@on_virtual_time
async def test_a_load_that_the_engine_gives_up_leaves_no_memory_and_all_who_waited_know_why() -> None:
    scene = Scene({"broken": 300})
    scene.engine.load_errors["broken"] = ValueError("Missing 3 parameters")
    async with scene.pool as pool:
        results = await asyncio.gather(
            *(pool.generate("broken", prompt="hi").text() for _ in range(3)), return_exceptions=True
        )
        assert all(isinstance(result, LoadFailed) and "Missing 3" in result.message for result in results)
        assert scene.engine.active_bytes == 0
    assert len(scene.named(EventName.LOAD_FAILED)) == 1


@on_virtual_time
async def test_an_error_in_a_step_ends_the_requests_of_that_model_only() -> None:
    scene = Scene({"chat": 100, "code": 100})
    async with scene.pool as pool:
        await asyncio.gather(pool.load("chat"), pool.load("code"))
        chat, code = pool.generate("chat", prompt="hi"), pool.generate("code", prompt="hi")
        await asyncio.gather(until_decoding(chat), until_decoding(code))
        scene.engine.step_errors["chat"] = RuntimeError("NaN")
        with pytest.raises(EngineFailed, match="NaN"):
            await chat.text()
        assert await code.text() == EIGHT
        assert await pool.generate("chat", prompt="again").text() == EIGHT


@on_virtual_time
async def test_an_aborted_request_ends_with_one_error_and_then_nothing() -> None:
    scene = Scene({"chat": 100}, answer_tokens=None)
    async with scene.pool as pool:
        generation = pool.generate("chat", prompt="hi", max_tokens=2000)
        await until_decoding(generation)
        assert pool.abort(generation.id, "somebody asked for it")
        assert not pool.abort(generation.id, "twice")
        ends = []
        for _ in range(3):
            try:
                while True:
                    await anext(generation)
            except (RequestAborted, StopAsyncIteration) as end:
                ends.append(type(end))
        assert ends == [RequestAborted, StopAsyncIteration, StopAsyncIteration]
        await turns(10)
        assert pool.entries["chat"].requests == {}
        assert scene.engine.kv_bytes() == {"chat": 0}
    assert len(scene.named(EventName.REQUEST_ABORTED)) == 1


@on_virtual_time
async def test_a_request_that_waits_for_its_model_can_be_aborted_and_a_load_that_has_begun_goes_on() -> None:
    scene = Scene({"chat": 1000})
    async with scene.pool as pool:
        generation = pool.generate("chat", prompt="hi")
        while scene.states["chat"] != "loading":
            await turns(1)
        assert pool.abort(generation.id, "changed my mind")
        with pytest.raises(RequestAborted, match="changed my mind"):
            await generation.text()
        await turns(100)
        assert scene.states == {"chat": "loaded"}


@on_virtual_time
async def test_a_caller_who_goes_away_frees_the_memory_at_the_next_step() -> None:
    scene = Scene({"chat": 100}, answer_tokens=None)
    async with scene.pool as pool:
        async with pool.generate("chat", prompt="hi", max_tokens=2000) as generation:
            await anext(generation)
        await turns(10)
        assert scene.engine.kv_bytes() == {"chat": 0}
        listening = asyncio.create_task(pool.generate("chat", prompt="hi", max_tokens=2000).text())
        await turns(20)
        listening.cancel()
        await turns(10)
        assert scene.engine.kv_bytes() == {"chat": 0}
        assert pool.generations == ()


@on_virtual_time
async def test_looking_at_a_request_with_a_timeout_does_not_abort_it() -> None:
    scene = Scene({"chat": 1000}, step_s=1.0)
    async with scene.pool as pool:
        generation = pool.generate("chat", prompt="hi")
        assert not await generation.wait(1.0)
        assert await generation.text() == EIGHT


@on_virtual_time
async def test_one_request_too_many_is_told_to_come_back() -> None:
    scene = Scene({"chat": 1000}, max_waiting=2)
    async with scene.pool as pool:
        waiting = [pool.generate("chat", prompt="hi") for _ in range(2)]
        with pytest.raises(Busy) as raised:
            pool.generate("chat", prompt="hi")
        assert raised.value.retry_after_s == 5.0
        assert [await generation.text() for generation in waiting] == [EIGHT, EIGHT]


@on_virtual_time
async def test_unloading_a_busy_model_serves_what_is_there_first() -> None:
    scene = Scene({"chat": 100})
    async with scene.pool as pool:
        generation = pool.generate("chat", prompt="hi")
        await until_decoding(generation)
        result = await pool.unload("chat")
        assert (result.was, result.freed_bytes >= 100 * MIB) == (EntryState.LOADED, True)
        assert await generation.text() == EIGHT
        assert scene.engine.active_bytes == 0


@on_virtual_time
async def test_a_request_that_comes_while_its_model_is_unloaded_loads_it_again() -> None:
    scene = Scene({"chat": 100}, step_s=1.0)
    async with scene.pool as pool:
        first = pool.generate("chat", prompt="hi")
        await until_decoding(first)
        unloading = asyncio.create_task(pool.unload("chat"))
        await turns()
        second = pool.generate("chat", prompt="hi")
        assert await first.text() == EIGHT
        await unloading
        assert await second.text() == EIGHT
    assert len(scene.named(EventName.LOAD_FINISHED)) == 2


@on_virtual_time
async def test_unloading_gives_a_busy_model_the_drain_timeout_and_no_more() -> None:
    scene = Scene({"chat": 100}, step_s=1.0, answer_tokens=None)
    async with scene.pool as pool:
        generation = pool.generate("chat", prompt="hi", max_tokens=1000)
        await until_decoding(generation)
        before_s = scene.clock()
        await pool.unload("chat", drain_timeout_s=10.0)
        assert 10.0 <= scene.clock() - before_s < 15.0
        with pytest.raises(RequestAborted, match="unloaded"):
            await generation.text()


@on_virtual_time
async def test_unloading_now_ends_its_requests_and_gives_the_memory_back() -> None:
    scene = Scene({"chat": 100}, answer_tokens=None, pinned=("chat",))
    async with scene.pool as pool:
        generations = [pool.generate("chat", prompt="hi", max_tokens=1000) for _ in range(3)]
        await asyncio.gather(*(until_decoding(generation) for generation in generations))
        await pool.unload("chat", now=True)
        assert scene.engine.active_bytes == 0
        results = await asyncio.gather(*(generation.text() for generation in generations), return_exceptions=True)
        assert [type(result) for result in results] == [RequestAborted] * 3


@on_virtual_time
async def test_unloading_a_loading_model_cancels_the_load_and_the_next_one_works() -> None:
    scene = Scene({"chat": 1000}, step_s=1.0)
    async with scene.pool as pool:
        loading = asyncio.create_task(pool.load("chat"))
        await asyncio.sleep(5.0)
        assert scene.states == {"chat": "loading"}
        assert (await pool.unload("chat")).was is EntryState.LOADING
        with pytest.raises(LoadCancelled):
            await loading
        assert scene.states == {"chat": "unloaded"}
        assert scene.engine.active_bytes == 0
        await pool.load("chat")
        assert scene.engine.loaded == {"chat"}


async def until_ordered(scene: Scene, ordered: Callable[[Plan], bool]) -> None:
    """Let the loop run until the engine, which the test drives, has been sent such a plan."""
    while not (scene.engine.plans and ordered(scene.engine.plans[-1])):
        await turns(1)


async def drive(scene: Scene, task: asyncio.Task[Any]) -> None:
    """Take the engine's steps until the task is done."""
    while not task.done():
        await turns()
        scene.engine.step()


@on_virtual_time
async def test_a_load_that_ends_in_the_instant_it_is_cancelled_is_unloaded_again() -> None:
    scene = Scene({"chat": 64}, drive="manual")
    async with scene.pool as pool:
        loading = asyncio.create_task(pool.load("chat"))
        await until_ordered(scene, lambda plan: plan.load is not None)
        unloading = asyncio.create_task(pool.unload("chat"))
        scene.engine.step()  # the whole load, before the plan without it arrives
        assert scene.engine.loaded == {"chat"}
        await drive(scene, unloading)
        with pytest.raises(LoadCancelled):
            await loading
        assert scene.engine.loaded == set()
        assert scene.states == {"chat": "unloaded"}


@on_virtual_time
async def test_a_load_that_is_cancelled_before_the_engine_saw_it_ends_too() -> None:
    scene = Scene({"chat": 64}, drive="manual")
    async with scene.pool as pool:
        loading = asyncio.create_task(pool.load("chat"))
        await until_ordered(scene, lambda plan: plan.load is not None)
        unloading = asyncio.create_task(pool.unload("chat"))
        await until_ordered(scene, lambda plan: plan.load is None)
        await drive(scene, unloading)
        with pytest.raises(LoadCancelled):
            await loading
        assert scene.states == {"chat": "unloaded"}
        again = asyncio.create_task(pool.load("chat"))
        await drive(scene, again)
        assert scene.states == {"chat": "loaded"}


@on_virtual_time
async def test_a_request_that_is_aborted_before_the_engine_saw_it_leaves_nothing_behind() -> None:
    scene = Scene({"chat": 64}, drive="manual")
    async with scene.pool as pool:
        await drive(scene, asyncio.create_task(pool.load("chat")))
        generation = pool.generate("chat", prompt="hi")
        await until_ordered(scene, lambda plan: bool(plan.requests))
        pool.abort(generation.id, "never mind")
        await until_ordered(scene, lambda plan: not plan.requests)
        with pytest.raises(RequestAborted):
            await generation.text()
        await turns(10)
        assert pool.entries["chat"].requests == {}


@on_virtual_time
async def test_setting_abort_loading_stops_the_load_at_its_next_step() -> None:
    scene = Scene({"chat": 1000}, step_s=1.0)
    async with scene.pool as pool:
        loading = asyncio.create_task(pool.load("chat"))
        await asyncio.sleep(3.0)
        pool.entries["chat"].abort_loading = True
        with pytest.raises(LoadCancelled):
            await loading
        assert scene.engine.active_bytes == 0
        assert not pool.entries["chat"].abort_loading


@on_virtual_time
async def test_last_used_is_now_while_a_model_has_requests_and_their_end_afterwards() -> None:
    scene = Scene({"chat": 100}, step_s=1.0)
    async with scene.pool as pool:
        entry = pool.entries["chat"]
        assert entry.last_used is None
        generation = pool.generate("chat", prompt="hi")
        await until_decoding(generation)
        assert entry.last_used == scene.clock()
        await generation.text()
        await turns()
        ended_s = scene.clock()
        await asyncio.sleep(100)
        assert entry.last_used == pytest.approx(ended_s)


@on_virtual_time
async def test_pins_and_unpins_are_told_once() -> None:
    scene = Scene({"chat": 100}, pinned=("chat",))
    async with scene.pool as pool:
        assert pool.entries["chat"].pinned
        pool.pin("chat")
        pool.unpin("chat")
        pool.unpin("chat")
    assert [event.event for event in scene.named(EventName.PINNED, EventName.UNPINNED)] == [EventName.UNPINNED]


@on_virtual_time
async def test_nothing_new_is_taken_once_it_drains_and_what_is_there_is_served() -> None:
    scene = Scene({"chat": 100})
    async with scene.pool as pool:
        generation = pool.generate("chat", prompt="hi")
        pool.stop_admitting()
        with pytest.raises(ShuttingDown):
            pool.generate("chat", prompt="hi")
        with pytest.raises(ShuttingDown):
            await pool.load("chat")
        await pool.drain(10.0)
        assert await generation.text() == EIGHT


@on_virtual_time
async def test_a_request_to_a_resident_model_does_not_wait_behind_a_load() -> None:
    scene = Scene({"chat": 100, "huge": 10_000}, step_s=1.0)
    async with scene.pool as pool:
        await pool.load("chat")
        loading = asyncio.create_task(pool.load("huge"))
        await asyncio.sleep(3.0)
        assert await pool.generate("chat", prompt="hi").text() == EIGHT
        assert scene.states["huge"] == "loading"
        await loading


@on_virtual_time
async def test_without_limits_a_load_always_fits() -> None:
    scene = Scene({"a": 30_000, "b": 30_000, "c": 30_000}, slice_bytes=1 << 34)
    async with scene.pool as pool:
        await asyncio.gather(pool.load("a"), pool.load("b"), pool.load("c"))
        assert scene.engine.loaded == {"a", "b", "c"}


@on_virtual_time
async def test_what_can_never_fit_is_refused_before_anything_is_evicted() -> None:
    scene = Scene({"chat": 100, "huge": 5000})
    async with scene.pool as pool:
        enforcer = scene.enforcer(1000)
        enforcer.start()
        await pool.load("chat")
        with pytest.raises(DoesNotFit) as raised:
            await pool.load("huge")
        assert raised.value.details["need_bytes"] == 5000 * MIB
        assert raised.value.details["limit_bytes"] == 1000 * MIB
        assert raised.value.details["binding"] == "max_memory"
        assert scene.states == {"chat": "loaded", "huge": "unloaded"}
        await enforcer.stop()
