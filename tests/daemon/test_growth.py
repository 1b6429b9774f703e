"""Decode batches grow on blocks that were reserved first; the ladder runs before the allocation."""

from __future__ import annotations

import asyncio

import pytest

from omlxd.core.errors import RequestAborted
from omlxd.core.events import EventName
from omlxd.core.memory import Policy
from omlxd.core.states import Level
from omlxd.engine.orders import MIB
from tests.daemon.test_admission import scene_of, start
from tests.fakes.clock import on_virtual_time
from tests.fakes.pools import turns, until, until_decoding


@on_virtual_time
async def test_grants_stay_ahead_so_that_the_engine_never_stops() -> None:
    scene = scene_of({"a": 100}, answer_tokens=2000)
    async with scene.pool as pool:
        scene.enforcer(500, hard_mib=520).start()
        stopped: list[str] = []
        pool.growth.needs_block = lambda model, length: stopped.append(model)  # type: ignore[method-assign]
        await start(pool, "a", 300).text()
        granted = [plan.granted_tokens["a"] for plan in scene.engine.plans if "a" in plan.granted_tokens]
        assert stopped == []
        assert sorted(set(granted)) == list(range(513, 2562, 256))  # a cache may end 255 tokens behind its last one
        await turns(20)
        assert scene.engine.plans[-1].granted_tokens == {}
        assert pool.ledger.committed_bytes == 100 * MIB


@on_virtual_time
async def test_the_engine_is_told_what_a_step_may_hold_in_passing() -> None:
    scene = scene_of({"a": 100}, chunk_token_bytes=MIB, answer_tokens=10)
    async with scene.pool as pool:
        scene.enforcer(500, hard_mib=900).start()
        await start(pool, "a", 300).text()
        await turns(20)
        assert {plan.transient_bytes for plan in scene.engine.plans if plan.requests} == {256 * MIB}
        assert scene.engine.plans[-1].transient_bytes == 0


@on_virtual_time
async def test_without_the_guard_nothing_is_promised_that_the_engine_would_have_to_leave_room_for() -> None:
    scene = scene_of({"a": 100}, chunk_token_bytes=MIB, answer_tokens=10)
    async with scene.pool as pool:
        scene.enforcer(500, hard_mib=900, prefill_memory_guard=False).start()
        await start(pool, "a", 300).text()
        assert {plan.transient_bytes for plan in scene.engine.plans} == {0}


