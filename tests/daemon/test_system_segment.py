"""Where a conversation's system segment ends, whatever the template makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from omlxd.core.errors import InvalidRequest
from omlxd.daemon.wish import Prompt

SYSTEM = "You are a patient assistant. " * 10
Messages = Sequence[Mapping[str, Any]]


class Codec:
    """One token a character of what its template makes of the messages."""

    vocab_size = 0x110000
    context_length = None

    def __init__(self, template: Callable[[Messages], str]) -> None:
        self._template = template

    def encode_chat(self, messages: Messages, tools: Messages = (), thinking: bool | None = None) -> list[int]:
        return [ord(letter) for letter in self._template(messages)]

    def encode_text(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def chatml(messages: Messages) -> str:
    return "".join(f"<|{each['role']}>{each['content']}<|end>\n" for each in messages) + "<|assistant>"


def folded(messages: Messages) -> str:
    """The system message becomes part of the first turn, as with Gemma, and somebody has to speak."""
    if [each["role"] for each in messages][:2] != ["system", "user"]:
        raise InvalidRequest("the template wants a question")
    system, user, *rest = messages
    return f"<start>user\n{system['content']}\n\n{user['content']}<end>\n" + chatml(rest)


def without_system(messages: Messages) -> str:
    if any(each["role"] == "system" for each in messages) and messages[-1]["content"] in ("0", "1"):
        raise InvalidRequest("the template takes no system message")
    return chatml(messages)


def chat(*contents: str) -> tuple[dict[str, str], ...]:
    roles = ("system", *("user", "assistant") * len(contents))
    return tuple({"role": role, "content": content} for role, content in zip(roles, contents, strict=False))


@pytest.mark.parametrize(
    ("template", "segment"),
    [(chatml, f"<|system>{SYSTEM}<|end>\n<|user>"), (folded, f"<start>user\n{SYSTEM}\n\n"), (without_system, "")],
)
@pytest.mark.parametrize("question", ["What is MLX?", "0", "1", "01", ""])
def test_it_ends_where_the_question_begins(template: Callable[[Messages], str], segment: str, question: str) -> None:
    messages = chat(SYSTEM, question)
    if template is without_system:
        messages = (*messages, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"})
    encoded = Prompt(messages=messages).encode(Codec(template))
    assert "".join(map(chr, encoded.tokens[: encoded.shared_tokens])) == segment


def test_later_turns_change_nothing() -> None:
    codec = Codec(chatml)
    lengths = {
        Prompt(messages=chat(SYSTEM, *turns)).encode(codec).shared_tokens
        for turns in (["Hi"], ["Hi", "Hello", "How are you?"], ["What?", "This."])
    }
    assert lengths == {len(f"<|system>{SYSTEM}<|end>\n<|user>")}


@pytest.mark.parametrize(
    "prompt",
    [
        Prompt(messages=({"role": "user", "content": SYSTEM},)),
        Prompt(messages=chat("Be short.", "Hi")),
        Prompt(text=SYSTEM),
        Prompt(tokens=(1, 2, 3)),
    ],
)
def test_without_a_system_message_worth_keeping_there_is_none(prompt: Prompt) -> None:
    assert prompt.encode(Codec(chatml)).shared_tokens == 0


def test_a_conversation_of_system_messages_alone_shares_them_with_chats() -> None:
    encoded = Prompt(messages=chat(SYSTEM)).encode(Codec(chatml))
    shared = "".join(map(chr, encoded.tokens[: encoded.shared_tokens]))
    assert shared.startswith(f"<|system>{SYSTEM}<|end>")
