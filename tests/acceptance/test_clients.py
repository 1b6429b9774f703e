"""Real clients against a real daemon with a real model: both API styles, over TCP, streamed and whole."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.acceptance.harness import TIMEOUT_S, Daemon, chat_body

pytestmark = pytest.mark.mlx

GREEDY = {"temperature": 0}  # the client has no argument for it any more
HELLO: Any = [{"role": "user", "content": "Tell me about the sea."}]


@pytest.fixture(scope="module")
def daemon(tiny_model: Callable[..., Path]) -> Iterator[Daemon]:
    """One daemon for all tests here; it has to end with 0."""
    with Daemon({"chat": {"path": tiny_model("llama", 5_000_000, seed=4), "aliases": ["gpt-4o"]}}) as made:
        yield made


def test_the_openai_client_holds_a_streamed_conversation(openai_client: openai.OpenAI) -> None:
    messages, options = list(HELLO), {"model": "gpt-4o", "temperature": 0, "max_completion_tokens": 12}
    prompts = []
    for _ in range(2):
        stream = openai_client.chat.completions.create(
            messages=messages, stream=True, stream_options={"include_usage": True}, **options
        )
        *chunks, last = list(stream)
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        whole = openai_client.chat.completions.create(messages=messages, **options)
        assert said == whole.choices[0].message.content
        assert last.usage is not None
        assert last.usage.completion_tokens == 12
        prompts.append(last.usage.prompt_tokens)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
    assert prompts[1] > prompts[0]


def test_choices_have_random_numbers_of_their_own_and_the_seed_brings_them_back(openai_client: openai.OpenAI) -> None:
    options: Any = {
        "model": "chat",
        "messages": HELLO,
        "max_tokens": 10,
        "seed": 5,
        "frequency_penalty": 0.5,
        "extra_body": {"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1},
    }

    def texts(**more: Any) -> list[str | None]:
        answer = openai_client.chat.completions.create(**options, **more)
        return [choice.message.content for choice in answer.choices]

    first = texts(n=3)
    assert len(set(first)) == 3
    assert texts(n=3) == first
    assert texts() == first[:1]


def test_a_completion_tells_how_likely_each_token_was(openai_client: openai.OpenAI) -> None:
    answer = openai_client.completions.create(model="chat", prompt="The sea", max_tokens=5, temperature=0, logprobs=2)
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == choice.text
    for token, logprob, top in zip(
        choice.logprobs.tokens or (),
        choice.logprobs.token_logprobs or (),
        choice.logprobs.top_logprobs or (),
        strict=True,
    ):
        assert top[token] == max(top.values()) == logprob
        assert logprob <= 0


def test_a_bias_forces_and_forbids_tokens(openai_client: openai.OpenAI) -> None:
    def said(**bias: float) -> str | None:
        answer = openai_client.chat.completions.create(
            model="chat", messages=HELLO, max_tokens=4, temperature=0, logprobs=True, logit_bias=bias
        )
        assert answer.choices[0].logprobs is not None
        return "".join(token.token for token in answer.choices[0].logprobs.content or [])

    free = said()
    assert len(free or "") == 4
    (forced,) = set(said(**{"70": 100}) or "")
    assert forced not in (said(**{"70": -100}) or "")


def test_the_anthropic_client_holds_a_streamed_conversation(anthropic_client: anthropic.Anthropic) -> None:
    messages = list(HELLO)
    options: Any = {"model": "chat", "max_tokens": 12, "system": "Be brief.", "extra_body": GREEDY}
    for _ in range(2):
        with anthropic_client.messages.stream(messages=messages, **options) as stream:
            said = "".join(stream.text_stream)
            final = stream.get_final_message()
        whole = anthropic_client.messages.create(messages=messages, **options)
        (block,) = whole.content
        assert block.type == "text"
        assert block.text == said
        assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)
        counted = anthropic_client.messages.count_tokens(model="chat", messages=messages, system="Be brief.")
        usage = final.usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]


def test_a_stop_sequence_is_told_to_the_anthropic_client(anthropic_client: anthropic.Anthropic) -> None:
    options: Any = {"model": "chat", "messages": HELLO, "max_tokens": 12, "extra_body": GREEDY}
    (block,) = anthropic_client.messages.create(**options).content
    assert block.type == "text"
    word = block.text[5:7]
    stopped = anthropic_client.messages.create(**options, stop_sequences=["\x01", word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert "".join(each.text for each in stopped.content if each.type == "text") == block.text[: block.text.find(word)]


def test_tools_for_a_model_that_knows_none_are_a_400_that_names_them(openai_client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
    with pytest.raises(openai.BadRequestError) as refused:
        openai_client.chat.completions.create(model="chat", messages=HELLO, tools=tools)
    assert refused.value.param == "tools"


def raw_request(daemon: Daemon, **fields: Any) -> bytes:
    body = json.dumps(chat_body("chat", "Hello.", **fields)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def tcp(daemon: Daemon) -> socket.socket:
    host, _, port = daemon.ready["api"].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=TIMEOUT_S)


def test_pipelined_requests_are_answered_in_order(daemon: Daemon) -> None:
    with tcp(daemon) as peer:
        peer.sendall(raw_request(daemon, max_tokens=3) + raw_request(daemon, max_tokens=5))
        received = b""
        while received.count(b'"total_tokens"') < 2:
            part = peer.recv(65_536)
            assert part, received
            received += part
    assert received.index(b'"completion_tokens":3') < received.index(b'"completion_tokens":5')


def test_a_half_closed_socket_leaves_no_request_behind(daemon: Daemon) -> None:
    with tcp(daemon) as peer:
        peer.sendall(raw_request(daemon, max_tokens=20_000))
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(65_536):
            pass
    daemon.until_idle()
    assert daemon.requests == []
