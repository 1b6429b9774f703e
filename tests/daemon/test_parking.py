"""Parked requests: their memory goes, their tokens stay, they come back in their turn, and each ends exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from omlxd.core.errors import Busy, DoesNotFit, LoadCancelled, PrefillMemoryExceeded, RequestAborted, ShuttingDown
from omlxd.core.events import EventName
from omlxd.core.graceful import PARKED_ENOUGH
from omlxd.core.memory import Policy
from omlxd.core.snapshot import RequestSnapshot
from omlxd.core.states import EntryState, FinishReason, RequestState
from omlxd.daemon.monitor import MemoryMonitor
from omlxd.daemon.pool import EnginePool
from omlxd.daemon.refusals import aborted, cancelled
from omlxd.daemon.request import Generation
from omlxd.daemon.waits import request_waits
from omlxd.engine.orders import MIB
from tests.daemon.test_admission import TOKEN, orders, scene_of, start
from tests.fakes.clock import on_virtual_time, run
from tests.fakes.engine import FakeCodec
from tests.fakes.pools import Scene, turns, until, until_decoding

BLOCK = 256 * TOKEN


def words(count: int) -> str:
    return "".join(f"tok{at} " for at in range(count))


async def blocked(scene: Scene) -> None:
    """Let nobody in at the door from now on: other programs hold the machine's memory."""
    scene.engine.system_available_bytes = 0
    await turns()


def unblock(scene: Scene) -> None:
    scene.engine.system_available_bytes = 4000 * MIB
    scene.pool.door.wake()


def guarded(scene: Scene, max_mib: float = 500, **options: Any) -> None:
    scene.enforcer(max_mib, hard_mib=max_mib + 20, policy=Policy.GRACEFUL, min_available=1024 * MIB, **options).start()


async def parked(pool: EnginePool, generation: Generation) -> None:
    assert await pool.levers.park(generation.id, "a test asks for it")
    assert generation.state is RequestState.PARKED


async def parked_for_now(scene: Scene, generation: Generation) -> None:
    """Parked, and kept from coming back until `unblock`."""
    await blocked(scene)
    await parked(scene.pool, generation)


async def evict(pool: EnginePool, decision: str | None = None) -> None:
    """Somebody needs the memory of the model `a`."""
    async with pool.lock:
        await pool.levers.evict("a", aborted("a", "somebody needs its memory", decision))


@on_virtual_time
async def test_a_parked_request_frees_its_memory_and_its_caller_sees_a_pause_only() -> None:
    scene = scene_of({"a": 100})
    async with scene.pool as pool:
        guarded(scene)
        generation = start(pool, "a", 300, max_tokens=50)
        await until(lambda: generation.generated_tokens > 5)
        promised_bytes = pool.ledger.committed_bytes
        await parked_for_now(scene, generation)
        had = generation.generated_tokens
        assert scene.engine.active_bytes == pool.ledger.committed_bytes == 100 * MIB
        assert (generation.prefilled_tokens, generation.generated) == (0, list(range(had)))
        unblock(scene)
        assert await generation.text() == words(50)
        assert (generation.finish_reason, generation.generated_tokens) == (FinishReason.LENGTH, 50)
        (order,) = orders(scene, "r1.2")
        assert order.generated == tuple(range(had))
        (event,) = scene.named(EventName.REQUEST_PARKED)
        assert event.fields["promised_bytes"] == promised_bytes - 100 * MIB
        assert (event.fields["generated_tokens"], event.fields["parks"]) == (had, 1)
        assert event.fields["reason"] == "a test asks for it"
        (back,) = scene.named(EventName.REQUEST_RESUMED)
        assert (back.fields["generated_tokens"], back.fields["parks"]) == (had, 1)
        assert back.fields["parked_s"] >= 0
        assert len(scene.named(EventName.REQUEST_STARTED)) == len(scene.named(EventName.REQUEST_FINISHED)) == 1


