"""Loads that are stopped half-way, and memory that comes back to what it was."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from omlxd.core.events import Event, EventName
from omlxd.daemon.pool import EnginePool
from omlxd.daemon.refusals import cancelled
from omlxd.engine.demo_models import make_tiny
from tests.acceptance.harness import MIB, Daemon, Lines, weights_bytes

pytestmark = pytest.mark.mlx

FOOTPRINT_SLACK = 15 * MIB


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """600 MB: nine slices of a load."""
    folder = tmp_path_factory.mktemp("big") / "model"
    yield make_tiny(folder, size_bytes=600_000_000, dtype="bfloat16")
    shutil.rmtree(folder)


def half_way(load: Lines) -> None:
    """Wait until some of the weights are in memory, and not all."""
    progress = load.until(lambda line: line["progress"]["done_bytes"] > 0)["progress"]
    assert progress["done_bytes"] < progress["total_bytes"]


def memory_is_back(daemon: Daemon) -> None:
    memory = daemon.memory
    assert memory["active"] < MIB
    assert memory["footprint"] <= memory["base"] + FOOTPRINT_SLACK


@pytest.mark.slow
def test_a_load_that_is_unloaded_half_way_gives_its_memory_back_and_the_next_one_works(
    daemon_of: Callable[..., Daemon], big: Path, small: Callable[..., Path]
) -> None:
    daemon = daemon_of({"big": big, "small": small()})
    with daemon.load_stream("big") as load:
        half_way(load)
        unloaded = daemon.control("POST", "models/big/unload", {})
        end = list(load)[-1]
    assert unloaded["was"] == "loading"
    assert end["error"]["code"] == "load_cancelled"
    assert "unloaded" in end["error"]["message"]
    assert daemon.states == {"big": "unloaded", "small": "unloaded"}
    memory_is_back(daemon)
    assert daemon.chat("small", "Hello.", max_tokens=4).status == 200
    loaded = daemon.cli_json("load", "big")
    assert loaded["model"]["state"] == "loaded"
    assert daemon.memory["active"] >= weights_bytes(big) - MIB


@pytest.mark.slow
async def test_a_load_that_gives_way_half_way_returns_its_memory_and_ends_well_when_it_is_tried_again(
    big: Path,
) -> None:
    half = asyncio.Event()
    events: list[Event] = []
    async with EnginePool({"big": big}, emit=events.append) as pool:
        asked = asyncio.create_task(pool.load("big", on_progress=lambda status: status.done_bytes and half.set()))
        await half.wait()
        assert await pool.levers.postpone_load("big", cancelled("big", "memory is short"))
        assert pool.engine.read().active_bytes < MIB
        assert not asked.done()
        assert (await asked).loaded
        assert pool.engine.read().active_bytes >= weights_bytes(big) - MIB
    assert [event.event for event in events if event.event.startswith("load_")] == [
        EventName.LOAD_STARTED,
        EventName.LOAD_RETRIED,
        EventName.LOAD_STARTED,
        EventName.LOAD_FINISHED,
    ]


@pytest.mark.slow
def test_under_reference_a_limit_lowered_during_a_load_stops_it_at_its_next_slice_and_gives_its_memory_back(
    daemon_of: Callable[..., Daemon], big: Path, small: Callable[..., Path]
) -> None:
    daemon = daemon_of({"big": big, "small": small()}, daemon={"policy": "reference"})
    with daemon.load_stream("big") as load:
        half_way(load)
        limited = daemon.control("PATCH", "limits", {"max_memory": "32M"})
        end = list(load)[-1]
    assert limited["level"] == "ok"
    assert end["error"]["code"] == "load_cancelled"
    assert "over the soft limit 32.0 MiB" in end["error"]["message"]
    (decision,) = daemon.log("decision")
    assert (decision["action"], decision["victim"]) == ("cancel_load", "big")
    assert decision["after_bytes"] < MIB
    memory_is_back(daemon)
    assert daemon.states["big"] == "unloaded"
    assert daemon.chat("small", "Hello.", max_tokens=4).status == 200
    assert daemon.cli("load", "big").returncode == 5
    assert daemon.cli("limit", "8G").returncode == 0
    assert daemon.cli("load", "big").returncode == 0


@pytest.mark.slow
def test_after_loads_answers_and_unloads_the_memory_is_what_it_was(
    daemon_of: Callable[..., Daemon], medium: Callable[..., Path], small: Callable[..., Path]
) -> None:
    daemon = daemon_of({"medium": medium(), "small": small()})
    for _ in range(3):
        for name in ("medium", "small"):
            assert daemon.chat(name, "Hello there.", max_tokens=8).status == 200
        for name in ("medium", "small"):
            assert daemon.cli("unload", name).returncode == 0
        memory_is_back(daemon)
        assert daemon.memory["committed"] == 0


def test_two_clients_who_want_a_model_share_one_load_and_it_outlives_the_first(
    daemon_of: Callable[..., Daemon], medium: Callable[..., Path]
) -> None:
    daemon = daemon_of({"chat": medium()})
    with daemon.load_stream("chat") as first, daemon.chat_stream("chat", "Hello.", max_tokens=4) as second:
        first.until(lambda line: "progress" in line)
        first.close()
        frames = list(second)
    assert frames[-2]["choices"][0]["finish_reason"] == "length"
    assert len(daemon.log("load_started")) == 1
