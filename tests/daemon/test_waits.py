"""What `status` says of those who wait, and how long a load will take."""

from __future__ import annotations

import asyncio

import pytest

from omlxd.core.events import EventName
from omlxd.core.states import EntryState
from omlxd.daemon.listening import HEARTBEAT_S, JUDGED_S, wait_before_stream
from omlxd.daemon.load_ticket import LoadStatus
from omlxd.daemon.monitor import MemoryMonitor
from omlxd.daemon.request import Generation
from omlxd.daemon.tallies import Tallies
from omlxd.daemon.waits import progress_words
from omlxd.engine.orders import MIB
from tests.fakes.clock import on_virtual_time
from tests.fakes.costs import FakeCosts
from tests.fakes.pools import Scene, until, until_decoding


@on_virtual_time
async def test_a_load_and_its_request_say_who_is_in_the_way_and_what_is_short() -> None:
    scene = Scene({"a": 600, "b": 600}, step_s=1.0, slice_bytes=1024 * MIB)
    async with scene.pool as pool:
        scene.enforcer(1000).start()
        monitor = MemoryMonitor(pool)
        running = pool.generate("a", prompt="hi")
        await until_decoding(running)
        waiting = pool.generate("b", prompt="hi")
        await until(lambda: monitor.model("b").waits_for not in (None, "waiting for its turn"))
        assert monitor.model("b").waits_for == "waiting for `a` to finish, 200 MiB short"
        views = {view.id: view.waits_for for view in monitor.requests()}
        load = "waiting for `b` to be loaded: waiting for `a` to finish, 200 MiB short"
        assert views == {running.id: None, waiting.id: load}
        assert progress_words(pool, waiting) == load
        await waiting.text()
        assert monitor.model("b").waits_for is None


@on_virtual_time
async def test_a_stream_begins_once_its_prompt_is_judged_but_sooner_for_who_wants_to_see_the_wait() -> None:
    scene = Scene({"a": 600, "b": 600}, step_s=1.0, answer_tokens=None, fair_wait_s=None)
    async with scene.pool as pool:
        scene.enforcer(1000).start()
        running = pool.generate("a", prompt="hi")
        await until_decoding(running)
        waiting = pool.generate("b", prompt="hi")
        for wants_progress, waits_s in ((True, HEARTBEAT_S), (False, JUDGED_S + HEARTBEAT_S)):
            began_s = scene.clock()
            await wait_before_stream([waiting], wants_progress=wants_progress)
            assert scene.clock() - began_s == pytest.approx(waits_s)


@on_virtual_time
async def test_a_load_behind_another_says_which() -> None:
    scene = Scene({"a": 600, "b": 100}, step_s=1.0, slice_bytes=60 * MIB)
    async with scene.pool as pool:
        scene.enforcer(1000).start()
        loads = [asyncio.create_task(pool.load(name)) for name in ("a", "b")]
        await until(lambda: pool.entries["a"].state is EntryState.LOADING)
        assert MemoryMonitor(pool).model("b").waits_for == "waiting for `a` to be loaded first"
        await asyncio.gather(*loads)