@on_virtual_time
async def test_tokens_that_are_on_their_way_when_it_is_parked_are_told_and_kept() -> None:
    scene = Scene({"a": 100}, drive="manual", answer_tokens=None)
    async with scene.pool as pool:
        generation = pool.generate("a", tokens=[1, 2, 3], max_tokens=20)
        while generation.generated_tokens < 3:
            scene.engine.step()
            await turns()
        parking = asyncio.create_task(pool.levers.park(generation.id, "a test asks for it"))
        scene.engine._post, post = None, scene.engine._post  # what the engine says now arrives later
        scene.engine.step()
        assert generation.generated_tokens == 3
        scene.engine._post = post
        await turns()
        while not parking.done():
            scene.engine.step()
            await turns()
        assert parking.result()
        assert generation.generated_tokens == 4
        while not generation.ended:
            scene.engine.step()
            await turns()
        assert await generation.text() == words(20)


@on_virtual_time
async def test_one_that_finishes_while_it_is_being_parked_has_finished() -> None:
    scene = Scene({"a": 100}, drive="manual", answer_tokens=4)
    async with scene.pool as pool:
        generation = pool.generate("a", tokens=[1, 2, 3])
        while generation.generated_tokens < 3:
            scene.engine.step()
            await turns()
        scene.engine.step()  # its last token, which the loop has not heard of
        assert not await pool.levers.park(generation.id, "too late")
        assert await generation.text() == words(4)
        assert scene.named(EventName.REQUEST_PARKED) == []


@on_virtual_time
async def test_what_the_engine_does_not_have_is_not_parked() -> None:
    scene = scene_of({"a": 100})
    async with scene.pool as pool:
        guarded(scene)
        generation = start(pool, "a", 300)
        assert not await pool.levers.park(generation.id, "it waits for its model")
        await until_decoding(generation)
        await parked_for_now(scene, generation)
        assert not await pool.levers.park(generation.id, "again")
        assert not await pool.levers.park("r99", "there is none")
        assert generation.parks == 1


@on_virtual_time
async def test_a_parked_request_comes_back_before_younger_ones_of_its_model() -> None:
    scene = scene_of({"a": 100, "b": 100})
    async with scene.pool as pool:
        guarded(scene)
        old, other = start(pool, "a", 300, max_tokens=30), start(pool, "b", 10, max_tokens=500)
        await asyncio.gather(until_decoding(old), until_decoding(other))
        await blocked(scene)
        young = start(pool, "a", 10, max_tokens=5)
        await turns()
        parking = asyncio.create_task(pool.levers.park(old.id, "a test asks for it"))
        younger = start(pool, "a", 10, max_tokens=5)
        assert await parking
        unblock(scene)
        await until(lambda: young.ended and younger.ended)
        back = [event.request for event in scene.named(EventName.REQUEST_RESUMED, EventName.REQUEST_STARTED)]
        assert back == [old.id, other.id, old.id, young.id, younger.id]
        assert await old.text() == words(30)


@on_virtual_time
async def test_one_parked_in_its_prompt_begins_its_prompt_again() -> None:
    scene = scene_of({"a": 100}, step_s=0.1)
    async with scene.pool as pool:
        guarded(scene)
        generation = start(pool, "a", 2000, max_tokens=5)
        await until(lambda: generation.prefilled_tokens >= 512)
        await parked_for_now(scene, generation)
        assert generation.prefilled_tokens == 0
        unblock(scene)
        assert await generation.text() == words(5)
        assert [event.fields["generated_tokens"] for event in scene.named(EventName.REQUEST_RESUMED)] == [0]


@on_virtual_time
async def test_it_comes_back_only_when_prompt_and_answer_and_a_block_fit() -> None:
    scene = scene_of({"a": 100, "b": 100}, pinned=("b",))
    async with scene.pool as pool:
        guarded(scene, 200 + 5 * 16)
        generation = start(pool, "a", 200, max_tokens=500)
        await until(lambda: generation.generated_tokens >= 100)
        await pool.load("b")
        await parked(pool, generation)
        pool.ledger.reserve_weights("b", 140 * MIB)  # leaves 40 MiB: 32 for its prompt and a block, 48 with its answer
        await asyncio.sleep(5.0)
        assert generation.state is RequestState.PARKED
        pool.ledger.reserve_weights("b", 100 * MIB)
        assert await generation.text() == words(500)
        assert scene.engine.peak <= (200 + 5 * 16) * MIB


