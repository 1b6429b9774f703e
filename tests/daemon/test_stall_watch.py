"""The stall watch: one record when the engine stands still for too long, one when it moves, and health meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from omlxd.core.events import Event, EventLevel, EventName
from omlxd.daemon.stall_watch import StallWatch
from tests.fakes.clock import on_virtual_time
from tests.fakes.daemon import running
from tests.fakes.engine import FakeEngine


@asynccontextmanager
async def watched(timeout_s: float) -> AsyncIterator[tuple[FakeEngine, list[Event]]]:
    engine, events = FakeEngine(), list[Event]()
    watch = StallWatch(engine, timeout_s, events.append)
    watch.start()
    watch.start()
    yield engine, events
    await watch.stop()
    await watch.stop()
    assert "omlxd-stalls" not in {task.get_name() for task in asyncio.all_tasks()}


@on_virtual_time
async def test_a_stall_is_told_once_with_the_engine_s_stack_and_once_that_it_is_over() -> None:
    async with watched(60.0) as (engine, events):
        for stalled_for_s in (0.0, 30.0, 60.0):
            engine.stalled_for_s = stalled_for_s
            await asyncio.sleep(10)
        assert not events
        for stalled_for_s in (61.0, 80.0, 200.0):
            engine.stalled_for_s = stalled_for_s
            await asyncio.sleep(10)
        (stalled,) = events
        assert (stalled.event, stalled.level) == (EventName.ENGINE_STALLED, EventLevel.ERROR)
        assert stalled.fields == {"stalled_s": 61.0, "stack": ["fakes/engine.py:1 step"]}
        engine.stalled_for_s = 0.2
        await asyncio.sleep(30)
        (_, moves) = events
        assert (moves.event, moves.fields) == (EventName.ENGINE_MOVES, {"stalled_s": 200.0})


@on_virtual_time
async def test_a_second_stall_is_told_again() -> None:
    async with watched(1.0) as (engine, events):
        for stalled_for_s in (2.0, 0.0, 3.0):
            engine.stalled_for_s = stalled_for_s
            await asyncio.sleep(1)
        assert [event.fields["stalled_s"] for event in events] == [2.0, 2.0, 3.0]


async def test_health_says_stalled_after_the_manifest_s_time_and_ok_when_it_is_over(tmp_path: Path) -> None:
    async with running(tmp_path, {"chat": {"mib": 10}}, daemon={"stall_timeout": "90s"}) as daemon:
        await daemon.until("ready")
        for stalled_for_s, status, word in ((89.0, 200, "ok"), (91.0, 503, "stalled"), (0.0, 200, "ok")):
            daemon.engine.stalled_for_s = stalled_for_s
            health = await daemon.ask("GET", "/health")
            assert (health.status, health.json["status"]) == (status, word)
            assert health.json["stalled_s"] == (stalled_for_s or None)
            assert (await daemon.control("GET", "status"))["stalled_s"] == (stalled_for_s or None)


async def test_a_running_daemon_logs_a_stall(tmp_path: Path) -> None:
    async with running(tmp_path, {"chat": {"mib": 10}}, daemon={"stall_timeout": "100ms"}) as daemon:
        await daemon.until("ready")
        daemon.engine.stalled_for_s = 5.0
        async with asyncio.timeout(30):
            while not (found := [line for line in daemon.log() if line["event"] == "engine_stalled"]):
                await daemon.ask("GET", "/health")
    assert found[0]["stack"] == ["fakes/engine.py:1 step"]
