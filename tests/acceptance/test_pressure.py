"""Over the limit, with real models: who has to go, who is told what, and who stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.acceptance.harness import MIB, Daemon, errors_in, has_text, in_thread, text_of, weights_bytes

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def pair(small: Callable[..., Path]) -> Iterator[Daemon]:
    with Daemon({"one": small(1), "two": small(2)}) as made:
        yield made


@pytest.fixture
def two(pair: Daemon) -> Daemon:
    """One daemon for several tests: two models, neither loaded nor pinned, under a limit that holds both."""
    for name in ("one", "two"):
        pair.control("POST", f"models/{name}/unpin")
        pair.control("POST", f"models/{name}/unload")
    pair.control("PATCH", "limits", {"max_memory": "1G"})
    return pair


def test_under_reference_a_single_model_over_the_limit_ends_its_requests_with_one_error_each_and_stays(
    daemon_of: Callable[..., Daemon], small: Callable[..., Path]
) -> None:
    soft = weights_bytes(small()) + 3 * MIB // 2
    limits = {"max_memory": soft, "hard_limit": soft + 20 * MIB, "prefill_memory_guard": False}
    daemon = daemon_of({"chat": small()}, daemon={**limits, "policy": "reference"})
    daemon.control("POST", "models/chat/load")
    with daemon.chat_stream("chat", "Tell me a long story.", max_tokens=5000) as stream:
        assert stream.response.status == 200
        whole = in_thread(lambda: daemon.chat("chat", "And another one.", max_tokens=5000))
        frames = list(stream)
    answer = whole.result(60)

    assert text_of(frames)
    assert frames[-1] == "[DONE]"
    assert answer.status == 503
    assert int(answer.headers["retry-after"]) >= 1
    for error in (*errors_in(frames), answer.json["error"]):
        assert error["code"] == "request_aborted"
        assert "over the soft limit" in error["message"]
        assert "only loaded model" in error["message"]
    assert len(errors_in(frames)) == 1
    assert len(daemon.log("request_aborted")) == 2

    assert daemon.states == {"chat": "loaded"}
    short = daemon.chat("chat", "Hello.", max_tokens=8)
    assert short.json["usage"]["completion_tokens"] == 8
    daemon.until_event("level_changed", level_now="ok")  # the record follows the requests' ends
    (decision,) = daemon.log("decision")
    assert (decision["action"], decision["victim"]) == ("abort_requests", "chat")
    assert decision["before_bytes"] > soft >= decision["after_bytes"]
    assert not daemon.log("unloaded")


def test_a_limit_below_what_is_loaded_evicts_at_once_without_a_poll(two: Daemon) -> None:
    since = two.last_seq
    for name in ("one", "two"):
        assert two.cli("load", name).returncode == 0
    limited = two.cli("limit", "8MiB")
    assert limited.returncode == 0, limited.stderr
    assert "unloaded `one`" in limited.stderr
    assert two.states == {"one": "unloaded", "two": "loaded"}
    (decision,) = two.log("decision", since=since)
    assert (decision["trigger"], decision["action"], decision["victim"]) == ("limit", "unload", "one")
    assert two.memory["active"] <= 8 * MIB


def test_under_reference_a_busy_model_over_the_limit_ends_its_request_with_the_reason_and_the_other_goes_on(
    daemon_of: Callable[..., Daemon], small: Callable[..., Path]
) -> None:
    limits = {"max_memory": "1G", "policy": "reference"}
    daemon = daemon_of({"busy": small(1), "keep": {"path": small(2), "pin": True}}, daemon=limits)
    daemon.control("POST", "models/keep/load")
    with (
        daemon.chat_stream("keep", "Go on.", max_tokens=600) as kept,
        daemon.chat_stream("busy", "Go on.", max_tokens=20_000) as lost,
    ):
        for stream in (kept, lost):
            stream.until(has_text)
        assert daemon.control("PATCH", "limits", {"max_memory": 10_000_000})["evicted"] == ["busy"]
        (error,) = errors_in(list(lost))
        assert "the model was unloaded" in error["message"]
        assert "over the soft limit" in error["message"]
        frames = list(kept)
    assert frames[-2]["choices"][0]["finish_reason"] == "length"
    assert daemon.states == {"busy": "unloaded", "keep": "loaded"}


def test_a_pin_survives_pressure_though_it_is_the_least_recently_used(two: Daemon) -> None:
    two.control("POST", "models/one/load")
    assert two.cli("pin", "one").returncode == 0
    assert two.chat("two", "Hello.", max_tokens=4).status == 200
    assert two.cli("limit", "8MiB").returncode == 0
    assert two.states == {"one": "loaded", "two": "unloaded"}
    refused = two.cli("run", "two", "Hello.")
    assert refused.returncode == 5
    assert "`one`" in refused.stderr
    assert two.chat("one", "Hello.", max_tokens=4).status == 200


def test_all_pinned_and_over_the_limit_is_told_once_and_shown_and_crashes_nothing(
    daemon_of: Callable[..., Daemon], small: Callable[..., Path]
) -> None:
    pinned = {name: {"path": small(number), "pin": True} for number, name in enumerate(("one", "two"))}
    daemon = daemon_of(pinned, daemon={"max_memory": "1G", "poll_interval": "10ms"})
    daemon.until_event("daemon_ready")
    refused = daemon.cli("limit", "8M")
    assert refused.returncode == 5
    assert "--force" in refused.stderr
    assert daemon.memory["soft_limit"] == 1024 * MIB

    forced = daemon.cli("limit", "8M", "--force")
    assert forced.returncode == 0, forced.stderr
    assert "all 2 loaded models are pinned" in forced.stderr
    for _ in range(20):  # each answers after the enforcer has looked; and it polls a hundred times a second besides
        assert daemon.control("PATCH", "limits", {"max_memory": "8M", "force": True})["level"] == "exhausted"
    assert [event["level_now"] for event in daemon.log("level_changed")] == ["exhausted"]
    assert not daemon.log("decision", "unloaded", "enforcer_error")
    enforcer = daemon.status["enforcer"]
    assert enforcer["level"] == "exhausted"
    assert "pinned" in enforcer["reason"]
    assert "pinned" in daemon.cli("status").stdout
    assert daemon.ask("GET", "/health").json["status"] == "exhausted"
    assert daemon.states == {"one": "loaded", "two": "loaded"}

    assert daemon.cli("limit", "1G").returncode == 0
    assert [event["level_now"] for event in daemon.log("level_changed")] == ["exhausted", "ok"]
    assert daemon.ask("GET", "/health").json["status"] == "ok"


def test_a_pin_that_the_limit_does_not_hold_needs_force(two: Daemon) -> None:
    two.control("POST", "models/one/load", {"pin": True})
    two.control("PATCH", "limits", {"max_memory": "8M"})
    refused = two.cli("pin", "two")
    assert refused.returncode == 5
    assert "--force" in refused.stderr
    assert [model["pinned"] for model in two.cli_json("models")["models"]] == [True, False]
    assert two.cli("pin", "two", "--force").returncode == 0
    assert [model["pinned"] for model in two.cli_json("models")["models"]] == [True, True]
    assert two.cli("unpin", "two").returncode == 0