@on_virtual_time
async def test_one_that_can_never_go_on_ends_well_with_the_text_it_has() -> None:
    scene = scene_of({"a": 100})
    async with scene.pool as pool:
        enforcer = scene.enforcer(500, policy=Policy.GRACEFUL, min_available=1024 * MIB)
        enforcer.start()
        generation = start(pool, "a", 1500, max_tokens=500)
        await until(lambda: generation.generated_tokens > 10)
        await parked_for_now(scene, generation)
        had = generation.generated_tokens
        enforcer.max_bytes = 150 * MIB
        generation.ran_under = pool.limits  # as if it had outgrown these
        unblock(scene)
        assert await generation.text() == words(had)
        assert generation.finish_reason is FinishReason.LENGTH
        (event,) = scene.named(EventName.REQUEST_FINISHED)
        assert event.fields["reason"].startswith("going on takes its text so far as part of the prompt, and a prompt")
        assert "more than" in event.fields["reason"]


@on_virtual_time
async def test_one_that_can_never_go_on_and_has_no_text_is_refused_like_a_new_one() -> None:
    scene = scene_of({"a": 100}, step_s=0.1)
    async with scene.pool as pool:
        enforcer = scene.enforcer(500, policy=Policy.GRACEFUL, min_available=1024 * MIB)
        enforcer.start()
        generation = start(pool, "a", 1500)
        await until(lambda: generation.prefilled_tokens > 0)
        await parked_for_now(scene, generation)
        enforcer.max_bytes = 150 * MIB
        generation.ran_under = pool.limits  # as if it had outgrown these
        unblock(scene)
        with pytest.raises(PrefillMemoryExceeded):
            await generation.text()


@on_virtual_time
async def test_after_the_park_deadline_it_ends_well_with_the_text_it_has() -> None:
    scene = scene_of({"a": 100}, park_deadline_s=40.0, load_wait_s=5.0)
    async with scene.pool as pool:
        guarded(scene)
        generation = start(pool, "a", 300, max_tokens=500)
        await until(lambda: generation.generated_tokens > 10)
        await parked_for_now(scene, generation)
        had, parked_s = generation.generated_tokens, scene.clock()
        assert await generation.text() == words(had)
        assert scene.clock() - parked_s == pytest.approx(40.0)
        assert len(scene.named(EventName.REQUEST_WAITING)) == 2  # for its model, and at the door as long as it takes
        assert generation.finish_reason is FinishReason.LENGTH
        (event,) = scene.named(EventName.REQUEST_FINISHED)
        assert "parked for 40 s" in event.fields["reason"]
        assert pool.generations == ()


@on_virtual_time
async def test_after_the_park_deadline_one_without_text_ends_in_busy() -> None:
    scene = scene_of({"a": 100}, park_deadline_s=40.0, step_s=0.1)
    async with scene.pool as pool:
        guarded(scene)
        generation = start(pool, "a", 1500)
        await until(lambda: generation.prefilled_tokens > 0)
        await parked_for_now(scene, generation)
        with pytest.raises(Busy, match="`park_deadline`"):
            await generation.text()


@on_virtual_time
async def test_aborted_left_or_closed_while_parked_it_ends_once_and_leaves_nothing() -> None:
    scene = scene_of({"a": 100})
    async with scene.pool as pool:
        guarded(scene)
        generations = [start(pool, "a", 300) for _ in range(3)]
        await asyncio.gather(*(until_decoding(each) for each in generations))
        await blocked(scene)
        for each in generations:
            await parked(pool, each)
        first, left, last = generations
        assert pool.abort(first.id, "a test asks for it")
        with pytest.raises(RequestAborted, match="a test asks"):
            await first.text()
        await left.aclose()
        await turns(20)
        assert pool.generations == (last,)
        assert list(pool.entries["a"].requests) == [last.id]
    with pytest.raises(ShuttingDown):
        await last.text()
    assert len(scene.named(EventName.REQUEST_ABORTED)) == 2
    assert pool.ledger.requests("a") == 0


