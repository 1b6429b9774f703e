"""What a client is told of the request that it wants measured: the times of tokens, and memory beside predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omlxd.daemon.measured import Measured
from omlxd.engine.events import Prefilled
from omlxd.engine.orders import MIB
from tests.daemon.test_openai_api import frames
from tests.fakes.daemon import RunningDaemon, running
from tests.fakes.engine import FakeEngine

PATH = "/v1/completions"
ONE: dict[str, Any] = {"chat": {"mib": 40}}
PROMPT = list(range(1, 601))


class Linear:
    """A token takes 10 bytes of KV cache; a step 2 bytes a token and 1 for each pair of it with one of the context."""

    certain = True

    def kv_bytes(self, tokens: int, rows: int = 1, chunk: int = 0) -> int:
        return 10 * tokens * rows

    def prefill_transient_bytes(self, chunk: int, context: int) -> int:
        return 2 * chunk + chunk * context

    def decode_transient_bytes(self, rows: int, context: int) -> int:
        return 0


def step(done: int, *, transient: int, kv: int, live: int, peak: int, total: int = 300) -> Prefilled:
    return Prefilled(1, "r1", done, total, transient, kv, 0, live, peak)


def test_the_largest_step_and_the_worst_moment_are_told_of_a_prompt_beside_what_was_predicted_for_them() -> None:
    measured = Measured()
    measured.prefilled(Linear(), step(200, transient=900, kv=2000, live=5000, peak=7900), 200)
    measured.prefilled(Linear(), step(300, transient=400, kv=3000, live=7000, peak=8300), 100)
    told = measured.to_json()
    assert told["kv"] == {"tokens": 299, "bytes": 3000, "predicted_bytes": 2990}  # its last token is not run yet
    predicted_bytes = 2 * 200 + 200 * 200
    assert told["transient"] == {"tokens": 200, "bytes": 900, "predicted_bytes": predicted_bytes, "chunk_tokens": 200}
    assert told["peak"] == {"tokens": 299, "bytes": 3300, "predicted_bytes": 2000 + predicted_bytes}


@pytest.mark.parametrize(
    "event", [step(1, transient=0, kv=8, live=0, peak=9, total=1), step(9, transient=0, kv=0, live=0, peak=9)]
)
def test_a_step_that_measured_nothing_leaves_nothing(event: Prefilled) -> None:
    measured = Measured()
    measured.prefilled(Linear(), event, event.done)
    told = measured.to_json()
    assert (told["kv"], told["transient"], told["peak"]) == (None, None, None)


def test_tokens_that_come_together_have_the_same_time() -> None:
    measured = Measured()
    measured.generated(0.5, 1)
    measured.generated(0.75, 2)
    measured.generated(0.8, 0)
    assert measured.to_json()["token_s"] == [0.5, 0.75, 0.75]


async def measure(daemon: RunningDaemon, **fields: Any) -> list[dict[str, Any]]:
    """What the last frames of a measured stream tell, in the order in which the answers ended."""
    body = {"model": "chat", "prompt": PROMPT, "max_tokens": 20, "stream": True, "timings": True, **fields}
    answer = await daemon.ask("POST", PATH, body)
    assert answer.status == 200, answer.body
    return [frame["omlxd"] for frame in frames(answer.body)[:-1] if "omlxd" in frame]


async def test_a_stream_tells_when_each_token_came_and_what_its_memory_took(tmp_path: Path) -> None:
    engine = FakeEngine("thread", step_s=0.002)
    engine.measures_prefill, engine.chunk_token_bytes = True, 100
    async with running(tmp_path, ONE, engine=engine) as daemon:
        (told,) = await measure(daemon, ignore_eos=True)
        measured = told["measured"]
        assert len(measured["token_s"]) == told["generated_tokens"] == 20
        assert measured["token_s"] == sorted(measured["token_s"])
        assert measured["token_s"][0] == pytest.approx(told["first_token_s"], abs=1e-5)
        assert measured["kv"]["tokens"] == len(PROMPT) - 1
        assert measured["kv"]["bytes"] > 0 < measured["kv"]["predicted_bytes"]
        assert measured["model_kv_bytes"] >= measured["kv"]["bytes"]
        assert measured["peak"]["bytes"] >= measured["transient"]["bytes"] > 0
        names = [event["request"] for event in daemon.log() if event["event"] == "request_finished"]
        assert names == [measured["request"]]


async def test_a_measured_stream_may_leave_the_prefix_cache_alone_and_go_on_behind_the_end(tmp_path: Path) -> None:
    settings = {"policy": "graceful", "min_available": 0}
    async with running(tmp_path, ONE, daemon=settings) as daemon:
        apart = await measure(daemon, cache_prompt=False, ignore_eos=True, prompt=[PROMPT, PROMPT])
        assert [told["generated_tokens"] for told in apart] == [20, 20]
        assert (await daemon.control("GET", "status"))["memory"]["prefix_cache"] == 0
        (plain,) = await measure(daemon)
        assert plain["generated_tokens"] < 20
        assert (await daemon.control("GET", "status"))["memory"]["prefix_cache"] > 0


async def test_what_is_not_asked_for_is_not_told(tmp_path: Path) -> None:
    async with running(tmp_path, ONE) as daemon:
        (told,) = await measure(daemon, timings=False)
        assert "measured" not in told


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"timings": True, "stream": False}, "timings"),
        ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos"),
    ],
)
async def test_what_contradicts_itself_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    async with running(tmp_path, ONE) as daemon:
        answer = await daemon.ask("POST", PATH, {"model": "chat", "prompt": "hello", **fields})
        assert (answer.status, answer.json["error"]["param"]) == (400, param)
        assert (await daemon.states())["chat"] == "unloaded"


async def test_a_model_shows_what_its_last_load_took_and_found(tmp_path: Path) -> None:
    async with running(tmp_path, ONE) as daemon:
        before = (await daemon.control("GET", "models"))["models"][0]
        assert (before["load_s"], before["load_disk_bytes"], before["vocab_size"]) == (None, None, None)
        await daemon.control("POST", "models/chat/load")
        after = (await daemon.control("GET", "models"))["models"][0]
        assert after["load_s"] == 0.25
        assert after["vocab_size"] > 0
        assert after["weights_bytes"] == 40 * MIB
