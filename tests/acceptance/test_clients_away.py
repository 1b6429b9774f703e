"""Clients that go away one after the other, wherever their request is: nothing of them is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acceptance.harness import CHAT, Daemon, Lines, chat_body, has_text

pytestmark = pytest.mark.mlx

MIB = 2**20
LONG_PROMPT = "tell me more " * 700  # 9,100 tokens
ROUNDS = 20


@pytest.mark.slow
def test_a_hundred_clients_that_go_away_leave_counters_and_memory_as_they_were(
    daemon_of: Callable[..., Daemon], small: Callable[..., Path], tiny_model: Callable[..., Path]
) -> None:
    models = {"chat": tiny_model(), "late": small(), "slow": tiny_model("llama", 20_000_000)}
    daemon = daemon_of(models, daemon={"prefix_cache": 0})
    for name in ("chat", "slow"):
        daemon.control("POST", f"models/{name}/load")
        assert daemon.chat(name, "Hello.", max_tokens=4).status == 200
    daemon.until_idle()
    active = daemon.memory["active"]

    for number in range(ROUNDS):
        _while_its_model_loads(daemon)
        _in_its_prompt(daemon)
        _in_its_answer(daemon)
        _before_a_whole_answer(daemon, number)
    _at_the_door(daemon)

    daemon.until_idle()
    assert daemon.requests == []
    assert len(daemon.log("request_aborted")) == 5 * ROUNDS + 1
    assert [line["message"] for line in daemon.log("api_error")] == []
    assert not daemon.log("request_failed", "request_refused", "engine_failed")
    status = daemon.status
    for model in status["models"]:
        assert (model["running"], model["waiting"], model["parked"], model["kv_bytes"]) == (0, 0, 0, 0)
    weights = sum(model["weights_bytes"] for model in status["models"] if model["state"] == "loaded")
    assert status["memory"]["committed"] == weights
    assert abs(status["memory"]["active"] - active) < MIB
    assert daemon.chat("chat", "Hello.", max_tokens=4).status == 200


def _leave(daemon: Daemon, client: Lines, model: str, *states: str) -> None:
    """Hang up once the request to this model is in one of these states, and wait until it is gone."""
    while not any(request["model"] == model and request["state"] in states for request in daemon.requests):
        pass
    client.close()
    while any(request["model"] == model for request in daemon.requests):
        pass


def _while_its_model_loads(daemon: Daemon) -> None:
    daemon.control("POST", "models/late/unload", {"now": True})
    _leave(daemon, daemon.chat_stream("late", "Hello.", max_tokens=20_000), "late", "waiting", "prefill", "decode")


def _in_its_prompt(daemon: Daemon) -> None:
    _leave(daemon, daemon.chat_stream("chat", LONG_PROMPT, max_tokens=8), "chat", "prefill")


def _in_its_answer(daemon: Daemon) -> None:
    client = daemon.chat_stream("chat", "Hello.", max_tokens=20_000)
    client.until(has_text)
    _leave(daemon, client, "chat", "decode")


def _before_a_whole_answer(daemon: Daemon, number: int) -> None:
    prompt = LONG_PROMPT if number % 2 else "Hello."
    client = daemon.stream("POST", CHAT, chat_body("chat", prompt, max_tokens=20_000))
    _leave(daemon, client, "chat", "waiting", "prefill", "decode")


def _at_the_door(daemon: Daemon) -> None:
    """A slow answer to somebody else leaves no room for a long prompt."""
    daemon.control("POST", "models/late/unload", {"now": True})  # it would make room
    with daemon.chat_stream("slow", "Hello.", max_tokens=20_000) as somebody:
        somebody.until(has_text)
        room = daemon.memory["committed"] + 4 * MIB
        daemon.control("PATCH", "limits", {"max_memory": str(room)})
        for _ in range(ROUNDS):
            waiting = len(daemon.log("request_waiting"))
            client = daemon.chat_stream("chat", LONG_PROMPT, max_tokens=8)
            while len(daemon.log("request_waiting")) == waiting:
                assert daemon.requests[0]["state"] == "waiting"
            _leave(daemon, client, "chat", "waiting")
        daemon.control("PATCH", "limits", {"max_memory": "8G"})
    while daemon.requests:
        pass