@on_virtual_time
async def test_one_that_is_aborted_while_it_is_being_parked_is_not_parked() -> None:
    scene = scene_of({"a": 100})
    async with scene.pool as pool:
        guarded(scene)
        generation = start(pool, "a", 300)
        await until_decoding(generation)
        parking = asyncio.create_task(pool.levers.park(generation.id, "a test asks for it"))
        await asyncio.sleep(0)
        assert pool.abort(generation.id, "its client went away")
        assert not await parking
        assert scene.named(EventName.REQUEST_PARKED) == []
        assert len(scene.named(EventName.REQUEST_ABORTED)) == 1
        await turns(20)
        assert pool.ledger.requests("a") == 0


@on_virtual_time
async def test_a_daemon_that_drains_still_serves_what_is_parked() -> None:
    scene = scene_of({"a": 100})
    async with scene.pool as pool:
        guarded(scene)
        generation = start(pool, "a", 300, max_tokens=50)
        await until_decoding(generation)
        await parked_for_now(scene, generation)
        pool.stop_admitting()
        draining = asyncio.create_task(pool.drain(60.0))
        await asyncio.sleep(1.0)
        unblock(scene)
        assert await generation.text() == words(50)
        await draining


@on_virtual_time
async def test_unload_now_ends_what_is_parked_and_a_plain_unload_serves_it() -> None:
    scene = scene_of({"a": 100})
    async with scene.pool as pool:
        guarded(scene)
        for now in (True, False):
            generation = start(pool, "a", 300, max_tokens=50)
            await until_decoding(generation)
            await parked_for_now(scene, generation)
            unloading = asyncio.create_task(pool.unload("a", now=now))
            await turns()
            unblock(scene)
            await unloading
            if now:
                with pytest.raises(RequestAborted, match="it was unloaded"):
                    await generation.text()
            else:
                assert await generation.text() == words(50)
        assert len(scene.named(EventName.LOAD_FINISHED)) == 2


@on_virtual_time
async def test_evicted_under_graceful_its_requests_are_parked_and_load_it_again() -> None:
    scene = scene_of({"a": 100})
    async with scene.pool as pool:
        guarded(scene)
        generation = start(pool, "a", 300, max_tokens=50)
        await until_decoding(generation)
        await evict(pool, pool.decisions.begin())
        assert generation.state is RequestState.PARKED
        assert await generation.text() == words(50)
        assert len(scene.named(EventName.LOAD_FINISHED)) == 2
        (event,) = scene.named(EventName.REQUEST_PARKED)
        assert event.decision == "d1"


@on_virtual_time
async def test_r6_evicted_under_reference_what_has_begun_ends() -> None:
    scene = scene_of({"a": 100})
    async with scene.pool as pool:
        scene.enforcer(500, policy=Policy.REFERENCE).start()
        generation = start(pool, "a", 300, max_tokens=50)
        await until_decoding(generation)
        await evict(pool)
        with pytest.raises(RequestAborted):
            await generation.text()


@on_virtual_time
async def test_a_parked_request_waits_on_when_the_load_of_its_model_finds_everybody_busy() -> None:
    scene = scene_of({"a": 100, "b": 100}, load_wait_s=5.0)
    async with scene.pool as pool:
        guarded(scene, 250)
        generation = start(pool, "a", 10, max_tokens=50)
        await until_decoding(generation)
        async with pool.lock:
            await pool.levers.evict("a", aborted("a", "somebody needs its memory"))
            pool.ledger.reserve_weights("b", 200 * MIB)
        await asyncio.sleep(30.0)
        assert generation.state is RequestState.PARKED
        assert len(scene.named(EventName.LOAD_FAILED)) >= 2
        pool.ledger.release_weights("b")
        assert await generation.text() == words(50)


