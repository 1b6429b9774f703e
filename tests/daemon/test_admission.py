"""The door (R11, R12): reserve, shrink, evict, wait in turn, refuse; with a fake engine and invented costs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from omlxd.core.errors import Busy, PrefillMemoryExceeded
from omlxd.core.events import EventName
from omlxd.core.states import Level, RequestState
from omlxd.daemon.admission import MAX_OVERTAKES
from omlxd.daemon.pool import EnginePool
from omlxd.daemon.request import Generation
from omlxd.engine.orders import MIB, GenerationOrder
from tests.fakes.clock import on_virtual_time
from tests.fakes.costs import FakeCosts
from tests.fakes.pools import Scene, turns, until, until_decoding

TOKEN = 64 * 1024  # so that a block of 256 tokens is 16 MiB


def scene_of(sizes: dict[str, float], *, chunk_token_bytes: int = 0, **options: Any) -> Scene:
    """A pool whose predictions are right: the engine takes what `FakeCosts` says, or less."""
    options = {"kv_bytes_per_token": TOKEN, "answer_tokens": None, "context_length": None, "step_s": 0.001, **options}
    scene = Scene(sizes, costs=FakeCosts(TOKEN, chunk_token_bytes), **options)
    scene.engine.chunk_token_bytes = chunk_token_bytes
    return scene


def start(pool: EnginePool, model: str, prompt_tokens: int, max_tokens: int = 10_000) -> Generation:
    return pool.generate(model, tokens=[1] * prompt_tokens, max_tokens=max_tokens)


def orders(scene: Scene, request: str) -> set[GenerationOrder]:
    return {plan.requests[request] for plan in scene.engine.plans if request in plan.requests}


@on_virtual_time
async def test_r11_a_prompt_that_could_not_run_alone_is_refused_before_it_reaches_the_engine() -> None:
    scene = scene_of({"a": 100})
    async with scene.pool as pool:
        scene.enforcer(200, hard_mib=220).start()
        await pool.load("a")
        with pytest.raises(PrefillMemoryExceeded) as raised:
            await start(pool, "a", 2000).text()
        error = raised.value
        assert (error.http_status, error.code) == (400, "prefill_memory_exceeded")
        assert error.details["binding"] == "max_memory"
        assert error.details["limit_bytes"] == 200 * MIB
        assert error.details["estimated_bytes"] == (100 + 10 * 16) * MIB
        assert "200 MiB (max_memory)" in error.message
        assert all(not plan.requests for plan in scene.engine.plans)
        assert scene.named(EventName.REQUEST_STARTED) == []
        longest = error.details["longest_prompt_tokens"]
        assert str(longest) in (error.hint or "")
        assert await start(pool, "a", longest, max_tokens=1).text() == "tok0 "
        with pytest.raises(PrefillMemoryExceeded):
            await start(pool, "a", longest + 1).text()


@on_virtual_time
async def test_r11_the_hint_raises_the_limit_only_as_far_as_the_machine_goes() -> None:
    scene = scene_of({"a": 100})
    async with scene.pool as pool:
        scene.enforcer(200).start()
        await pool.load("a")
        with pytest.raises(PrefillMemoryExceeded) as raised:
            await start(pool, "a", 2000).text()
        assert (raised.value.hint or "").startswith("raise the limit with `omlxd limit 260M`")


@on_virtual_time
async def test_r11_a_pinned_model_that_is_in_the_way_is_named() -> None:
    scene = scene_of({"a": 100, "p": 100}, pinned=("p",))
    async with scene.pool as pool:
        scene.enforcer(250, hard_mib=270).start()
        await pool.load("a")
        await pool.load("p")
        with pytest.raises(PrefillMemoryExceeded) as raised:
            await start(pool, "a", 700).text()
        assert raised.value.details["binding"] == "pinned"
        assert raised.value.hint == "unpin `p`"
        pool.unpin("p")
        assert await start(pool, "a", 700, max_tokens=1).text() == "tok0 "


@on_virtual_time
async def test_r11_a_prompt_for_an_unloaded_model_whose_costs_are_known_is_refused_without_a_load() -> None:
    scene = scene_of({"a": 100})
    async with scene.pool as pool:
        scene.enforcer(200, hard_mib=220).start()
        await pool.load("a")
        await pool.unload("a")
        with pytest.raises(PrefillMemoryExceeded):
            await start(pool, "a", 2000).text()
        assert len(scene.named(EventName.LOAD_STARTED)) == 1


@on_virtual_time
async def test_without_the_guard_nothing_is_refused_or_kept_waiting_or_bound() -> None:
    scene = scene_of({"a": 100}, chunk_token_bytes=MIB, answer_tokens=3)
    async with scene.pool as pool:
        scene.enforcer(250, hard_mib=260, prefill_memory_guard=False).start()
        await pool.load("a")
        scene.engine.plans.clear()
        assert await start(pool, "a", 2000, max_tokens=3).text() == "tok0 tok1 tok2 "
        assert all(not plan.granted_tokens for plan in scene.engine.plans)
        (order,) = orders(scene, "r1")
        assert order.prefill_chunk_tokens is None


@on_virtual_time
async def test_the_chunk_shrinks_until_its_transient_fits_under_the_hard_limit() -> None:
    scene = scene_of({"a": 100}, chunk_token_bytes=MIB, answer_tokens=3)
    async with scene.pool as pool:
        scene.enforcer(200, hard_mib=240).start()
        await pool.load("a")
        assert (await start(pool, "a", 700).text()).startswith("tok0")
        (order,) = orders(scene, "r1")
        assert order.prefill_chunk_tokens == 64  # 100 + 64 + 64 MiB, where 128 would be 292
        assert scene.engine.peak <= 240 * MIB


@on_virtual_time
async def test_with_no_soft_limit_the_hard_limit_still_binds() -> None:
    scene = scene_of({"a": 100}, answer_tokens=3)
    async with scene.pool as pool:
        scene.enforcer(0, hard_mib=200).start()
        await pool.load("a")
        with pytest.raises(PrefillMemoryExceeded) as raised:
            await start(pool, "a", 2000).text()
        assert raised.value.details["binding"] == "hard_limit"
        assert (await start(pool, "a", 700).text()).startswith("tok0")


@on_virtual_time
async def test_an_idle_model_goes_for_a_prompt_and_the_decision_says_so() -> None:
    scene = scene_of({"a": 100, "idle": 100}, answer_tokens=3)
    async with scene.pool as pool:
        scene.enforcer(250, hard_mib=270).start()
        await pool.load("idle")
        await pool.load("a")
        assert (await start(pool, "a", 1000).text()).startswith("tok0")
        assert scene.states == {"a": "loaded", "idle": "unloaded"}
        (decision,) = scene.named(EventName.DECISION)
        assert (decision.fields["trigger"], decision.fields["victim"]) == ("request", "idle")
        assert decision.fields["for_model"] == "a"


@on_virtual_time
async def test_r12_a_request_waits_for_those_that_run_and_is_not_aborted_half_way() -> None:
    scene = scene_of({"a": 100}, answer_tokens=50)
    async with scene.pool as pool:
        scene.enforcer(200, hard_mib=220).start()
        generations = [start(pool, "a", 500) for _ in range(5)]  # 48 MiB each alone, more as a batch
        texts = await asyncio.gather(*(generation.text() for generation in generations))
        assert len(set(texts)) == 1
        assert scene.engine.peak <= 200 * MIB
        assert scene.named(EventName.REQUEST_ABORTED, EventName.DECISION) == []
        assert scene.named(EventName.REQUEST_WAITING)
        assert pool.ledger.running() == frozenset()


@on_virtual_time
async def test_requests_of_a_model_wait_in_order_and_those_of_another_pass_but_not_for_ever() -> None:
    scene = scene_of({"a": 50, "b": 50}, answer_tokens=20)
    async with scene.pool as pool:
        scene.enforcer(300, hard_mib=320).start()
        await pool.load("a")
        await pool.load("b")
        long = start(pool, "a", 1000)  # 80 MiB
        await until_decoding(long)
        big = start(pool, "b", 2000)  # 144 MiB: not beside it
        behind = start(pool, "b", 10)
        await turns(20)
        assert (big.state, behind.state) == (RequestState.WAITING, RequestState.WAITING)
        passed = 0
        while big.state is RequestState.WAITING and passed < 50:
            small = start(pool, "a", 10)
            passed += 1
            await small.wait_ended(100.0)
        assert big.error is None
        ends = [event.request for event in scene.named(EventName.REQUEST_FINISHED)]
        await asyncio.gather(big.text(), behind.text())
        assert passed <= MAX_OVERTAKES + 2
        assert ends.count(behind.id) == 0, "a later request of the same model passed it"


@on_virtual_time
async def test_two_models_whose_requests_wait_for_each_others_memory_both_get_served() -> None:
    scene = scene_of({"a": 100, "b": 100}, answer_tokens=3)
    async with scene.pool as pool:
        scene.enforcer(250, hard_mib=270).start()
        await pool.load("a")
        await pool.load("b")
        answers = await asyncio.gather(start(pool, "a", 1000).text(), start(pool, "b", 1000).text())
        assert len(set(answers)) == 1
        assert scene.named(EventName.REQUEST_ABORTED) == []


@on_virtual_time
async def test_a_caller_who_leaves_the_queue_frees_its_place_and_holds_nothing() -> None:
    scene = scene_of({"a": 100}, answer_tokens=None)
    async with scene.pool as pool:
        scene.enforcer(200, hard_mib=220).start()
        running = start(pool, "a", 500)
        await until_decoding(running)
        waiting = start(pool, "a", 800)
        await turns(20)
        await waiting.aclose()
        await running.aclose()
        last = start(pool, "a", 800, max_tokens=2)
        assert await last.text() == "tok0 tok1 "
        await turns(20)
        assert pool.ledger.running() == frozenset()
        assert pool.ledger.committed_bytes == 100 * MIB


@on_virtual_time
async def test_a_lower_limit_refuses_who_waits_for_what_can_no_longer_be() -> None:
    scene = scene_of({"a": 100}, answer_tokens=None)
    async with scene.pool as pool:
        enforcer = scene.enforcer(300, hard_mib=400)
        enforcer.start()
        running = start(pool, "a", 500)
        await until_decoding(running)
        waiting = asyncio.create_task(start(pool, "a", 2000).text())
        await turns(20)
        enforcer.max_bytes = 180 * MIB
        with pytest.raises(PrefillMemoryExceeded):
            await waiting
        assert not running.ended
        await running.aclose()


@on_virtual_time
async def test_a_load_counts_before_its_first_byte_and_its_model_can_run_a_request() -> None:
    scene = scene_of({"a": 100}, step_s=0.1)
    async with scene.pool as pool:
        scene.enforcer(200, hard_mib=220).start()
        loading = asyncio.create_task(pool.load("a"))
        await until(lambda: scene.states["a"] == "loading")
        assert pool.ledger.committed_bytes == 100 * MIB
        await loading
        await pool.unload("a")
        assert pool.ledger.committed_bytes == 0
    tight = scene_of({"a": 100})
    async with tight.pool as pool:
        tight.enforcer(110, hard_mib=130).start()
        with pytest.raises(Exception, match="needs 132 MiB"):  # weights, and two blocks of one row
            await pool.load("a")


@on_virtual_time
async def test_two_loads_at_the_same_instant_with_room_for_one_are_both_served() -> None:
    scene = scene_of({"a": 100, "b": 100}, answer_tokens=5)
    async with scene.pool as pool:
        scene.enforcer(150, hard_mib=170).start()
        answers = await asyncio.gather(start(pool, "a", 100).text(), start(pool, "b", 100).text())
        assert len(set(answers)) == 1
        assert scene.engine.peak <= 150 * MIB


@on_virtual_time
async def test_a_newcomer_that_is_larger_than_predicted_goes_and_the_others_stay() -> None:
    scene = scene_of({"a": 100, "b": 100}, answer_tokens=5)
    scene.engine.measured_weights["b"] = 180 * MIB
    async with scene.pool as pool:
        enforcer = scene.enforcer(250, hard_mib=400)
        enforcer.start()
        await pool.load("a")
        with pytest.raises(Busy, match="180 MiB where 100 MiB were predicted"):
            await pool.load("b")
        assert scene.states == {"a": "loaded", "b": "unloaded"}
        (decision,) = scene.named(EventName.DECISION)
        assert (decision.fields["rung"], decision.fields["victim"]) == ("settle", "b")
        assert decision.fields["freed_bytes"] == 180 * MIB
        assert pool.ledger.committed_bytes == 100 * MIB
        await pool.load("b")  # its size is known now, so `a`, which is idle, makes room
        assert scene.states == {"a": "unloaded", "b": "loaded"}


@on_virtual_time
async def test_r9_a_ballast_in_the_process_is_named_and_small_requests_still_pass() -> None:
    scene = scene_of({"a": 100}, answer_tokens=5)
    async with scene.pool as pool:
        enforcer = scene.enforcer(300, hard_mib=1000, poll_interval=0.5)
        enforcer.start()
        await pool.load("a")
        scene.engine.leak_bytes = 500 * MIB
        scene.engine.cache_bytes = 7 * MIB
        await asyncio.sleep(2)
        assert enforcer.level is Level.EXHAUSTED
        assert "500 MiB are unaccounted for" in (enforcer.view().reason or "")
        assert scene.engine.cache_bytes == 0, "what nobody holds was given back first"
        with pytest.raises(Busy, match="not accounted for"):
            await start(pool, "a", 1000).text()
        scene.engine.leak_bytes = 0
        assert (await start(pool, "a", 1000).text()).startswith("tok0")
        await asyncio.sleep(2)
        assert enforcer.level is Level.OK


@on_virtual_time
async def test_r9_a_small_request_beside_a_ballast_is_neither_refused_nor_aborted() -> None:
    scene = Scene({"a": 100}, costs=FakeCosts(1024), answer_tokens=5000, step_s=0.001, context_length=None)
    async with scene.pool as pool:
        enforcer = scene.enforcer(300, hard_mib=1000, poll_interval=0.5)
        enforcer.start()
        await pool.load("a")
        scene.engine.leak_bytes = 500 * MIB
        await asyncio.sleep(2)
        assert enforcer.level is Level.EXHAUSTED
        begun_s = scene.clock()
        assert (await start(pool, "a", 10, max_tokens=3000).text()).startswith("tok0")
        assert scene.clock() - begun_s > 2.0, "several polls saw it run"


@on_virtual_time
async def test_a_promise_that_is_not_allocated_yet_and_a_ballast_add_up() -> None:
    scene = scene_of({"a": 100}, drive="manual")
    async with scene.pool as pool:
        scene.enforcer(400, hard_mib=1000, poll_interval=3600).start()
        loading = asyncio.create_task(pool.load("a"))
        while not loading.done():
            scene.engine.step()
            await turns()
        scene.engine.leak_bytes = 150 * MIB
        first = start(pool, "a", 1000)  # 80 MiB promised, nothing of it allocated
        await turns(20)
        assert first.id in scene.engine.plans[-1].requests
        second = start(pool, "a", 1000)  # as a batch 16 MiB more for both: 100 + 150 + 160 is too much
        await turns(20)
        assert second.id not in scene.engine.plans[-1].requests
        await first.aclose()
        await second.aclose()


@on_virtual_time
async def test_when_the_system_is_short_requests_wait_loads_are_put_off_and_what_runs_goes_on() -> None:
    scene = scene_of({"a": 50, "idle": 50, "c": 50}, answer_tokens=8000)
    async with scene.pool as pool:
        enforcer = scene.enforcer(1000, hard_mib=2000, min_available=1024 * MIB, poll_interval=0.5)
        enforcer.start()
        await pool.load("idle")
        running = start(pool, "a", 10)
        await until_decoding(running)
        scene.engine.system_available_bytes = 100 * MIB
        scene.engine.cache_bytes = 3 * MIB
        await asyncio.sleep(3)
        assert scene.states == {"a": "loaded", "idle": "unloaded", "c": "unloaded"}
        assert enforcer.level is Level.OVER
        assert "(system)" in (enforcer.view().reason or "")
        assert not running.ended
        waiting = start(pool, "a", 10, max_tokens=2)
        with pytest.raises(Busy) as raised:
            await pool.load("c")
        assert raised.value.details["binding"] == "system"
        await asyncio.sleep(1)
        assert waiting.state is RequestState.WAITING
        scene.engine.system_available_bytes = 4096 * MIB
        assert await waiting.text() == "tok0 tok1 "
        await asyncio.sleep(1)
        assert enforcer.level is Level.OK
        await running.aclose()


@on_virtual_time
async def test_a_request_that_the_system_keeps_waiting_ends_in_busy_that_says_so() -> None:
    scene = scene_of({"a": 50}, load_wait_s=20.0)
    async with scene.pool as pool:
        scene.enforcer(1000, min_available=1024 * MIB).start()
        await pool.load("a")
        scene.engine.system_available_bytes = 100 * MIB
        with pytest.raises(Busy) as raised:
            await start(pool, "a", 10).text()
        assert raised.value.details["binding"] == "system"


@on_virtual_time
async def test_a_model_of_which_nothing_is_sure_is_never_refused_on_a_guess() -> None:
    scene = Scene({"a": 100}, costs=FakeCosts(MIB, certain=False), answer_tokens=3, context_length=None)
    async with scene.pool as pool:
        scene.enforcer(200, hard_mib=220).start()
        texts = await asyncio.gather(*(start(pool, "a", 1000).text() for _ in range(2)))
        assert texts == ["tok0 tok1 tok2 "] * 2
        assert {order.prefill_chunk_tokens for order in orders(scene, "r1")} == {16}
