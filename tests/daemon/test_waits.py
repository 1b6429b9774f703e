"""What `status` says of those who wait, and how long a load will take."""

from __future__ import annotations

import asyncio

import pytest

from omlxd.core.states import EntryState
from omlxd.daemon.listening import HEARTBEAT_S, JUDGED_S, wait_before_stream
from omlxd.daemon.load_ticket import LoadStatus
from omlxd.daemon.monitor import MemoryMonitor
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