@on_virtual_time
async def test_a_parked_request_asks_again_when_the_load_of_its_model_had_to_make_way_but_not_against_a_user() -> None:
    scene = scene_of({"a": 100}, step_s=1.0)
    async with scene.pool as pool:
        guarded(scene)
        generation = start(pool, "a", 10, max_tokens=50)
        await until_decoding(generation)
        for decision in ("d1", None):
            await evict(pool)
            await until(lambda: scene.states == {"a": "loading"})
            await pool.levers.cancel_load("a", cancelled("a", "somebody needs its memory", decision))
            if decision is not None:
                await until(lambda: generation.state is RequestState.DECODE)
        with pytest.raises(LoadCancelled):
            await generation.text()


@on_virtual_time
async def test_the_snapshot_names_what_runs_oldest_first_and_status_what_is_parked() -> None:
    scene = scene_of({"a": 100})
    async with scene.pool as pool:
        guarded(scene)
        first, second, third = generations = [start(pool, "a", length) for length in (300, 1000, 10)]
        await asyncio.gather(*(until_decoding(each) for each in generations))
        (entry,) = pool.snapshot(scene.engine.read()).entries
        frees_bytes = pool.ledger.frees_bytes("a")
        assert entry.requests == tuple(RequestSnapshot(f"r{at}", at, frees_bytes[f"r{at}"]) for at in (1, 2, 3))
        assert frees_bytes["r2"] > frees_bytes["r1"] == frees_bytes["r3"] > 0  # rows are as long as the longest
        await parked_for_now(scene, second)
        (entry,) = pool.snapshot(scene.engine.read()).entries
        assert [each.request for each in entry.requests] == ["r1", "r3"]
        assert (entry.running, entry.waiting, entry.leases) == (2, 1, 3)
        monitor = MemoryMonitor(pool)
        view = monitor.model("a")
        assert (view.running, view.waiting, view.parked) == (2, 0, 1)
        assert [(each.state, each.parks) for each in monitor.requests()][1] == (RequestState.PARKED, 1)
        unblock(scene)
        await until(lambda: second.state is RequestState.DECODE)
        (entry,) = pool.snapshot(scene.engine.read()).entries
        assert [each.parks for each in entry.requests] == [0, 1, 0]
        assert monitor.model("a").parked == 0
        for each in (first, second, third):
            await each.aclose()


@on_virtual_time
async def test_speed_does_not_count_the_pause() -> None:
    scene = scene_of({"a": 100}, step_s=0.1)
    async with scene.pool as pool:
        guarded(scene)
        generation = start(pool, "a", 10, max_tokens=40)
        await until(lambda: generation.generated_tokens > 10)
        before = generation.tokens_per_s
        await parked_for_now(scene, generation)
        await asyncio.sleep(100.0)
        unblock(scene)
        await generation.text()
        assert before is not None
        assert generation.tokens_per_s == pytest.approx(before, rel=0.1)
        assert scene.states == {"a": EntryState.LOADED.value}


@pytest.mark.parametrize(("tokens", "step_s", "told"), [(3, 0.1, False), (20, 0.001, False), (20, 0.1, True)])
def test_the_speed_of_a_short_answer_is_not_told(tokens: int, step_s: float, told: bool) -> None:
    run(_a_speed(tokens, step_s, told))


async def _a_speed(tokens: int, step_s: float, told: bool) -> None:
    scene = scene_of({"a": 100}, step_s=step_s)
    async with scene.pool as pool:
        guarded(scene)
        generation = start(pool, "a", 10, max_tokens=tokens)
        await generation.text()
        assert generation.generated_tokens == tokens
        assert (generation.tokens_per_s is not None) is told


