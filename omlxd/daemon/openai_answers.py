"""Answers in OpenAI's shape: the choices of a chat or of a plain completion, whole or as frames of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from omlxd.core.errors import EngineFailed
from omlxd.daemon.request import Generation

DONE = b"data: [DONE]\n\n"


class Shape(Protocol):
    """What differs between the two kinds of completion; a choice is one answer, told apart by its index."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    id_prefix: ClassVar[str]

    def whole(self, index: int, text: str, finish_reason: str) -> dict[str, Any]:
        """The choice of an answer that is complete."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice that begins an answer in a stream, if there is such a thing."""
        ...

    def text(self, index: int, text: str) -> dict[str, Any]:
        """The choice with new text."""
        ...

    def closing(self, index: int, finish_reason: str) -> dict[str, Any]:
        """The choice that ends an answer in a stream."""
        ...


class ChatShape:
    """Choices of `/v1/chat/completions`."""

    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"
    id_prefix: ClassVar[str] = "chatcmpl-"

    def whole(self, index: int, text: str, finish_reason: str) -> dict[str, Any]:
        """A message."""
        message = {"role": "assistant", "content": text}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish_reason}

    def opening(self, index: int) -> dict[str, Any]:
        """Whose words follow."""
        return _delta(index, {"role": "assistant", "content": ""})

    def text(self, index: int, text: str) -> dict[str, Any]:
        """More content."""
        return _delta(index, {"content": text})

    def closing(self, index: int, finish_reason: str) -> dict[str, Any]:
        """An empty delta."""
        return _delta(index, {}, finish_reason)


class CompletionShape:
    """Choices of `/v1/completions`."""

    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"
    id_prefix: ClassVar[str] = "cmpl-"

    def whole(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        """A text."""
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def opening(self, index: int) -> None:
        """A text just begins."""

    def text(self, index: int, text: str) -> dict[str, Any]:
        """More text."""
        return self.whole(index, text, None)

    def closing(self, index: int, finish_reason: str) -> dict[str, Any]:
        """No more text."""
        return self.whole(index, "", finish_reason)


@dataclass
class Answer:
    """One answer in the making: the generations of a request and the choices they become.

    Args:
        shape: of the choices.
        generations: the choices' sources, by index.
        includes_usage: whether each frame of the stream has a `usage`, and a frame of its own tells the counts.
        prompts: how many prompts the generations answer; each prompt's tokens count once.
    """

    shape: Shape
    generations: Sequence[Generation]
    includes_usage: bool = False
    prompts: int = 1

    def __post_init__(self) -> None:
        first = self.generations[0]
        self._head = {
            "id": f"{self.shape.id_prefix}{first.id}",
            "object": self.shape.chunk_object,
            "created": int(time.time()),
            "model": first.model,
        }
        self._around = [self._around_text(index) for index in range(len(self.generations))]

    def whole(self, texts: Sequence[str]) -> dict[str, Any]:
        """The body of an answer that does not stream."""
        choices = [
            self.shape.whole(index, text, finish_reason(generation))
            for index, (text, generation) in enumerate(zip(texts, self.generations, strict=True))
        ]
        return {**self._head, "object": self.shape.whole_object, "choices": choices, "usage": self.usage()}

    def opening(self) -> list[bytes]:
        """The frames before any text."""
        choices = [self.shape.opening(index) for index in range(len(self.generations))]
        return [self._framed(choice) for choice in choices if choice is not None]

    def text(self, index: int, text: str) -> bytes:
        """A frame with new text."""
        before, after = self._around[index]
        return before + _json(text) + after

    def closing(self, index: int) -> bytes:
        """The last frame of a choice, with the generation's figures."""
        generation = self.generations[index]
        figures = {
            "prompt_tokens": generation.prompt_tokens,
            "generated_tokens": generation.generated_tokens,
            "first_token_s": generation.first_token_s,
            "tokens_per_s": generation.tokens_per_s,
        }
        return self._framed(self.shape.closing(index, finish_reason(generation)), omlxd=figures)

    def counts(self) -> list[bytes]:
        """The frame with the token counts, if it was asked for."""
        if not self.includes_usage:
            return []
        return [frame({**self._head, "choices": [], "usage": self.usage()})]

    def usage(self) -> dict[str, Any]:
        """Token counts of all choices together; `cached_tokens` are those of the prompts that were not run again."""
        each = len(self.generations) // self.prompts
        prompt_tokens = sum(generation.prompt_tokens for generation in self.generations[::each])
        cached_tokens = sum(generation.reused_tokens for generation in self.generations[::each])
        completion_tokens = sum(generation.generated_tokens for generation in self.generations)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }

    def _framed(self, choice: dict[str, Any], **more: Any) -> bytes:
        usage = {"usage": None} if self.includes_usage else {}
        return frame({**self._head, "choices": [choice], **usage, **more})

    def _around_text(self, index: int) -> tuple[bytes, bytes]:
        """The same frame for every token of a choice, in two parts with the text between them."""
        mark = "\0"  # JSON never holds it as it is, so it stands once
        before, after = self._framed(self.shape.text(index, mark)).split(_json(mark))
        return before, after


def finish_reason(generation: Generation) -> str:
    """Why it ended; raises EngineFailed when it does not say."""
    if generation.finish_reason is None:
        raise EngineFailed(f"the request to `{generation.model}` ended without a reason")
    return generation.finish_reason.value


def frame(content: dict[str, Any]) -> bytes:
    """One frame of a stream."""
    return b"data: " + _json(content) + b"\n\n"


def _delta(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _json(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
