"""What is loaded again at a start: by the manifest, the command line, and what the state file has kept."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from omlxd.core.manifest import Restore
from omlxd.daemon.state_file import StateFile
from omlxd.engine.orders import MIB
from tests.fakes.daemon import RunningDaemon, manifest, running
from tests.fakes.engine import FakeEngine

MODELS = {"chat": {"mib": 30}, "small": {"mib": 30}, "other": {"mib": 30}, "pre": {"mib": 5, "preload": True}}


async def used(folder: Path, *names: str, **options: Any) -> None:
    """A daemon that had these models loaded, in this order, and has pinned the first; it is stopped."""
    async with running(folder, MODELS, **options) as daemon:
        for name in names:
            await daemon.control("POST", f"models/{name}/load")
        await daemon.control("POST", f"models/{names[0]}/pin")


def saved(daemon: RunningDaemon) -> tuple[str, ...]:
    return StateFile(daemon.home.state, lambda _: None).load().loaded


async def loaded(daemon: RunningDaemon) -> list[str]:
    return sorted(name for name, state in (await daemon.states()).items() if state == "loaded")


@pytest.mark.parametrize(
    ("restore", "in_manifest", "restarted", "expected"),
    [
        (None, None, False, ["chat", "pre"]),
        (None, None, True, ["chat", "pre", "small"]),
        (None, "loaded", False, ["chat", "pre", "small"]),
        (None, "none", True, ["pre"]),
        (Restore.NONE, "loaded", True, ["pre"]),
        (Restore.PINNED, None, True, ["chat", "pre"]),
        (Restore.LOADED, "none", False, ["chat", "pre", "small"]),
    ],
)
async def test_what_is_loaded_at_the_start(
    tmp_path: Path, restore: Restore | None, in_manifest: str | None, restarted: bool, expected: list[str]
) -> None:
    await used(tmp_path, "chat", "small")
    settings = {} if in_manifest is None else {"restore": in_manifest}
    async with running(tmp_path, MODELS, daemon=settings, restore=restore, restarted=restarted) as daemon:
        assert await loaded(daemon) == expected
        assert sorted(daemon.ready.loading) == expected, "and it was told when the daemon answered"
        pins = [view["name"] for view in (await daemon.control("GET", "models"))["models"] if view["pinned"]]
        assert pins == ["chat"]


async def test_what_was_unpinned_since_is_not_loaded_for_the_manifests_pin(tmp_path: Path) -> None:
    models = MODELS | {"chat": {"mib": 30, "pin": True}}
    async with running(tmp_path, models) as daemon:
        assert await loaded(daemon) == ["chat", "pre"]
        await daemon.control("POST", "models/chat/unpin")
    async with running(tmp_path, models) as daemon:
        assert await loaded(daemon) == ["pre"]


@pytest.mark.parametrize(("meanwhile", "pinned"), [("other", True), ("none", False)], ids=["removed", "emptied"])
async def test_an_unpin_goes_with_its_model_but_not_with_a_manifest_that_was_emptied(
    tmp_path: Path, meanwhile: str, pinned: bool
) -> None:
    models = {"chat": {"mib": 30, "pin": True}}
    async with running(tmp_path, models) as daemon:
        await daemon.control("POST", "models/chat/unpin")
    async with running(tmp_path, {"other": {"mib": 30}} if meanwhile == "other" else {}):
        pass
    async with running(tmp_path, models) as daemon:
        (view,) = (await daemon.control("GET", "models"))["models"]
        assert view["pinned"] is pinned


async def test_what_does_not_fit_any_more_takes_nobodys_memory_and_what_was_used_last_comes_first(
    tmp_path: Path,
) -> None:
    await used(tmp_path, "chat", "small", "other")
    small = {"max_memory": "70M", "hard_limit": "80M"}
    async with running(tmp_path, MODELS, daemon=small, restarted=True) as daemon:
        assert await loaded(daemon) == ["chat", "other", "pre"]
        assert [line["model"] for line in daemon.log() if line["event"] == "load_started"][-3:] == [
            "chat",
            "pre",
            "other",
        ]


async def test_a_model_that_has_left_the_manifest_is_not_missed(tmp_path: Path) -> None:
    await used(tmp_path, "chat", "small")
    async with running(tmp_path, {"chat": {"mib": 30}}, restarted=True) as daemon:
        assert await loaded(daemon) == ["chat"]


async def test_the_state_file_follows_loads_and_unloads_so_that_a_crash_loses_none(tmp_path: Path) -> None:
    async with running(tmp_path, MODELS) as daemon:
        await daemon.control("POST", "models/chat/load")
        await daemon.control("POST", "models/pre/unload")
        async with asyncio.timeout(20):
            while saved(daemon) != ("chat",):
                await daemon.control("GET", "models")


async def test_an_end_in_the_middle_of_restoring_loses_none(tmp_path: Path) -> None:
    await used(tmp_path, "chat", "small", "other")
    slow = FakeEngine("thread", slice_bytes=MIB, step_s=0.02)
    async with running(tmp_path, MODELS, engine=slow, restarted=True, wait_ready=False) as daemon:
        async with asyncio.timeout(20):
            while await loaded(daemon) != ["chat"]:
                pass
        assert len(saved(daemon)) == 4
    assert len(saved(daemon)) == 4
    async with running(tmp_path, MODELS, restarted=True) as daemon:
        assert await loaded(daemon) == ["chat", "other", "pre", "small"]


async def test_a_stop_for_a_restart_is_known_to_the_next_start_and_to_no_later_one(tmp_path: Path) -> None:
    async with running(tmp_path, MODELS) as daemon:
        await daemon.control("POST", "models/chat/load")
        await daemon.control("POST", "stop", {"restart": True})
        await daemon.ended()
    for expected in (["chat", "pre"], ["pre"]):
        async with running(tmp_path, MODELS) as daemon:
            assert await loaded(daemon) == expected


async def test_a_restart_that_is_stopped_before_it_has_restored_all_is_none_for_the_next_start(tmp_path: Path) -> None:
    async with running(tmp_path, MODELS) as daemon:
        for name in ("chat", "small"):
            await daemon.control("POST", f"models/{name}/load")
        await daemon.control("POST", "stop", {"restart": True})
        await daemon.ended()
    slow = FakeEngine("thread", slice_bytes=MIB, step_s=0.02)
    async with running(tmp_path, MODELS, engine=slow, restarted=True, wait_ready=False) as daemon:
        await daemon.control("POST", "stop")
        await daemon.ended()
    async with running(tmp_path, MODELS) as daemon:
        assert await loaded(daemon) == ["pre"]


async def test_what_the_start_was_told_is_said_at_the_end_until_somebody_says_otherwise(tmp_path: Path) -> None:
    for limited, expected in ((False, "80M"), (True, None)):
        async with running(tmp_path, MODELS, max_memory="80M") as daemon:
            if limited:
                await daemon.control("PATCH", "limits", {"max_memory": "60M"})
            options = (await daemon.control("POST", "stop"))["options"]
            assert options["manifest"] == str(daemon.home.manifest)
            assert options["max_memory"] == expected
    async with running(tmp_path, manifest(tmp_path, MODELS)) as daemon:
        assert (await daemon.control("GET", "status"))["memory"]["soft_limit"] == 60 * MIB