@on_virtual_time
async def test_for_the_oldests_next_block_the_newest_is_parked_and_both_answers_are_whole() -> None:
    scene = scene_of({"a": 100})
    async with scene.pool as pool:
        guarded(scene, 100 + 6 * 16)
        old, new = start(pool, "a", 200, max_tokens=600), start(pool, "a", 200, max_tokens=600)
        assert await asyncio.gather(old.text(), new.text()) == [words(600), words(600)]
        assert (old.parks, new.parks) == (0, 1)
        assert scene.engine.peak <= (100 + 6 * 16) * MIB
        (decision,) = scene.named(EventName.DECISION)
        assert (decision.fields["action"], decision.fields["requests"]) == ("park", [new.id])


@on_virtual_time
async def test_a_block_past_the_hard_limit_that_nobody_can_give_ends_the_request_well() -> None:
    scene = scene_of({"a": 100})
    async with scene.pool as pool:
        scene.enforcer(0, hard_mib=200, policy=Policy.GRACEFUL).start()
        generation = start(pool, "a", 100)
        text = await generation.text()
        assert text == words(generation.generated_tokens)
        assert (generation.finish_reason, generation.generated_tokens > 1000) == (FinishReason.LENGTH, True)
        assert scene.engine.peak <= 200 * MIB
        await until(lambda: bool(scene.named(EventName.DECISION)))
        (decision,) = scene.named(EventName.DECISION)
        assert (decision.fields["action"], decision.fields["requests"]) == ("cut_short", [generation.id])
        (event,) = scene.named(EventName.REQUEST_FINISHED)
        assert event.decision == decision.decision
        assert "would pass the hard limit" in event.fields["reason"]


class HoldingCodec(FakeCodec):
    """One that holds something back until it is asked for the rest."""

    def held_back(self, generated: Sequence[int], stop: Sequence[str]) -> str:
        return f"and {len(generated)} held back{''.join(stop)}"


@on_virtual_time
async def test_who_ends_early_gets_what_was_held_back_too() -> None:
    scene = scene_of({"a": 100}, park_deadline_s=1.0)
    async with scene.pool as pool:
        guarded(scene)
        await pool.load("a")
        scene.engine._codecs["a"] = HoldingCodec()
        generation = pool.generate("a", tokens=[1] * 300, max_tokens=500, stop="!")
        await until(lambda: generation.generated_tokens > 10)
        await parked_for_now(scene, generation)
        had = generation.generated_tokens
        assert await generation.text() == f"{words(had)}and {had} held back!"
        assert generation.generated_tokens == had


@on_virtual_time
async def test_the_next_block_of_what_runs_comes_before_everybody_at_the_door() -> None:
    scene = scene_of({"a": 100, "b": 90, "c": 10}, answer_tokens=400)
    async with scene.pool as pool:
        guarded(scene, 200 + 48 + 40)  # for the block (16 MiB) or for the newcomer (32 MiB), not for both
        await pool.load("b")
        await pool.load("c")
        running = start(pool, "a", 440, max_tokens=250)  # one block more
        await until_decoding(running)
        pool.ledger.reserve_weights("b", 200 * MIB)  # nobody gets anything for now
        async with pool.lock:
            newcomer = start(pool, "b", 10, max_tokens=100)
            await turns()
            await until(lambda: "a" in pool.growth.waiting)
            pool.ledger.reserve_weights("b", 90 * MIB)
            late = start(pool, "c", 10, max_tokens=100)
            await turns(20)
            assert pool.ledger.requests("b") == pool.ledger.requests("c") == 0
        assert await asyncio.gather(*(each.text() for each in (running, newcomer, late))) == [
            words(250),
            words(100),
            words(100),
        ]
        assert scene.named(EventName.DECISION, EventName.REQUEST_PARKED) == []  # nobody had to give way to anybody
        assert scene.engine.peak <= (200 + 48 + 40) * MIB


