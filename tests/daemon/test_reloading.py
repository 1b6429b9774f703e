"""`reload` on a whole daemon: what differs is put in force, what is wrong changes nothing, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from omlxd.daemon.quiet_file import until_quiet
from omlxd.daemon.state_file import StateFile
from omlxd.engine.orders import MIB
from tests.fakes.daemon import RunningDaemon, manifest, running
from tests.fakes.engine import FakeEngine
from tests.fakes.wire import Answer, fetch

CHAT = "/v1/chat/completions"
TALK = {"model": "chat", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 10**6}
TWO = {"chat": {"mib": 40}, "small": {"mib": 30}}
TIMEOUT_S = 20.0


class Changing:
    """A daemon whose manifest is written anew."""

    def __init__(self, daemon: RunningDaemon, folder: Path) -> None:
        self.daemon, self._folder = daemon, folder

    def write(self, models: Mapping[str, Any], *, daemon: Mapping[str, Any] | None = None, **api: Any) -> None:
        self.daemon.home.manifest.write_text(manifest(self._folder, models, daemon=daemon, **api))

    async def ask(self, *, wait: bool = True) -> Answer:
        return await self.daemon.ask("POST", "/v1/control/reload", {"wait": wait})

    async def reload(self, models: Mapping[str, Any], *, wait: bool = True, **settings: Any) -> Any:
        """The answer to a reload that must succeed."""
        self.write(models, **settings)
        answer = await self.ask(wait=wait)
        assert answer.status == 200, answer.body
        return answer.json

    async def memory(self) -> Any:
        return (await self.daemon.control("GET", "status"))["memory"]

    def told(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.daemon.log() if line["event"] == event]


def keys(answer: Any) -> list[str]:
    return [change["key"] for change in answer["changes"]]


async def test_what_has_not_changed_is_left_alone_and_the_log_says_so(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        await daemon.control("POST", "models/chat/load")
        changing = Changing(daemon, tmp_path)
        answer = await changing.reload(TWO)
        assert (answer["changes"], answer["pending"], answer["warnings"]) == ([], [], [])
        assert len(changing.told("manifest_reloaded")) == 1
        assert len(changing.told("load_started")) == 1
        assert await daemon.states() == {"chat": "loaded", "small": "unloaded"}


async def test_another_key_in_the_file_of_the_key_is_a_change_that_holds_at_once(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("the-first-key\n")
    async with running(tmp_path, TWO, api={"api_key_file": str(key)}) as daemon:
        changing = Changing(daemon, tmp_path)
        key.write_text("the-other-key\n")
        told = (await changing.ask()).json
        assert keys(told) == ["api.api_key_file"]
        assert "other-key" not in str(told)
        for word, status in (("the-first-key", 401), ("the-other-key", 200)):
            headers = {"authorization": f"Bearer {word}"}
            assert (await fetch(daemon.tcp, "GET", "/v1/models", headers=headers)).status == status
        assert (await changing.ask()).json["changes"] == []


async def test_models_come_and_go_and_the_others_stay_loaded(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        for name in TWO:
            await daemon.control("POST", f"models/{name}/load")
        changing = Changing(daemon, tmp_path)
        answer = await changing.reload(
            {
                "new": {"mib": 20, "preload": True, "aliases": ["default"]},
                "chat": {"mib": 40},
                "later": {"mib": 10, "max_context": 100},
            }
        )
        assert (answer["added"], answer["removed"]) == (["new", "later"], ["small"])
        assert await daemon.states() == {"new": "loaded", "chat": "loaded", "later": "unloaded"}
        later = (await daemon.control("GET", "models"))["models"][2]
        assert (later["weights_bytes"], later["context_length"]) == (10 * MIB, 100)
        assert daemon.engine.loaded == {"new", "chat"}
        assert (await daemon.ask("POST", "/v1/control/models/small/load")).status == 404
        listed = (await daemon.ask("GET", "/v1/models")).json["data"]
        assert [model["id"] for model in listed] == ["new", "default", "chat", "later"]
        assert [line["model"] for line in changing.told("load_started")] == ["chat", "small", "new"]


async def test_a_stream_of_a_removed_model_ends_well_and_nobody_new_gets_in(tmp_path: Path) -> None:
    engine = FakeEngine("thread", answer_tokens=800, context_length=10**9, step_s=0.001)
    async with running(tmp_path, TWO, engine=engine) as daemon:
        stream = asyncio.create_task(daemon.ask("POST", CHAT, {**TALK, "stream": True}))
        async with asyncio.timeout(TIMEOUT_S):
            while [view["state"] for view in (await daemon.control("GET", "requests"))["requests"]] != ["decode"]:
                pass
        changing = Changing(daemon, tmp_path)
        answer = await changing.reload({"small": {"mib": 30}}, wait=False)
        assert answer["pending"] == ["chat"]
        assert (await daemon.ask("POST", CHAT, TALK)).status == 404
        (view,) = [m for m in (await daemon.control("GET", "models"))["models"] if m["name"] == "chat"]
        assert (view["state"], view["removed"], view["running"]) == ("loaded", True, 1)
        assert [model["id"] for model in (await daemon.ask("GET", "/v1/models")).json["data"]] == ["small"]
        assert (await daemon.ask("GET", "/metrics")).status == 200
        body = (await stream).body
        assert b'"finish_reason":"stop"' in body.replace(b" ", b"")
        assert b"error" not in body
        await changing.ask()
        assert await daemon.states() == {"small": "unloaded"}
        assert daemon.engine.loaded == set()


async def test_the_limit_of_the_manifest_is_obeyed_before_the_answer_and_takes_the_place_of_the_one_set(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, TWO) as daemon:
        for name in TWO:
            await daemon.control("POST", f"models/{name}/load")
        await daemon.control("PATCH", "limits", {"max_memory": "90M"})
        changing = Changing(daemon, tmp_path)
        assert (await changing.reload(TWO))["changes"] == []
        assert (await changing.memory())["soft_limit"] == 90 * MIB, "the manifest has not spoken since"
        answer = await changing.reload(TWO, daemon={"max_memory": "50M"}, wait=False)
        assert answer["evicted"] == ["chat"]
        assert (await changing.memory())["soft_limit"] == 50 * MIB
        await changing.reload(TWO)
        assert (await changing.memory())["soft_limit"] == 100 * MIB, "what was set before is not remembered"
        assert StateFile(daemon.home.state, lambda _: None).load().limit is None


async def test_a_flag_of_the_start_comes_before_the_manifest_until_somebody_says_otherwise(tmp_path: Path) -> None:
    async with running(tmp_path, TWO, max_memory="80M") as daemon:
        changing = Changing(daemon, tmp_path)
        answer = await changing.reload(TWO, daemon={"max_memory": "70M"})
        assert (await changing.memory())["soft_limit"] == 80 * MIB
        assert "--max-memory 80M" in answer["warnings"][0]
        await daemon.control("PATCH", "limits", {"max_memory": "60M"})
        await changing.reload(TWO, daemon={"max_memory": "50M"})
        assert (await changing.memory())["soft_limit"] == 50 * MIB


async def test_pins_follow_the_manifest_where_it_has_changed_its_mind_and_are_loaded(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        await daemon.control("POST", "models/small/pin")
        changing = Changing(daemon, tmp_path)
        await changing.reload({"chat": {"mib": 40, "pin": True}, "small": {"mib": 30}})
        views = {view["name"]: view for view in (await daemon.control("GET", "models"))["models"]}
        assert {name: view["pinned"] for name, view in views.items()} == {"chat": True, "small": True}
        assert views["chat"]["state"] == "loaded"
        await changing.reload({"chat": {"mib": 40}, "small": {"mib": 30}})
        assert [line["model"] for line in changing.told("unpinned")] == ["chat"]
        assert await daemon.states() == {"chat": "loaded", "small": "unloaded"}


async def test_a_model_that_comes_back_to_the_manifest_is_pinned_as_the_manifest_says(tmp_path: Path) -> None:
    async with running(tmp_path, TWO | {"small": {"mib": 30, "pin": True}}) as daemon:
        assert (await daemon.control("POST", "models/small/unpin"))["manifest_pin"] is True
        assert (await daemon.control("POST", "models/chat/unpin"))["manifest_pin"] is False
        changing = Changing(daemon, tmp_path)
        await changing.reload({"chat": {"mib": 40}})
        await changing.reload(TWO | {"small": {"mib": 30, "pin": True}})
        views = {view["name"]: view for view in (await daemon.control("GET", "models"))["models"]}
        assert (views["small"]["pinned"], views["small"]["state"]) == (True, "loaded")


async def test_settings_of_every_part_hold_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        changing = Changing(daemon, tmp_path)
        wanted = {
            "policy": "reference",
            "poll_interval": "2s",
            "max_waiting": 0,
            "log_level": "warning",
            "stall_timeout": "5s",
            "prefill_chunk": 64,
        }
        await changing.reload(
            {"chat": {"mib": 40, "ttl": "1h"}, "small": {"mib": 30}}, daemon=wanted, api_key="a-secret-key"
        )
        assert changing.told("manifest_reloaded") == [], "it is an `info`"
        enforcer = (await daemon.control("GET", "status"))["enforcer"]
        assert (enforcer["policy"], enforcer["poll_interval_s"]) == ("reference", 2.0)
        assert (await fetch(daemon.tcp, "GET", "/v1/models")).status == 401
        assert (
            await fetch(daemon.tcp, "GET", "/v1/models", headers={"Authorization": "Bearer a-secret-key"})
        ).status == 200
        assert (await daemon.ask("POST", CHAT, TALK)).json["error"]["code"] == "busy"
        await daemon.control("POST", "models/chat/load")
        (view,) = [m for m in (await daemon.control("GET", "models"))["models"] if m["name"] == "chat"]
        assert view["ttl_left_s"] > 0
        assert daemon.engine.plans[-1].prefill_chunk_tokens == 64
        assert "a-secret-key" not in daemon.home.log.read_text()


async def test_what_needs_a_restart_is_named_each_time_and_left_as_it_is(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        changing = Changing(daemon, tmp_path)
        for _ in range(2):
            answer = await changing.reload(TWO, daemon={"max_batch": 2}, listen="127.0.0.1:1")
            assert answer["restart"] == ["daemon.max_batch", "api.listen"]
            assert (await fetch(daemon.tcp, "GET", "/health")).status == 200


@pytest.mark.parametrize(
    ("models", "daemon", "status", "words"),
    [
        ({"chat": {"mib": 40, "tttl": "1m"}}, {}, 422, "models.chat.tttl: unknown key; did you mean `ttl`? (line 14)"),
        (TWO, {"max_memory": "3x"}, 422, "daemon.max_memory: "),
        (TWO, {"hard_limit": "100000G"}, 422, "(line 3)"),
        ({"chat": {"mib": 150, "pin": True}}, {}, 422, "are over the soft limit 100 MiB (line 14)"),
        ({"chat": {"mib": 60, "pin": True}, "small": {"mib": 60, "pin": True}}, {}, 507, "pinned weights of 120 MiB"),
    ],
)
async def test_a_manifest_that_is_wrong_changes_nothing_and_is_told(
    tmp_path: Path, models: Mapping[str, Any], daemon: Mapping[str, Any], status: int, words: str
) -> None:
    (tmp_path / "before").mkdir()
    async with running(tmp_path / "before", TWO) as made:
        await made.control("POST", "models/chat/load")
        changing = Changing(made, tmp_path)
        changing.write({"new": {"mib": 5}, **models}, daemon={"drain_timeout": "1s", **daemon})
        answer = await changing.ask()
        assert answer.status == status
        assert words in json.dumps(answer.json["error"], ensure_ascii=False)
        assert "omlxd reload" in answer.json["error"]["hint"]
        assert await made.states() == {"chat": "loaded", "small": "unloaded"}
        assert len(changing.told("manifest_rejected")) == 1


async def test_an_emptied_manifest_changes_nothing_unless_forced(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        await daemon.control("POST", "models/chat/load")
        changing = Changing(daemon, tmp_path)
        manifest_text = daemon.home.manifest.read_text()
        daemon.home.manifest.write_text("")
        answer = await changing.ask()
        assert answer.json["error"]["code"] == "manifest_invalid"
        assert answer.json["error"]["message"].startswith("the manifest has no models; all 2 models")
        assert "`omlxd reload --force`" in answer.json["error"]["hint"]
        assert await daemon.states() == {"chat": "loaded", "small": "unloaded"}
        assert len(changing.told("manifest_rejected")) == 1

        daemon.home.manifest.write_text(manifest_text.partition("[models")[0])
        forced = await daemon.ask("POST", "/v1/control/reload", {"force": True})
        assert forced.status == 200, forced.body
        assert sorted(forced.json["removed"]) == ["chat", "small"]
        assert await daemon.states() == {}
        assert (await changing.ask()).status == 200  # there is nothing left to lose


async def test_a_manifest_that_has_gone_is_to_be_put_back(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        daemon.home.manifest.unlink()
        answer = await Changing(daemon, tmp_path).ask()
        assert answer.json["error"]["code"] == "manifest_invalid"
        assert answer.json["error"]["hint"].startswith("put it back, then `omlxd reload`")


async def test_a_model_whose_folder_is_away_is_a_warning_and_the_loaded_weights_stay(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        await daemon.control("POST", "models/chat/load")
        text = daemon.home.manifest.read_text()
        daemon.home.manifest.write_text(text.replace(str(tmp_path / "chat"), str(tmp_path / "away")))
        answer = (await Changing(daemon, tmp_path).ask()).json
        assert (keys(answer), answer["pending"]) == (["models.chat.path"], [])
        assert "`chat` cannot be loaded: " in answer["warnings"][0]
        assert daemon.engine.loaded == {"chat"}


async def test_reloads_at_once_end_with_what_was_written_last(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        await daemon.control("POST", "models/chat/load")
        changing = Changing(daemon, tmp_path)
        asked = []
        for number in range(4):  # each holds a thread of this process while it waits
            changing.write({"chat": {"mib": 40, "max_context": 100 + number}, f"m{number}": {"mib": 1}})
            asked.append(asyncio.create_task(changing.ask()))
            await asyncio.sleep(0)
        assert {answer.status for answer in await asyncio.gather(*asked)} == {200}
        assert await daemon.states() == {"chat": "loaded", "m3": "unloaded"}
        assert (await changing.ask()).json["changes"] == []
        context = (await daemon.control("GET", "models"))["models"][0]["context_length"]
        assert context == 103


async def test_a_client_that_goes_away_does_not_stop_it_half_way(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        changing = Changing(daemon, tmp_path)
        changing.write({"chat": {"mib": 40, "preload": True}})
        _, writer = await asyncio.open_unix_connection(daemon.home.socket)
        writer.write(b"POST /v1/control/reload HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()
        async with asyncio.timeout(TIMEOUT_S):
            while await daemon.states() != {"chat": "loaded"}:
                pass
        assert len(changing.told("manifest_reloaded")) == 1


async def test_while_it_drains_nothing_is_reloaded(tmp_path: Path) -> None:
    engine = FakeEngine("thread", answer_tokens=None, context_length=10**9, step_s=0.002)
    async with running(tmp_path, TWO, engine=engine) as daemon:
        request = asyncio.create_task(daemon.ask("POST", CHAT, TALK))
        async with asyncio.timeout(TIMEOUT_S):
            while not (await daemon.control("GET", "requests"))["requests"]:
                pass
        daemon.stop.ask()
        await daemon.until("draining")
        refused = await Changing(daemon, tmp_path).ask()
        assert (refused.status, refused.json["error"]["code"]) == (503, "shutting_down")
        assert int(refused.headers["retry-after"]) >= 1
        daemon.stop.ask(now=True)
        await request


async def test_a_file_that_is_being_written_is_waited_for_but_not_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "manifest"
    await until_quiet(path, quiet_s=0.01)
    path.write_text("half")

    async def write_on() -> None:
        for _ in range(5):
            await asyncio.sleep(0.01)
            path.write_text(path.read_text() + "x")

    writing = asyncio.create_task(write_on())
    await until_quiet(path, quiet_s=0.2)
    assert writing.done()
    assert path.read_text() == "halfxxxxx"

    async def never_ends() -> None:
        while True:
            path.write_text(str(time.monotonic_ns()))
            await asyncio.sleep(0)

    writing = asyncio.create_task(never_ends())
    await until_quiet(path, quiet_s=0.01, longest_s=0.1)
    assert not writing.done()
    writing.cancel()
