"""The product's promise in one run: a real model that is pinned, two that take turns, and a limit that holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acceptance.harness import MIB, Daemon, weights_bytes

ROUNDS = 10
MAX_TOKENS = 4


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.mlx
@pytest.mark.timeout(300)
def test_ten_rounds_of_three_models_where_two_fit_lose_nothing_and_stay_under_the_hard_limit(
    daemon_of: Callable[..., Daemon], smollm2_path: Path, medium: Callable[..., Path]
) -> None:
    one, two = medium(1), medium(2)
    soft = weights_bytes(smollm2_path) + weights_bytes(one) + 20 * MIB
    daemon = daemon_of(
        {"chat": {"path": smollm2_path, "pin": True}, "one": one, "two": two},
        daemon={"max_memory": soft, "hard_limit": soft + 20 * MIB, "poll_interval": "1s"},
    )
    daemon.until_event("daemon_ready")
    for _ in range(ROUNDS):
        for model in ("chat", "one", "two"):
            answer = daemon.cli_json("run", model, "Hello.", "--system", "", "--max-tokens", str(MAX_TOKENS))
            assert answer["text"]
            if answer["finish_reason"] == "length":
                assert answer["generated_tokens"] == MAX_TOKENS
            else:
                assert (model, answer["finish_reason"]) == ("chat", "stop")

    status = daemon.status
    memory = status["memory"]
    assert (memory["soft_limit"], memory["hard_limit"]) == (soft, soft + 20 * MIB)
    assert memory["samples"] > 100
    assert memory["over_hard_samples"] == 0
    assert {model["name"]: model["state"] for model in status["models"]} == {
        "chat": "loaded",
        "one": "unloaded",
        "two": "loaded",
    }
    assert not daemon.log("request_aborted", "request_failed", "load_failed", "load_cancelled", "enforcer_error")

    # Each turn of `one` and `two` but the first costs the other its place: one record each, and nothing else.
    unloads = [event["model"] for event in daemon.log("unloaded")]
    assert unloads == ["one", "two"] * (ROUNDS - 1) + ["one"]
    decisions = daemon.log("decision")
    assert [decision["victim"] for decision in decisions] == unloads
    for decision in decisions:
        considered = {candidate["model"]: candidate for candidate in decision["candidates"]}
        assert set(considered) == {"chat", decision["victim"]}
        assert considered["chat"]["why"] == "pinned"
        assert [name for name, candidate in considered.items() if candidate["chosen"]] == [decision["victim"]]
        assert f"`{decision['victim']}`" in decision["reason"]
        assert decision["seen"]["active_bytes"] == decision["before_bytes"]
        assert decision["before_bytes"] - decision["after_bytes"] == decision["freed_bytes"]
        assert decision["freed_bytes"] == pytest.approx(weights_bytes(one), rel=0.05)
        assert decision["after_bytes"] <= soft
