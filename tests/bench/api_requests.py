"""The requests that are sent to `mlx_lm.server` and to us alike, good ones and bad ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CONTEXT = 4096
"""Tokens that the model's configuration claims; a character is one."""

ASK: Any = [{"role": "user", "content": "How is the weather in Bern?"}]
"""The model answers with a thought, a word and a tool call."""
TALK: Any = [*ASK, {"role": "assistant", "content": "Cold."}, {"role": "user", "content": "And today?"}]
"""The model answers with text alone."""
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": {"type": "object", "properties": {}}},
}
CALLED: Any = {"id": "abc123def", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request; in `body` the model is left out where the case is not about it, and added by who asks."""

    what: str
    method: str
    path: str
    body: Any = None

    @property
    def streams(self) -> bool:
        """Whether the answer should come in pieces."""
        return isinstance(self.body, dict) and self.body.get("stream") is True

    def content(self, model: str) -> bytes | None:
        """What is sent to a server that knows the model by this name."""
        if self.body is None or isinstance(self.body, bytes):
            return self.body
        return json.dumps({"model": model, **self.body} if isinstance(self.body, dict) else self.body).encode()


PLAIN = Asked("plain", "POST", CHAT, {"messages": TALK, "temperature": 0, "max_tokens": 2})


def requests() -> Iterator[Asked]:
    """All of them, in the order of the table."""
    yield Asked("health", "GET", "/health")
    yield Asked("models", "GET", "/v1/models")
    yield Asked("an unknown path", "GET", "/v1/nothing")
    yield from _chats()
    yield Asked("chat at a path without `/v1`", "POST", "/chat/completions", PLAIN.body)
    yield from _completions()
    yield from _bad()


def _chats() -> Iterator[Asked]:
    chat = {"messages": TALK, "temperature": 0, "max_tokens": 64}
    first = {"messages": ASK}
    for what, more in {
        "chat": {},
        "chat, cut by max_tokens": {"max_tokens": 5},
        "chat, max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 5},
        "chat, without max_tokens": {"max_tokens": None},
        "chat, stop": {"stop": ["in Bern"]},
        "chat, stop as a text": {"stop": "in Bern"},
        "chat, seed": {"temperature": 1.0, "seed": 7},
        "chat, two answers": {"n": 2},
        "chat, logprobs": {"logprobs": True, "max_tokens": 3},
        "chat, top_logprobs": {"logprobs": True, "top_logprobs": 2, "max_tokens": 3},
        "chat, logit_bias": {"logit_bias": {"5": 1.5}, "max_tokens": 3},
        "chat, sampling": {
            "top_p": 0.9,
            "top_k": 20,
            "min_p": 0.01,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.1,
        },
        "chat, xtc": {"xtc_probability": 0.1, "xtc_threshold": 0.1},
        "chat, repetition_context_size": {"repetition_context_size": 10},
        "chat, tools": {**first, "tools": [TOOL]},
        "chat, a call of a tool that was not offered": first,
        "chat, cut in its reasoning": {**first, "max_tokens": 3},
        "chat, text parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
        "chat, a tool's result": {
            "messages": [
                *ASK,
                {"role": "assistant", "content": None, "tool_calls": [CALLED]},
                {"role": "tool", "content": "sunny", "tool_call_id": "abc123def"},
            ],
            "tools": [TOOL],
        },
        "chat, chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
        "chat, notes for the record": {"user": "me", "store": False, "metadata": {"run": "1"}, "service_tier": "auto"},
        "stream": {"stream": True},
        "stream, usage": {"stream": True, "stream_options": {"include_usage": True}},
        "stream, tools": {**first, "stream": True, "tools": [TOOL]},
        "stream, top_logprobs": {"stream": True, "logprobs": True, "top_logprobs": 2, "max_tokens": 3},
        "stream, stop": {"stream": True, "stop": ["in Bern"]},
    }.items():
        yield Asked(what, "POST", CHAT, {key: value for key, value in {**chat, **more}.items() if value is not None})


def _completions() -> Iterator[Asked]:
    base = {"prompt": "Once", "temperature": 0, "max_tokens": 12}
    for what, more in {
        "completion": {},
        "completion, logprobs": {"logprobs": 2},
        "completion, token ids": {"prompt": [40, 41, 42]},
        "completion, two prompts": {"prompt": ["Once", "Twice"]},
        "completion, echo": {"echo": True},
        "completion stream": {"stream": True},
        "completion stream, usage": {"stream": True, "stream_options": {"include_usage": True}},
    }.items():
        yield Asked(what, "POST", COMPLETIONS, {**base, **more})


def _bad() -> Iterator[Asked]:
    yield Asked("no body", "POST", CHAT, b"")
    yield Asked("broken JSON", "POST", CHAT, b'{"messages": [')
    yield Asked("no UTF-8", "POST", CHAT, b'{"messages": "\xff"}')
    yield Asked("a list", "POST", CHAT, [])
    for what, body in {
        "no messages": {},
        "empty messages": {"messages": []},
        "messages as a text": {"messages": "Hi"},
        "a message without a role": {"messages": [{"content": "Hi"}]},
        "an unknown role": {"messages": [{"role": "wizard", "content": "Hi"}], "max_tokens": 4},
        "an image": {
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
        },
        "max_tokens as a text": {"messages": TALK, "max_tokens": "5"},
        "max_tokens 0": {"messages": TALK, "max_tokens": 0},
        "temperature -1": {"messages": TALK, "temperature": -1},
        "temperature 5": {"messages": TALK, "temperature": 5, "max_tokens": 4},
        "top_p 2": {"messages": TALK, "top_p": 2},
        "stop as a number": {"messages": TALK, "stop": 5, "max_tokens": 4},
        "logit_bias of words": {"messages": TALK, "logit_bias": {"word": 1}},
        "a misspelt field": {"messages": TALK, "max_tokns": 4, "max_tokens": 4},
        "response_format json_object": {"messages": TALK, "response_format": {"type": "json_object"}, "max_tokens": 4},
        "tool_choice required": {"messages": ASK, "tools": [TOOL], "tool_choice": "required", "max_tokens": 64},
        "a prompt beyond the context": {
            "messages": [{"role": "user", "content": "x" * (CONTEXT + 1)}],
            "max_tokens": 4,
        },
        "an unknown model": {
            "messages": ASK,
            "model": "chatt",
            "max_tokens": 4,
        },  # the last: their server drops its own
    }.items():
        yield Asked(what, "POST", CHAT, body)
