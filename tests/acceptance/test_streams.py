"""Several clients at once: everybody progresses, everybody gets mlx-lm's text, and nobody pays for one who left."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from omlxd.engine import mlxlm
from omlxd.engine.text import ChatCodec
from tests.acceptance.harness import Daemon, chat_body, has_text, in_thread, text_of
from tests.engine.driver import reference
from tests.engine.test_generation import same_until_a_tie

pytestmark = pytest.mark.mlx

LONG_PROMPT = "tell me more " * 1500  # 19,500 tokens of a model whose tokens are bytes


@pytest.fixture(scope="module")
def daemon(small: Callable[..., Path]) -> Iterator[Daemon]:
    """One daemon for all tests here whose models it is enough to have; it has to end with 0."""
    with Daemon({"chat": small(), "one": small(1), "two": small(2)}) as made:
        made.control("POST", "models/chat/load")
        yield made


def codec_of(folder: Path) -> ChatCodec:
    config = json.loads((folder / "config.json").read_text())
    return ChatCodec(mlxlm.load_tokenizer(folder, config), config["vocab_size"], None)


def test_two_clients_stream_from_two_models_at_the_same_time(daemon: Daemon) -> None:
    for name in ("one", "two"):
        daemon.control("POST", f"models/{name}/load")
    arrived: list[str] = []
    both = threading.Barrier(2)

    def read(name: str) -> int:
        with daemon.chat_stream(name, "Go on.", max_tokens=400) as stream:
            stream.until(has_text)
            both.wait(30)
            count = 1
            for frame in stream:
                if has_text(frame):
                    count += 1
                    arrived.append(name)
        return count

    readers = [in_thread(lambda name=name: read(name)) for name in ("one", "two")]
    assert [reader.result(60) for reader in readers] == [400, 400]
    turns = sum(first != second for first, second in itertools.pairwise(arrived))
    assert turns > 20, "one stream stood still while the other ran"


@pytest.mark.slow
def test_greedy_text_is_mlx_lms_alone_and_together(
    daemon_of: Callable[..., Daemon], tiny_model: Callable[..., Path]
) -> None:
    kinds = {"llama": 3_000_000, "gemma3_text": 6_000_000, "qwen3_moe": 4_000_000, "mamba2": 3_000_000}
    folders = {kind: tiny_model(kind, size_bytes) for kind, size_bytes in kinds.items()}
    daemon = daemon_of(folders)
    contents = ["Why is the sky blue?", "Count to ten.", "Name three colours of the rainbow, please."]
    for kind, folder in folders.items():
        same_as_mlx_lm(daemon, kind, folder, contents, max_tokens=40)


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(300)
def test_the_real_models_greedy_text_is_mlx_lms_alone_and_together(
    daemon_of: Callable[..., Daemon], smollm2_path: Path
) -> None:
    daemon = daemon_of({"chat": smollm2_path})
    same_as_mlx_lm(daemon, "chat", smollm2_path, ["Why is the sky blue?", "Count to ten."], max_tokens=6)


def same_as_mlx_lm(daemon: Daemon, model: str, folder: Path, contents: list[str], *, max_tokens: int) -> None:
    """Through the API: each prompt alone, then all of them at once and streamed."""
    codec = codec_of(folder)
    system = {"role": "system", "content": "Be brief."}
    messages = {content: [system, {"role": "user", "content": content}] for content in contents}
    prompts = {content: codec.encode_chat(messages[content]) for content in contents}
    expected = reference(folder, prompts, max_tokens)

    def alone(content: str) -> str:
        answer = daemon.chat(model, "", messages=messages[content], max_tokens=max_tokens).json
        assert answer["usage"]["prompt_tokens"] == len(prompts[content])
        return str(answer["choices"][0]["message"]["content"])

    def streamed(content: str) -> str:
        with daemon.chat_stream(model, "", messages=messages[content], max_tokens=max_tokens) as stream:
            return text_of(list(stream))

    one_by_one = {content: alone(content) for content in contents}
    together = {content: in_thread(lambda content=content: streamed(content)) for content in contents}
    for content, (tokens, margins) in expected.items():
        tokens, margins = until_end(tokens, margins, codec.end_ids)
        for text in (one_by_one[content], together[content].result(120)):
            assert same_until_a_tie(text, codec, tokens, margins), (model, content, text)


def until_end(tokens: list[int], margins: list[float], end_ids: frozenset[int]) -> tuple[list[int], list[float]]:
    """mlx-lm's `generate_step` goes on after the end of the answer."""
    length = next((at for at, token in enumerate(tokens) if token in end_ids), len(tokens))
    return tokens[:length], margins[:length]


def test_a_client_that_leaves_in_the_middle_of_a_stream_ends_its_request_and_the_others_go_on(daemon: Daemon) -> None:
    with daemon.chat_stream("chat", "Stay.", max_tokens=500) as stays, daemon.events(daemon.last_seq) as events:
        stays.until(has_text)
        with daemon.chat_stream("chat", "Leave.", max_tokens=20_000) as leaves:
            leaves.until(has_text)
            assert len(daemon.requests) == 2
        gone = events.until(lambda event: event["event"] == "request_aborted")
        assert gone["error"]["message"].endswith("the caller went away")
        assert gone["generated_tokens"] < 20_000
        frames = list(stays)
    assert frames[-2]["choices"][0]["finish_reason"] == "length"
    daemon.until_idle()
    assert [model["kv_bytes"] for model in daemon.control("GET", "models")["models"]] == [0, 0, 0]


def test_a_client_that_leaves_in_the_middle_of_a_long_prompt_costs_no_more_than_a_chunk(daemon: Daemon) -> None:
    assert daemon.chat("chat", "Hello.", max_tokens=4).status == 200
    daemon.until_idle()
    before, since = daemon.memory["active"], daemon.last_seq
    with daemon.chat_stream("chat", LONG_PROMPT, max_tokens=8) as leaves:
        while not (seen := daemon.requests) or not seen[0]["prefilled_tokens"]:
            pass
        assert seen[0]["state"] == "prefill"
        leaves.close()
    daemon.until_idle()
    assert not daemon.requests
    (aborted,) = daemon.log("request_aborted", since=since)
    assert aborted["generated_tokens"] == 0
    assert daemon.memory["active"] < before + 2**20
    assert daemon.chat("chat", "Hello.", max_tokens=4).status == 200


def test_a_whole_answer_whose_client_leaves_is_not_made(daemon: Daemon) -> None:
    with daemon.events(daemon.last_seq) as events:
        with daemon.stream("POST", "/v1/chat/completions", chat_body("chat", "Go on.", max_tokens=20_000)):
            events.until(lambda event: event["event"] == "request_started")
        events.until(lambda event: event["event"] == "request_aborted")
    daemon.until_idle()