@on_virtual_time
async def test_short_prompts_that_wait_together_may_share_a_step_until_somebody_takes_the_room() -> None:
    scene = scene_of({"a": 100, "b": 700}, chunk_token_bytes=MIB // 2, answer_tokens=10)
    async with scene.pool as pool:
        scene.enforcer(900, hard_mib=1000).start()
        await pool.load("a")
        await start(pool, "a", 100).text()
        assert all(not plan.group_tokens for plan in scene.engine.plans), "one prompt has nobody to share with"
        requests = [start(pool, "a", 100) for _ in range(4)]
        await turns(20)
        beside_nobody = scene.engine.plans[-1]
        assert beside_nobody.group_tokens == {"a": 1024}
        assert beside_nobody.transient_bytes == 512 * MIB
        load = asyncio.create_task(pool.load("b"))
        await until(lambda: scene.engine.plans[-1].load is not None)
        assert scene.engine.plans[-1].group_tokens.get("a", 0) <= 256, "the plan that brings the load takes it back"
        for request in requests:
            await request.text()
        await load
        await turns(20)
        assert scene.engine.plans[-1].group_tokens == {}


@on_virtual_time
async def test_an_idle_model_goes_for_the_next_block_when_it_is_really_needed() -> None:
    scene = scene_of({"a": 100, "idle": 100}, answer_tokens=1000)
    async with scene.pool as pool:
        scene.enforcer(250, hard_mib=270).start()
        await pool.load("idle")
        assert (await start(pool, "a", 100).text()).startswith("tok0")
        assert scene.states == {"a": "loaded", "idle": "unloaded"}
        (decision,) = scene.named(EventName.DECISION)
        assert (decision.fields["trigger"], decision.fields["victim"]) == ("block", "idle")
        assert "the next block of `a`" in decision.fields["reason"]
        assert scene.engine.peak <= 250 * MIB


@on_virtual_time
async def test_r7_a_block_that_does_not_fit_ends_the_only_models_requests_before_it_is_allocated() -> None:
    scene = scene_of({"a": 100})
    async with scene.pool as pool:
        enforcer = scene.enforcer(200, hard_mib=220, policy=Policy.REFERENCE)
        enforcer.start()
        with pytest.raises(RequestAborted, match=r"next block of `a`'s KV cache \(16\.0 MiB\) would be"):
            await start(pool, "a", 100).text()
        await enforcer.settle()
        (decision,) = scene.named(EventName.DECISION)
        assert (decision.fields["trigger"], decision.fields["action"]) == ("block", "abort_requests")
        assert "next block" in decision.fields["reason"]
        assert scene.engine.peak <= 200 * MIB
        assert scene.states == {"a": "loaded"}
        assert await start(pool, "a", 10, max_tokens=2).text() == "tok0 tok1 "
        assert enforcer.level is Level.OK


@on_virtual_time
async def test_r6_the_least_recently_used_busy_model_goes_for_a_block_of_another() -> None:
    scene = scene_of({"a": 100, "b": 100})
    async with scene.pool as pool:
        enforcer = scene.enforcer(300, hard_mib=320, policy=Policy.REFERENCE)
        enforcer.start()
        first, second = start(pool, "a", 10), start(pool, "b", 10)
        results = await asyncio.gather(first.text(), second.text(), return_exceptions=True)
        assert [type(result) for result in results] == [RequestAborted, RequestAborted]
        await enforcer.settle()
        actions = [event.fields["action"] for event in scene.named(EventName.DECISION)]
        assert actions == ["unload", "abort_requests"]
        assert scene.engine.peak <= 300 * MIB


@on_virtual_time
async def test_r10_pinned_models_keep_growing_when_nothing_can_be_done_but_never_past_the_hard_limit() -> None:
    scene = scene_of({"a": 100, "b": 100}, pinned=("a", "b"))
    async with scene.pool as pool:
        scene.enforcer(260, hard_mib=300, policy=Policy.REFERENCE).start()
        await pool.load("b")
        running = start(pool, "a", 10)
        with pytest.raises(RequestAborted, match="hard limit"):
            await running.text()
        assert scene.states == {"a": "loaded", "b": "loaded"}
        assert 260 * MIB < scene.engine.peak <= 300 * MIB


@on_virtual_time
async def test_with_no_soft_limit_a_block_past_the_hard_limit_is_answered_like_pressure() -> None:
    scene = scene_of({"a": 100})
    async with scene.pool as pool:
        scene.enforcer(0, hard_mib=200, policy=Policy.REFERENCE).start()
        with pytest.raises(RequestAborted, match="hard limit"):
            await start(pool, "a", 100).text()
        assert scene.engine.peak <= 200 * MIB


@on_virtual_time
async def test_a_model_that_stands_still_for_a_block_does_not_stop_the_others() -> None:
    scene = scene_of({"a": 100, "b": 100}, answer_tokens=400)
    async with scene.pool as pool:
        scene.enforcer(400, hard_mib=420).start()
        first, other = start(pool, "a", 440), start(pool, "b", 10)
        await asyncio.gather(until_decoding(first), until_decoding(other))
        async with pool.lock:  # nobody can give way now, so the block has to wait
            pool.ledger.reserve_weights("b", 230 * MIB)
            await until(lambda: "a" in pool.growth.waiting)
            first_stands, other_was = first.generated_tokens, other.generated_tokens
            await until(lambda: other.generated_tokens > other_was + 20)
            assert first.generated_tokens == first_stands == 513 - 440
            pool.ledger.reserve_weights("b", 100 * MIB)
        answer = await first.text()
        assert answer.endswith("tok399 ")
        await other.aclose()