@on_virtual_time
async def test_one_that_takes_more_than_anybody_knows_is_not_parked_and_run_again_for_ever() -> None:
    scene = Scene({"a": 100}, kv_bytes_per_token=MIB, answer_tokens=None, step_s=0.01, park_deadline_s=60.0)
    async with scene.pool as pool:
        guarded(scene, 150)  # which its KV cache passes with its 51st token; nothing is predicted
        generation = pool.generate("a", tokens=[1] * 20, max_tokens=500)
        text = await generation.text()
        assert (generation.finish_reason, text) == (FinishReason.LENGTH, words(generation.generated_tokens))
        assert generation.generated_tokens >= 30
        assert 1 < generation.parks < 20


@on_virtual_time
async def test_one_that_was_parked_too_often_comes_back_when_nobody_else_runs() -> None:
    scene = scene_of({"a": 100, "b": 100})
    async with scene.pool as pool:
        guarded(scene)
        other = start(pool, "b", 300, max_tokens=400)
        often = start(pool, "a", 300, max_tokens=200)
        for _ in range(PARKED_ENOUGH):
            had = often.generated_tokens
            await until(lambda had=had: often.generated_tokens > had)
            await parked(pool, often)
        await turns()
        assert not other.ended
        assert await often.text() == words(200)
        assert other.ended
        waits = [event.fields for event in scene.named(EventName.REQUEST_WAITING) if event.request == often.id]
        assert "comes back when nobody else runs" in waits[-1]["reason"]
        assert waits[-1]["blockers"] == ["b"]


@pytest.mark.parametrize("tokens_before", [0, 20], ids=["in prefill", "in decode"])
def test_a_limit_that_is_too_low_for_a_moment_ends_nobody(tokens_before: int) -> None:
    run(_a_dip_of_the_limit(tokens_before))


async def _a_dip_of_the_limit(tokens_before: int) -> None:
    scene = scene_of({"a": 100}, step_s=0.1)
    async with scene.pool as pool:
        enforcer = scene.enforcer(500, hard_mib=520, policy=Policy.GRACEFUL)
        enforcer.start()
        generation = start(pool, "a", 3000, max_tokens=200)
        await until(lambda: generation.prefilled_tokens > 0 and generation.generated_tokens >= tokens_before)
        enforcer.max_bytes = 101 * MIB
        await until(lambda: generation.state is RequestState.PARKED)
        await asyncio.sleep(100)
        assert generation.state is RequestState.PARKED
        enforcer.max_bytes = 500 * MIB
        assert await generation.text() == words(200)
        assert (generation.finish_reason, generation.generated_tokens) == (FinishReason.LENGTH, 200)


@on_virtual_time
async def test_a_limit_that_stays_too_low_ends_it_with_its_text_at_the_park_deadline() -> None:
    scene = scene_of({"a": 100})
    async with scene.pool as pool:
        enforcer = scene.enforcer(500, hard_mib=520, policy=Policy.GRACEFUL)
        enforcer.start()
        generation = start(pool, "a", 3000, max_tokens=200)
        await until(lambda: generation.generated_tokens > 20)
        enforcer.max_bytes = 101 * MIB
        parked_at_s = pool.clock()
        text = await generation.text()
        assert text == words(generation.generated_tokens)
        assert 20 < generation.generated_tokens < 200
        assert generation.finish_reason is FinishReason.LENGTH
        assert pool.clock() - parked_at_s == pytest.approx(300, abs=2)


@pytest.mark.parametrize("pinned", [("b",), ("a", "b")], ids=["its model goes", "its model stays"])
@pytest.mark.parametrize("way_out", ["unpin", "unload"])
def test_one_that_a_pinned_model_keeps_out_says_so_and_goes_on_when_that_may_go(
    pinned: tuple[str, ...], way_out: str
) -> None:
    run(_a_pin_in_the_way(pinned, way_out))


async def _a_pin_in_the_way(pinned: tuple[str, ...], way_out: str) -> None:
    scene = scene_of({"a": 100, "b": 100}, pinned=pinned)
    async with scene.pool as pool:
        generation = await _kept_out_by_a_pin(scene)
        told = request_waits(pool, generation)
        assert told is not None
        assert told.startswith("waiting for `b` to be unpinned, or for a higher limit: ")
        assert told.endswith("more than the soft limit 150 MiB (max_memory)")
        event = scene.named(EventName.REQUEST_WAITING)[-1]
        assert event.request == generation.id
        assert "more than the soft limit 150 MiB (max_memory); unpin `b`" in event.fields["reason"]
        await asyncio.sleep(100)
        assert generation.state is RequestState.PARKED
        if way_out == "unpin":
            pool.unpin("b")
        else:
            await pool.unload("b")
        assert await generation.text() == words(200)
        assert generation.parks == 1