@on_virtual_time
async def test_a_load_tells_how_long_its_rest_will_take_at_the_speed_it_has() -> None:
    scene = Scene({"a": 600}, step_s=1.0, slice_bytes=60 * MIB)
    told: list[tuple[int, float | None]] = []
    async with scene.pool as pool:
        scene.enforcer(1000).start()
        monitor = MemoryMonitor(pool)

        def hear(status: LoadStatus) -> None:
            told.append((status.done_bytes // MIB, status.left_s))
            if told[-1][0] == 300:
                view = monitor.model("a")
                assert (view.load_progress, view.load_left_s) == (0.5, status.left_s)

        await pool.load("a", on_progress=hear)
        assert told[0] == (0, None)  # nothing is known before the first bytes
        assert dict(told)[300] == pytest.approx(5.0, abs=0.2)
        assert told[-1] == (600, 0.0)
        await pool.unload("a")
        told.clear()
        await pool.load("a", on_progress=hear)
        last = pool.entries["a"].last_load
        assert last is not None
        assert [left for done, left in told if not done][-1] == last.load_s  # as the last time


@on_virtual_time
async def test_a_request_that_waits_at_the_door_says_for_whom() -> None:
    token = 64 * 1024  # so that a block of 256 tokens is 16 MiB
    options = {"costs": FakeCosts(token), "kv_bytes_per_token": token, "answer_tokens": 100, "step_s": 0.01}
    scene = Scene({"a": 100}, **options)
    async with scene.pool as pool:
        scene.enforcer(200, hard_mib=220).start()
        first = pool.generate("a", tokens=[1] * 700, max_tokens=100)
        await until_decoding(first)
        second = pool.generate("a", tokens=[1] * 700, max_tokens=100)
        monitor = MemoryMonitor(pool)
        await until(lambda: second.waits_for is not None)
        said = str(second.waits_for)
        assert said.startswith("waiting for `a` to finish, ")
        assert said.endswith("MiB short")
        assert [view.waits_for for view in monitor.requests()] == [None, said]
        await first.text()
        await second.text()
        assert second.waits_for is None


def reasons(scene: Scene, generation: Generation) -> list[str]:
    """Why the request waited, as the log has it."""
    return [each.fields["reason"] for each in scene.named(EventName.REQUEST_WAITING) if each.request == generation.id]


@on_virtual_time
async def test_the_log_says_once_that_a_request_waits_in_the_engine_and_for_whom() -> None:
    scene = Scene({"a": 100}, max_batch=1, step_s=0.5, answer_tokens=100)
    tallies = Tallies()
    scene.on_event = tallies.count
    async with scene.pool as pool:
        await pool.load("a")
        runs = pool.generate("a", prompt="hi", max_tokens=20)
        await until_decoding(runs)
        waits, last = (pool.generate("a", prompt="hi", max_tokens=20) for _ in range(2))
        await asyncio.sleep(0.5)
        assert reasons(scene, waits) == []
        for each in (runs, waits, last):
            await each.text()
        assert reasons(scene, runs) == []
        assert reasons(scene, waits) == reasons(scene, last) == ["`a` runs 1 request already, and no more at once"]
    told = scene.named(EventName.REQUEST_WAITING)
    assert [each.fields["waited_s"] for each in told] == pytest.approx([1.0, 1.0], abs=0.1)
    assert tallies.waits["a"] == 0  # none of them waited for its model


@on_virtual_time
async def test_a_prompt_that_waits_for_its_turn_beside_others_and_a_load_says_so() -> None:
    scene = Scene({"a": 100, "b": 1000}, step_s=2.0, slice_bytes=10 * MIB)
    async with scene.pool as pool:
        await pool.load("a")
        loading = asyncio.create_task(pool.load("b"))
        await until(lambda: pool.entries["b"].state is EntryState.LOADING)
        first, second = (pool.generate("a", prompt="hi") for _ in range(2))
        await first.text()
        await second.text()
        assert reasons(scene, first) == [
            "`a` is loaded, but the engine has 1 other prompt and the load of `b` to see to as well"
        ]
        await loading


@on_virtual_time
async def test_who_stands_behind_others_at_the_door_is_told_of_them_and_then_of_its_own_memory() -> None:
    token = 64 * 1024
    options = {"costs": FakeCosts(token), "kv_bytes_per_token": token, "answer_tokens": 100, "step_s": 0.1}
    scene = Scene({"a": 100}, **options)
    async with scene.pool as pool:
        scene.enforcer(200, hard_mib=220).start()
        await pool.load("a")
        first, second, third = (pool.generate("a", tokens=[1] * 700, max_tokens=100) for _ in range(3))
        for each in (first, second, third):
            await each.text()
        assert reasons(scene, first) == []
        (of_memory,) = reasons(scene, second)
        assert "it waits for `a`" in of_memory
        behind, of_memory = reasons(scene, third)
        assert behind == "`a` is loaded, but 1 request before it waits for memory"
        assert "it waits for `a`" in of_memory
