"""Costs of an architecture that no formula knows: measured from its chunks, kept, and forgotten with its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omlxd.core.learned_costs import LearnedCosts
from omlxd.daemon.state_text import parse_state
from omlxd.engine.orders import MIB
from tests.fakes.daemon import CONFIG, RunningDaemon, manifest, running
from tests.fakes.engine import FakeEngine

MODELS: dict[str, dict[str, Any]] = {"odd": {"mib": 10}, "llama": {"mib": 10}}
HOLDS_BYTES = 3000  # what a token of a chunk holds in passing


def engine() -> FakeEngine:
    fake = FakeEngine("thread", kv_bytes_per_token=2048, context_length=None)
    fake.measures_prefill, fake.chunk_token_bytes = True, HOLDS_BYTES
    return fake


def oddball(folder: Path) -> str:
    text = manifest(folder, MODELS)
    (folder / "odd" / "config.json").write_text(json.dumps(CONFIG | {"model_type": "jamba"}))
    return text


async def chat(daemon: RunningDaemon, model: str, words: int) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "word " * words}], "max_tokens": 2}
    answer = await daemon.ask("POST", "/v1/chat/completions", body)
    assert answer.status == 200, answer.body


def learned(daemon: RunningDaemon, model: str) -> LearnedCosts | None:
    return parse_state(daemon.home.state.read_text()).learned[model].costs


async def test_an_unknown_architecture_is_measured_and_the_figures_survive_a_restart(tmp_path: Path) -> None:
    text = oddball(tmp_path)
    async with running(tmp_path, text, engine=engine()) as daemon:
        for words in (100, 400, 700):
            await chat(daemon, "odd", words)
            await chat(daemon, "llama", words)
    costs = learned(daemon, "odd")
    assert costs is not None
    assert learned(daemon, "llama") is None, "its formula is known"
    predicted_bytes = costs.transient_token_bytes + 256 * costs.transient_pair_bytes
    assert HOLDS_BYTES <= predicted_bytes <= 2 * HOLDS_BYTES
    assert any(line["event"] == "costs_learned" for line in daemon.log())
    async with running(tmp_path, text, engine=FakeEngine("thread")) as again:
        await again.control("POST", "models/odd/load")
        assert learned(again, "odd") == costs


async def test_figures_of_files_that_have_changed_are_forgotten(tmp_path: Path) -> None:
    text = oddball(tmp_path)
    async with running(tmp_path, text, engine=engine()) as daemon:
        await chat(daemon, "odd", 100)
    assert learned(daemon, "odd") is not None
    (tmp_path / "odd" / "README.md").write_text("another model now")
    async with running(tmp_path, text, engine=FakeEngine("thread")) as again:
        await again.control("POST", "models/odd/load")
    assert learned(again, "odd") is None


async def test_status_shows_what_is_used_and_what_is_promised_and_what_belongs_to_nobody(tmp_path: Path) -> None:
    fake = engine()
    async with running(tmp_path, oddball(tmp_path), engine=fake) as daemon:
        await daemon.control("POST", "models/llama/load")
        fake.leak_bytes = 30 * MIB
        status = await daemon.control("GET", "status")
        memory, model = status["memory"], next(each for each in status["models"] if each["name"] == "llama")
        assert memory["used"] == 40 * MIB
        assert memory["committed"] == model["committed_bytes"] == model["weights_bytes"] == 10 * MIB
        assert memory["unaccounted"] == 30 * MIB
        health = await daemon.ask("GET", "/health")
        assert health.json["unaccounted_bytes"] == 30 * MIB
        fake.leak_bytes = 0


async def test_a_prompt_that_can_never_fit_is_a_400_before_any_header_of_a_stream(tmp_path: Path) -> None:
    text = manifest(tmp_path, MODELS, daemon={"max_memory": "12M", "hard_limit": "14M"})
    async with running(tmp_path, text, engine=FakeEngine("thread", context_length=None)) as daemon:
        await daemon.control("POST", "models/llama/load")
        messages = [{"role": "user", "content": "word " * 3000}]
        for stream in (True, False):
            body = {"model": "llama", "messages": messages, "stream": stream}
            answer = await daemon.ask("POST", "/v1/chat/completions", body)
            assert answer.status == 400
            assert answer.json["error"]["code"] == "prefill_memory_exceeded"
            assert "max_memory" in answer.json["error"]["message"]
            assert answer.json["error"]["hint"]
            details = answer.json["error"]["details"]
            assert details["binding"] == "max_memory"
            assert details["estimated_bytes"] > details["limit_bytes"] == 12 * MIB
