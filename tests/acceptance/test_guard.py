"""The guard, with real models: prompts that barely fit pass, and memory that is nobody's stops nobody for good."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from omlxd.core.costs import costs_of_config
from omlxd.daemon.model_files import read_model_folder
from tests.acceptance import ballasted_daemon
from tests.acceptance.harness import MIB, Daemon, weights_bytes

pytestmark = pytest.mark.mlx

BALLAST_BYTES = 200 * MIB


@pytest.mark.slow
def test_a_prompt_of_8k_tokens_passes_under_weights_and_kv_and_20_mib(
    daemon_of: Callable[..., Daemon], tiny_model: Callable[..., Path]
) -> None:
    folder = tiny_model("llama", 3_000_000, layers=2)
    files = read_model_folder(folder)
    costs = costs_of_config(files.config, files.element_bytes, None, "cpu")
    cap = files.weights_bytes + costs.kv_bytes(8192 + 256) + 20 * MIB
    assert costs.prefill_transient_bytes(256, 8192) > 20 * MIB  # so the usual chunk would pass it

    daemon = daemon_of({"chat": folder}, daemon={"max_memory": cap, "hard_limit": cap})
    answer = daemon.chat("chat", "x" * 8150, max_tokens=2)

    assert answer.status == 200, answer.body
    assert answer.json["usage"]["completion_tokens"] == 2
    assert 8150 < answer.json["usage"]["prompt_tokens"] <= 8192
    memory = daemon.memory
    assert memory["samples"] > 0
    assert memory["over_hard_samples"] == 0
    assert not daemon.log("decision")


def ballast(daemon: Daemon, held_bytes: int) -> None:
    """Have so many bytes held in the daemon's process by nobody it knows; returns when they are."""
    (daemon.home / ballasted_daemon.ASKED).write_text(str(held_bytes))
    held = daemon.home / ballasted_daemon.HELD
    for _ in range(20_000):
        if daemon.control("GET", "models") and held.exists() and held.read_text() == str(held_bytes):
            return
    raise AssertionError("the ballast was not taken on board")


@pytest.mark.slow
def test_memory_that_belongs_to_nobody_is_named_and_small_requests_still_pass(
    daemon_of: Callable[..., Daemon], small: Callable[..., Path]
) -> None:
    soft = weights_bytes(small()) + 100 * MIB
    limits = {"max_memory": soft, "hard_limit": soft + 300 * MIB, "poll_interval": "50ms"}
    daemon = daemon_of({"chat": small()}, daemon=limits, module="tests.acceptance.ballasted_daemon")
    daemon.control("POST", "models/chat/load")

    ballast(daemon, BALLAST_BYTES)
    daemon.until_event("level_changed", level_now="exhausted")
    memory = daemon.memory
    assert memory["unaccounted"] == pytest.approx(BALLAST_BYTES, rel=0.02)
    assert "unaccounted for" in daemon.status["enforcer"]["reason"]
    health = daemon.ask("GET", "/health").json
    assert health["status"] == "exhausted"
    assert health["unaccounted_bytes"] == pytest.approx(BALLAST_BYTES, rel=0.02)
    assert "unaccounted" in daemon.cli("status").stdout

    for number in range(3):
        answer = daemon.chat("chat", f"Hello, number {number}.", max_tokens=8)
        assert answer.status == 200, answer.body
        assert answer.json["usage"]["completion_tokens"] == 8
    assert daemon.states == {"chat": "loaded"}
    assert [event["level_now"] for event in daemon.log("level_changed")] == ["exhausted"]

    ballast(daemon, MIB)
    daemon.until_event("level_changed", level_now="ok")
    assert daemon.ask("GET", "/health").json["status"] == "ok"
    assert daemon.chat("chat", "Hello again.", max_tokens=8).status == 200


@pytest.mark.slow
def test_the_longest_prompt_that_is_accepted_is_never_over_the_soft_limit_at_rest(
    daemon_of: Callable[..., Daemon], tiny_model: Callable[..., Path]
) -> None:
    folder = tiny_model("llama", 3_000_000, layers=2)
    soft = read_model_folder(folder).weights_bytes + 5 * MIB + 4096
    limits = {"max_memory": soft, "hard_limit": soft + 100 * MIB, "poll_interval": "20ms"}
    daemon = daemon_of({"chat": folder}, daemon=limits)
    refused = daemon.chat("chat", "x" * 9000, max_tokens=2)
    assert refused.status == 400
    details = refused.json["error"]["details"]
    template_tokens = details["prompt_tokens"] - 9000
    longest = details["longest_prompt_tokens"]

    assert daemon.chat("chat", "x" * (longest - template_tokens + 1), max_tokens=2).status == 400
    with daemon.chat_stream("chat", "x" * (longest - template_tokens), max_tokens=64) as frames:
        for frame in frames:
            assert "error" not in frame
    memory = daemon.memory
    assert memory["over_hard_samples"] == 0
    assert [each["trigger"] for each in daemon.log("decision") if each["trigger"] != "block"] == []
    assert [each for each in daemon.log("level_changed") if each["level_now"] == "over"] == []
