"""What does not depend on how many models there are and how many requests wait."""

from __future__ import annotations

import asyncio

from omlxd.core.events import Event
from omlxd.core.memory import MemoryReading
from omlxd.core.snapshot import Candidate, Limits
from omlxd.core.wording import named
from omlxd.daemon.decisions import DecisionLog, DecisionRecord
from omlxd.daemon.model_watch import ModelWatch
from omlxd.engine.orders import MIB
from tests.fakes.clock import on_virtual_time
from tests.fakes.pools import Scene, turns, until, until_decoding


@on_virtual_time
async def test_one_more_token_wakes_nobody_who_waits_for_a_change() -> None:
    scene = Scene({"chat": 100}, step_s=1.0, answer_tokens=None)
    async with scene.pool as pool:
        generation = pool.generate("chat", prompt="hi", max_tokens=10)
        await until_decoding(generation)
        change, tokens = pool.change, generation.generated_tokens
        await until(lambda: generation.generated_tokens >= tokens + 5)
        assert not change.is_set()
        assert pool.change is change
        await generation.text()
        assert change.is_set()


@on_virtual_time
async def test_a_decision_looks_only_at_models_that_hold_memory() -> None:
    scene = Scene({"chat": 100, "other": 100, **{f"spare-{number}": 100 for number in range(50)}})
    async with scene.pool as pool:
        assert pool.snapshot(scene.engine.read()).entries == ()
        await pool.load("chat")
        await until_decoding(pool.generate("other", prompt="hi"))
        assert [each.name for each in pool.snapshot(scene.engine.read()).entries] == ["chat", "other"]


@on_virtual_time
async def test_who_waits_for_a_tokenizer_looks_for_it_only_when_the_load_tells() -> None:
    scene = Scene({"chat": 100, "other": 100}, drive="manual", slice_bytes=100 * MIB)
    asked = list[str]()
    codec = scene.engine.codec
    scene.engine.codec = lambda model: asked.append(model) or codec(model)  # type: ignore[method-assign, func-returns-value]
    async with scene.pool as pool:
        waiting = [pool.generate("chat", prompt="hi") for _ in range(10)]
        await until(lambda: pool.loads.in_progress == "chat")
        asked.clear()
        pool.notify()
        await turns()
        assert asked == []
        scene.engine.run_until_idle()
        await until(lambda: pool.entries["chat"].loaded)
        assert {each.prompt_tokens for each in waiting} == {1}


@on_virtual_time
async def test_all_who_wait_for_a_model_are_woken_by_its_own_change_alone() -> None:
    scene = Scene({"chat": 100, "other": 100})
    async with scene.pool as pool:
        entry, watch = pool.entries["chat"], ModelWatch(pool)
        waiting = [asyncio.ensure_future(watch.changed(entry)) for _ in range(3)]
        await turns()
        waiting[0].cancel()  # which leaves the others be
        await pool.load("other")
        await turns()
        assert [each.done() for each in waiting] == [True, False, False]
        entry.draining = frozenset()
        pool.notify()
        await turns()
        assert all(each.done() for each in waiting)
        later = asyncio.ensure_future(watch.changed(entry))
        await turns()
        assert not later.done()
        await watch.close()
        await asyncio.gather(later, return_exceptions=True)
        entry.draining = None


def test_a_record_names_the_first_of_very_many_models_and_those_that_were_chosen() -> None:
    events = list[Event]()
    log = DecisionLog(events.append)
    candidates = [Candidate(f"m{number}", number >= 98, "why", 1, 0.0) for number in range(100)]
    reading = MemoryReading()
    log.add(DecisionRecord("load", "make_room", "unload", "m98", "why", reading, reading, candidates), Limits())
    told = [each["model"] for each in events[0].fields["candidates"]]
    assert told == [*(f"m{number}" for number in range(18)), "m98", "m99"]


def test_a_message_names_the_first_of_very_many_models() -> None:
    assert named(["a"]) == "`a`"
    assert named("abcdef") == "`a`, `b`, `c`, `d`, `e`, `f`"
    assert named("abcdefg") == "`a`, `b`, `c`, `d`, `e` and 2 others"