@on_virtual_time
async def test_one_that_a_pinned_model_keeps_out_to_the_end_is_told_who_it_was() -> None:
    scene = scene_of({"a": 100, "b": 100}, pinned=("b",), park_deadline_s=40.0)
    async with scene.pool as pool:
        generation = await _kept_out_by_a_pin(scene)
        assert await generation.text() == words(generation.generated_tokens)
        assert generation.finish_reason is FinishReason.LENGTH
        (event,) = scene.named(EventName.REQUEST_FINISHED)
        assert "parked for 40 s and did not fit again (`park_deadline`): `a` needs" in event.fields["reason"]
        assert "pinned models hold 100 MiB (`b`)" in event.fields["reason"]
        with pytest.raises(DoesNotFit) as raised:
            await start(pool, "a", 300).text()
        assert raised.value.hint == "unpin `b`, or raise the limit with `omlxd limit`"


async def _kept_out_by_a_pin(scene: Scene) -> Generation:
    """A request to `a`, parked when the limit was lowered under it: beside the pinned `b` it does not fit again."""
    enforcer = scene.enforcer(500, hard_mib=520, policy=Policy.GRACEFUL)
    enforcer.start()
    await scene.pool.load("b")
    generation = start(scene.pool, "a", 300, max_tokens=200)
    await until(lambda: generation.generated_tokens > 20)
    enforcer.max_bytes = 150 * MIB
    await until(lambda: generation.waits_for is not None)
    assert generation.state is RequestState.PARKED
    return generation


@pytest.mark.parametrize("parked_s", [0.0, 5.0], ids=["parked just now", "parked for a while"])
def test_a_drain_does_not_wait_for_what_the_lowered_limit_never_lets_go_on(parked_s: float) -> None:
    run(_a_drain_under_a_low_limit(parked_s))


async def _a_drain_under_a_low_limit(parked_s: float) -> None:
    scene = scene_of({"a": 100})
    async with scene.pool as pool:
        enforcer = scene.enforcer(500, hard_mib=520, policy=Policy.GRACEFUL)
        enforcer.start()
        generation = start(pool, "a", 3000, max_tokens=200)
        await until(lambda: generation.generated_tokens > 20)
        enforcer.max_bytes = 50 * MIB  # less than its model
        await until(lambda: generation.state is RequestState.PARKED)
        await asyncio.sleep(parked_s)
        pool.stop_admitting()
        began_s = pool.clock()
        await pool.drain(30.0)
        assert pool.clock() - began_s < 5.0
        assert await generation.text() == words(generation.generated_tokens)
        assert generation.finish_reason is FinishReason.LENGTH
        (event,) = scene.named(EventName.REQUEST_FINISHED)
        assert "going on takes its text so far" in event.fields["reason"]


@on_virtual_time
async def test_what_stands_in_the_engines_line_waits_in_the_eyes_of_the_policy() -> None:
    scene = scene_of({"chat": 200}, max_batch=1)
    async with scene.pool as pool:
        scene.enforcer(600, hard_mib=900, policy=Policy.GRACEFUL).start()
        await pool.load("chat")
        runs = start(pool, "chat", 100)
        await until_decoding(runs)
        stands = start(pool, "chat", 100)
        await until(lambda: stands.id in pool.entries["chat"].in_engine)
        (seen,) = pool.snapshot(scene.engine.read()).entries
        assert [(each.request, each.begun) for each in seen.requests] == [(runs.id, True), (stands.id, False)]
        assert (seen.running, seen.waiting, seen.leases) == (1, 1, 2)
