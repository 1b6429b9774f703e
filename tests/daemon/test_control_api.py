"""The control API: each call answers after its effect, in the shape the command line reads."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from omlxd.core.errors import LoadFailed
from omlxd.engine.orders import MIB
from tests.fakes.daemon import RunningDaemon, running
from tests.fakes.engine import FakeEngine
from tests.fakes.wire import Answer

TWO = {"chat": {"mib": 40, "aliases": ["default"]}, "small": {"mib": 30}}
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "hello there"}]}


def endless(**options: Any) -> FakeEngine:
    """Answers that go on until somebody stops them."""
    return FakeEngine("thread", answer_tokens=None, context_length=10**9, step_s=0.002, **options)


async def talking(daemon: RunningDaemon, model: str = "chat") -> tuple[asyncio.Task[Answer], str]:
    """A request that goes on for ever, and its id, once it decodes."""
    task = asyncio.create_task(
        daemon.ask("POST", "/v1/chat/completions", {**CHAT, "model": model, "max_tokens": 10**6})
    )
    async with asyncio.timeout(20):
        while True:
            for request in (await daemon.control("GET", "requests"))["requests"]:
                if request["model"] == model and request["state"] == "decode":
                    return task, request["id"]


async def test_an_alias_names_its_model_in_every_route(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        for route in ("load", "pin", "unpin", "unload"):
            answer = await daemon.control("POST", f"models/default/{route}", {})
            assert answer["model"]["name"] == "chat", route
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/completions"):
            what = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
            answered = await daemon.ask("POST", path, {"model": "default", "max_tokens": 2, **what})
            assert answered.status == 200, answered.body
        assert await daemon.states() == {"chat": "loaded", "small": "unloaded"}


async def test_status_has_every_field_that_the_contract_names(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        status = await daemon.control("GET", "status")
        assert status["schema"] == 1
        assert status["state"] == "ready"
        assert status["api"] == daemon.ready.api
        assert status["memory"]["soft_limit"] == 100 * MIB
        assert status["memory"]["hard_limit"] == 200 * MIB
        assert (status["memory"]["binding"], status["memory"]["hard_binding"]) == ("max_memory", "hard_limit")
        assert status["enforcer"] == {
            "policy": "graceful",
            "poll_interval_s": 1.0,
            "level": "ok",
            "decisions": 0,
            "reason": None,
        }
        assert [(model["name"], model["weights_bytes"]) for model in status["models"]] == [
            ("chat", 40 * MIB),
            ("small", 30 * MIB),
        ]


async def test_load_answers_when_the_model_is_resident_and_again_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        first = await daemon.control("POST", "models/default/load")
        assert first["model"]["state"] == "loaded"
        assert first["load_s"] is not None
        assert daemon.engine.loaded == {"chat"}
        again = await daemon.control("POST", "models/chat/load", {})
        assert (again["model"]["state"], again["load_s"], again["evicted"]) == ("loaded", None, [])


async def test_load_names_what_it_evicted_and_pins_when_asked(tmp_path: Path) -> None:
    async with running(tmp_path, {**TWO, "big": {"mib": 50}}) as daemon:
        await daemon.control("POST", "models/small/load")
        await daemon.control("POST", "models/chat/load")
        loaded = await daemon.control("POST", "models/big/load", {"pin": True})
        assert loaded["evicted"] == ["small"]
        assert loaded["model"]["pinned"] is True
        assert await daemon.states() == {"chat": "loaded", "small": "unloaded", "big": "loaded"}


async def test_load_without_waiting_answers_at_once_and_loads_all_the_same(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        await daemon.control("POST", "models/chat/load", {"wait": False})
        async with asyncio.timeout(20):
            while (await daemon.states())["chat"] != "loaded":
                pass


async def test_load_shows_progress_as_lines_and_ends_with_the_result(tmp_path: Path) -> None:
    async with running(tmp_path, TWO, engine=FakeEngine("thread", slice_bytes=MIB, step_s=0.001)) as daemon:
        answer = await daemon.ask("POST", "/v1/control/models/chat/load", {}, {"Accept": "application/x-ndjson"})
        *progress, last = answer.lines
        assert last["result"]["model"]["state"] == "loaded"
        assert all(
            set(line["progress"]) == {"model", "state", "done_bytes", "total_bytes", "note", "left_s"}
            for line in progress
        )
        done = [line["progress"]["done_bytes"] for line in progress]
        assert done == sorted(done)
        assert progress[-1]["progress"]["total_bytes"] == 40 * MIB
        assert progress[-1]["progress"]["left_s"] == 0.0


async def test_a_failed_load_is_the_last_line_of_its_progress(tmp_path: Path) -> None:
    engine = FakeEngine("thread")
    engine.load_errors["chat"] = LoadFailed("the header is cut off", hint="fetch it again")
    async with running(tmp_path, TWO, engine=engine) as daemon:
        answer = await daemon.ask("POST", "/v1/control/models/chat/load", {}, {"Accept": "application/x-ndjson"})
        assert answer.lines[-1]["error"]["code"] == "load_failed"
        assert (await daemon.states())["chat"] == "failed"


@pytest.mark.parametrize(
    ("model", "status", "code"),
    [("chatt", 404, "model_not_found"), ("huge", 507, "does_not_fit"), ("gone", 500, "load_failed")],
)
async def test_what_cannot_be_loaded_says_why_and_costs_the_loaded_ones_nothing(
    tmp_path: Path, model: str, status: int, code: str
) -> None:
    async with running(tmp_path, {**TWO, "huge": {"mib": 101}, "gone": {}}) as daemon:
        (tmp_path / "gone" / "config.json").unlink()
        await daemon.control("POST", "models/chat/load")
        answer = await daemon.ask("POST", f"/v1/control/models/{model}/load")
        assert (answer.status, answer.json["error"]["code"]) == (status, code)
        assert answer.json["error"]["hint"]
        assert (await daemon.states())["chat"] == "loaded"


async def test_an_unknown_model_is_answered_with_the_name_that_was_meant(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        for action in ("load", "unload", "pin", "unpin"):
            answer = await daemon.ask("POST", f"/v1/control/models/chatt/{action}")
            assert answer.status == 404
            assert "`chat`" in answer.json["error"]["hint"]


async def test_unload_answers_when_the_memory_is_back(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        await daemon.control("POST", "models/chat/load")
        done = await daemon.control("POST", "models/chat/unload")
        assert (done["was"], done["freed_bytes"], done["model"]["state"]) == ("loaded", 40 * MIB, "unloaded")
        assert daemon.engine.active_bytes == 0
        again = await daemon.control("POST", "models/chat/unload")
        assert (again["was"], again["freed_bytes"]) == ("unloaded", 0)


async def test_unload_now_ends_the_requests_with_one_clear_error(tmp_path: Path) -> None:
    async with running(tmp_path, TWO, engine=endless()) as daemon:
        request, _ = await talking(daemon)
        await daemon.control("POST", "models/chat/unload", {"now": True})
        answer = await request
        assert (answer.status, answer.json["error"]["code"]) == (503, "request_aborted")
        assert "unloaded" in answer.json["error"]["message"]
        assert answer.headers["retry-after"] == "5"


async def test_a_pin_outlives_the_daemon(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        pinned = await daemon.control("POST", "models/chat/pin")
        assert (pinned["model"]["pinned"], pinned["model"]["state"]) == (True, "unloaded")
    async with running(tmp_path, TWO) as daemon:
        assert (await daemon.control("GET", "models"))["models"][0]["pinned"] is True
        assert await daemon.states() == {"chat": "loaded", "small": "unloaded"}
        await daemon.control("POST", "models/chat/unpin", {})
    async with running(tmp_path, TWO) as daemon:
        assert await daemon.states() == {"chat": "unloaded", "small": "unloaded"}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "models/chat/pin", {}),
        ("POST", "models/chat/unpin", {}),
        ("POST", "models/chat/load", {"pin": True}),
        ("PATCH", "limits", {"max_memory": "90M"}),
    ],
)
async def test_what_is_set_and_cannot_be_saved_is_in_force_with_a_warning(
    tmp_path: Path, method: str, path: str, body: dict[str, Any]
) -> None:
    async with running(tmp_path, TWO) as daemon:
        (tmp_path / "home" / "state.toml.new").mkdir()
        (warning,) = (await daemon.control(method, path, body))["warnings"]
        assert warning.startswith("in force, but not saved: ")
        assert "state_file_not_saved" in [line["event"] for line in daemon.log()]


async def test_pins_that_the_limit_cannot_hold_are_refused_unless_forced(tmp_path: Path) -> None:
    async with running(tmp_path, {"chat": {"mib": 60}, "small": {"mib": 60}}) as daemon:
        await daemon.control("POST", "models/chat/pin")
        refused = await daemon.ask("POST", "/v1/control/models/small/pin", {})
        assert (refused.status, refused.json["error"]["code"]) == (507, "does_not_fit")
        assert refused.json["error"]["details"]["pinned_bytes"] == 120 * MIB
        assert (await daemon.control("GET", "models"))["models"][1]["pinned"] is False
        await daemon.control("POST", "models/small/pin", {"force": True})
        assert (await daemon.control("GET", "models"))["models"][1]["pinned"] is True


async def test_a_lower_limit_evicts_before_it_answers(tmp_path: Path) -> None:
    async with running(tmp_path, TWO, daemon={"poll_interval": "1h"}) as daemon:
        await daemon.control("POST", "models/small/load")
        await daemon.control("POST", "models/chat/load")
        done = await daemon.control("PATCH", "limits", {"max_memory": "50M"})
        assert (done["evicted"], done["level"], done["warnings"]) == (["small"], "ok", [])
        assert done["memory"]["soft_limit"] == 50 * MIB
        assert daemon.engine.loaded == {"chat"}
        (decision,) = [line for line in daemon.log() if line["event"] == "decision"]
        assert "over the soft limit 50.0 MiB (omlxd limit)" in decision["reason"]
        assert (decision["binding"], decision["limit_origin"]) == ("max_memory", "limit")


@pytest.mark.parametrize("policy", ["graceful", "reference"])
async def test_a_lower_limit_names_the_requests_that_it_costs(tmp_path: Path, policy: str) -> None:
    async with running(tmp_path, TWO, engine=endless(), daemon={"policy": policy, "poll_interval": "1h"}) as daemon:
        stayed, _ = await talking(daemon, "chat")
        gone, request = await talking(daemon, "small")
        await daemon.control("POST", "models/chat/pin")
        done = await daemon.control("PATCH", "limits", {"max_memory": "50M"})
        assert done["evicted"] == ["small"]
        parked, aborted = ({"small": [request]}, {}) if policy == "graceful" else ({}, {"small": [request]})
        assert (done["parked"], done["aborted"], done["postponed"], done["cancelled"]) == (parked, aborted, [], [])
        for each in (stayed, gone):
            each.cancel()


@pytest.mark.parametrize(("policy", "kind"), [("graceful", "postponed"), ("reference", "cancelled")])
async def test_a_lower_limit_names_the_load_that_it_stops(tmp_path: Path, policy: str, kind: str) -> None:
    slow = FakeEngine("thread", slice_bytes=MIB, step_s=0.02)
    async with running(tmp_path, TWO, engine=slow, daemon={"policy": policy, "poll_interval": "1h"}) as daemon:
        await daemon.control("POST", "models/small/load", {"wait": False})
        async with asyncio.timeout(20):
            while (await daemon.control("GET", "status"))["memory"]["active"] < 3 * MIB:
                pass
        done = await daemon.control("PATCH", "limits", {"max_memory": "2M"})
        assert {name: done[name] for name in ("evicted", "postponed", "cancelled")} == {
            "evicted": [],
            "postponed": [],
            "cancelled": [],
            kind: ["small"],
        }


async def test_a_limit_outlives_the_daemon_until_the_manifest_changes_and_a_flag_beats_both(tmp_path: Path) -> None:
    async def soft(daemon: RunningDaemon) -> tuple[float, str]:
        memory = (await daemon.control("GET", "status"))["memory"]
        return memory["soft_limit"] / MIB, memory["limit_origin"]

    async with running(tmp_path, TWO) as daemon:
        assert await soft(daemon) == (100, "manifest")
        answer = await daemon.control("PATCH", "limits", {"max_memory": "70M"})
        assert answer["memory"]["limit_origin"] == "limit"
    async with running(tmp_path, TWO) as daemon:
        assert await soft(daemon) == (70, "limit")
    async with running(tmp_path, TWO, max_memory="60M") as daemon:
        assert await soft(daemon) == (60, "command_line")
    async with running(tmp_path, TWO, daemon={"max_memory": "90M"}) as daemon:
        assert await soft(daemon) == (90, "manifest")


async def test_no_limit_is_a_limit_of_zero(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        done = await daemon.control("PATCH", "limits", {"max_memory": 0})
        assert done["memory"]["soft_limit"] == 0


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"max_memory": "lots"}, 400, "`lots` is not a size"),
        ({"max_memory": "0.5"}, 400, "`0.5` has no unit"),
        ({"max_memory": 8}, 400, "`8` is 8 B, too little"),
        ({"max_memory": "300M"}, 400, "hard_limit"),
        ({"max_memory": 1.5}, 400, "`max_memory`"),
        ({}, 400, "`max_memory`: is missing"),
        ({"max_memory": "50M", "forse": True}, 400, "`forse`"),
        ({"max_memory": "30M"}, 507, "pinned"),
    ],
)
async def test_a_limit_that_makes_no_sense_changes_nothing(tmp_path: Path, body: Any, status: int, words: str) -> None:
    async with running(tmp_path, {"chat": {"mib": 40, "pin": True}}) as daemon:
        answer = await daemon.ask("PATCH", "/v1/control/limits", body)
        assert answer.status == status
        assert words in answer.json["error"]["message"]
        assert (await daemon.control("GET", "status"))["memory"]["soft_limit"] == 100 * MIB


async def test_a_limit_below_a_pin_is_accepted_with_force_and_says_what_it_means(tmp_path: Path) -> None:
    async with running(tmp_path, {"chat": {"mib": 40, "pin": True}}) as daemon:
        done = await daemon.control("PATCH", "limits", {"max_memory": "30M", "force": True})
        assert done["level"] == "exhausted"
        assert done["warnings"]
        assert (await daemon.ask("GET", "/health")).json["status"] == "exhausted"
        assert await daemon.states() == {"chat": "loaded"}


async def test_requests_are_listed_and_can_be_aborted_by_id(tmp_path: Path) -> None:
    async with running(tmp_path, TWO, engine=endless()) as daemon:
        request, request_id = await talking(daemon)
        (view,) = (await daemon.control("GET", "requests"))["requests"]
        assert (view["id"], view["model"], view["state"]) == (request_id, "chat", "decode")
        done = await daemon.control("DELETE", f"requests/{request_id}")
        assert (done["id"], done["aborted"]) == (request_id, True)
        assert (await daemon.control("GET", "requests"))["requests"] == []
        assert (await request).json["error"]["code"] == "request_aborted"
        gone = await daemon.ask("DELETE", f"/v1/control/requests/{request_id}")
        assert (gone.status, gone.json["error"]["code"]) == (404, "request_not_found")


async def test_events_are_numbered_and_read_from_where_one_left_off(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        first = (await daemon.ask("GET", "/v1/control/events")).lines
        assert [event["seq"] for event in first] == list(range(1, len(first) + 1))
        await daemon.control("POST", "models/chat/load")
        later = (await daemon.ask("GET", f"/v1/control/events?since={first[-1]['seq']}")).lines
        assert [event["event"] for event in later] == ["load_started", "engine_started", "load_finished"]
        assert [event["seq"] for event in later] == [len(first) + number for number in (1, 2, 3)]


async def test_events_are_followed_live_until_the_daemon_ends(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        following = asyncio.create_task(daemon.ask("GET", "/v1/control/events?since=0&follow=true"))
        await daemon.control("POST", "models/chat/load")
        daemon.stop.ask()
        names = [event["event"] for event in (await following).lines]
        assert names[:2] == ["heartbeat", "daemon_starting"]
        assert "load_finished" in names
        assert names[-1] == "daemon_draining"


async def test_a_plan_judges_models_beside_what_is_in_memory(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        await daemon.control("POST", "models/chat/load")
        plan = await daemon.control("GET", "plan?model=small&model=default&context=512&concurrency=2")
        assert (plan["schema"], plan["daemon"], plan["binding"]) == (1, True, "max_memory")
        small, chat = plan["models"]
        assert (small["names"], small["context"], small["concurrency"]) == (["small"], 512, 2)
        assert (small["weights_bytes"], small["fits"], chat["fits"]) == (30 * MIB, True, True)
        assert plan["together"]["weights_bytes"] == 70 * MIB
        tight = await daemon.control("GET", "plan?model=small&max_memory=45M")
        assert (tight["soft_limit"], tight["models"][0]["evict"]) == (45 * MIB, ["chat"])
        every = await daemon.control("GET", "plan")
        assert ([model["names"] for model in every["models"]], every["together"]) == ([["chat"], ["small"]], None)
        assert every["left_out"] == []


@pytest.mark.parametrize(
    ("query", "status"),
    [("model=smal", 404), ("context=99999999", 400), ("concurrency=0", 400), ("context=x", 400), ("max_memory=x", 400)],
)
async def test_a_plan_that_makes_no_sense_is_refused(tmp_path: Path, query: str, status: int) -> None:
    async with running(tmp_path, TWO) as daemon:
        assert (await daemon.ask("GET", f"/v1/control/plan?{query}")).status == status


@pytest.mark.parametrize("query", ["since=x", "since=-1", "since=" + "9" * 50, "follow=maybe"])
async def test_a_query_that_makes_no_sense_is_named(tmp_path: Path, query: str) -> None:
    async with running(tmp_path, TWO) as daemon:
        answer = await daemon.ask("GET", f"/v1/control/events?{query}")
        assert answer.status == 400
        assert answer.json["error"]["details"]["param"] == query.split("=")[0]


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b'{"wait": "yes"}', b'{"wate": true}', b"[" * 100_000])
async def test_a_body_that_makes_no_sense_is_refused_and_loads_nothing(tmp_path: Path, body: bytes) -> None:
    async with running(tmp_path, TWO) as daemon:
        answer = await daemon.ask("POST", "/v1/control/models/chat/load", body)
        assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_request")
        assert (await daemon.states())["chat"] == "unloaded"


async def test_stop_drains_and_ends_the_daemon(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        answer = await daemon.control("POST", "stop")
        assert answer["state"] == "draining"
        assert (await daemon.ended()).cut_short is False
        assert daemon.engine.closed


async def test_the_log_file_has_what_events_has(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        await daemon.control("POST", "models/chat/load")
        events = (await daemon.ask("GET", "/v1/control/events")).lines
        assert json.loads(json.dumps(daemon.log())) == events
