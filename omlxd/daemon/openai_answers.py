"""Answers in OpenAI's shape: the choices of a chat or of a plain completion, whole or as frames of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import omlxd
from omlxd.daemon.openai_logprobs import ChatLogprobs, CompletionLogprobs, Logprobs
from omlxd.daemon.replies import Piece, Reasoning, Reply, ToolCall
from omlxd.daemon.request import Chunk
from omlxd.engine.codec import TextCodec

DONE = b"data: [DONE]\n\n"
FINGERPRINT = f"omlxd-{omlxd.__version__}"
"""What else than the request and its `seed` an answer depends on."""


class Shape(Protocol):
    """What differs between the two kinds of completion; a choice is one answer, told apart by its index."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    id_prefix: ClassVar[str]
    logprobs: ClassVar[type[Logprobs]]

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The part of a choice that holds a complete answer."""
        ...

    def opening(self) -> dict[str, Any] | None:
        """What begins an answer in a stream, if there is such a thing."""
        ...

    def piece(self, piece: Piece) -> dict[str, Any]:
        """One more piece in a stream."""
        ...

    def closing(self) -> dict[str, Any]:
        """What ends an answer in a stream."""
        ...


class ChatShape:
    """Choices of `/v1/chat/completions`."""

    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"
    id_prefix: ClassVar[str] = "chatcmpl-"
    logprobs: ClassVar[type[Logprobs]] = ChatLogprobs

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """A message; one of tool calls alone has no content."""
        calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
        reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
        content = "".join(piece.text for piece in pieces if isinstance(piece, Chunk))
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        return {"message": message}

    def opening(self) -> dict[str, Any]:
        """Whose words follow."""
        return {"delta": {"role": "assistant", "content": ""}}

    def piece(self, piece: Piece) -> dict[str, Any]:
        """More content, more reasoning or a whole call."""
        match piece:
            case Chunk(text=text):
                return {"delta": {"content": text}}
            case Reasoning(text=text):
                return {"delta": {"reasoning_content": text}}
            case ToolCall(number=number):
                return {"delta": {"tool_calls": [{"index": number, **_call(piece)}]}}

    def closing(self) -> dict[str, Any]:
        """An empty delta."""
        return {"delta": {}}


class CompletionShape:
    """Choices of `/v1/completions`; they are text and nothing else."""

    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"
    id_prefix: ClassVar[str] = "cmpl-"
    logprobs: ClassVar[type[Logprobs]] = CompletionLogprobs

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """A text."""
        return {"text": "".join(piece.text for piece in pieces if isinstance(piece, Chunk))}

    def opening(self) -> None:
        """A text just begins."""

    def piece(self, piece: Piece) -> dict[str, Any]:
        """More text."""
        return self.whole([piece])

    def closing(self) -> dict[str, Any]:
        """No more text."""
        return {"text": ""}


@dataclass
class Answer:
    """One answer in the making: the replies to a request and the choices they become.

    Args:
        shape: of the choices.
        replies: the choices' sources, by index.
        includes_usage: whether each frame of the stream has a `usage`, and a frame of its own tells the counts.
        prompts: how many prompts the replies answer; each prompt's tokens count once.
        has_logprobs: whether a whole answer tells log probabilities, though it may have no token.
    """

    shape: Shape
    replies: Sequence[Reply]
    includes_usage: bool = False
    prompts: int = 1
    has_logprobs: bool = False
    _logprobs: list[Logprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        first = self.replies[0].generation
        self._head = {
            "id": f"{self.shape.id_prefix}{first.id}",
            "object": self.shape.chunk_object,
            "created": int(time.time()),
            "model": first.model,
            "system_fingerprint": FINGERPRINT,
        }
        self._logprobs = [self.shape.logprobs() for _ in self.replies]
        self._around = [self._around_text(index) for index in range(len(self.replies))]

    def whole(self, answers: Sequence[Sequence[Piece]], codec: TextCodec | None) -> dict[str, Any]:
        """The body of an answer that does not stream."""
        choices = []
        for index, (pieces, reply) in enumerate(zip(answers, self.replies, strict=True)):
            told = [each for piece in pieces if isinstance(piece, Chunk) for each in piece.logprobs]
            logprobs = self._logprobs[index].tell(told, codec) if self.has_logprobs and codec is not None else None
            choices.append(_choice(index, self.shape.whole(pieces), reply.finish_reason, logprobs))
        return {**self._head, "object": self.shape.whole_object, "choices": choices, "usage": self.usage()}

    def opening(self) -> list[bytes]:
        """The frames before any text."""
        begins = self.shape.opening()
        return [] if begins is None else [self._framed(_choice(index, begins)) for index in range(len(self.replies))]

    def piece(self, index: int, piece: Piece, codec: TextCodec | None) -> bytes:
        """A frame with one more piece of a choice."""
        if isinstance(piece, Chunk):
            if not piece.logprobs or codec is None:
                return self.more(piece, index)
            logprobs = self._logprobs[index].tell(piece.logprobs, codec)
            return self._framed(_choice(index, self.shape.piece(piece), logprobs=logprobs))
        return self._framed(_choice(index, self.shape.piece(piece)))

    def more(self, chunk: Chunk, index: int = 0) -> bytes:
        """A frame with more text of a choice."""
        before, after = self._around[index]
        return before + _json(chunk.text) + after

    def closing(self, index: int) -> bytes:
        """The last frame of a choice, with the generation's figures."""
        reply = self.replies[index]
        figures: dict[str, Any] = {
            "prompt_tokens": reply.generation.prompt_tokens,
            "generated_tokens": reply.generation.generated_tokens,
            "first_token_s": reply.generation.first_token_s,
            "tokens_per_s": reply.generation.tokens_per_s,
        }
        if (measured := reply.generation.measured) is not None:
            figures["measured"] = {"request": reply.generation.id, **measured.to_json()}
        return self._framed(_choice(index, self.shape.closing(), reply.finish_reason), omlxd=figures)

    def counts(self) -> list[bytes]:
        """The frame with the token counts, if it was asked for."""
        if not self.includes_usage:
            return []
        return [frame({**self._head, "choices": [], "usage": self.usage()})]

    def usage(self) -> dict[str, Any]:
        """Token counts of all choices together; `cached_tokens` are those of the prompts that were not run again."""
        generations = [reply.generation for reply in self.replies]
        each = len(generations) // self.prompts
        prompt_tokens = sum(generation.prompt_tokens for generation in generations[::each])
        cached_tokens = sum(generation.reused_tokens for generation in generations[::each])
        completion_tokens = sum(generation.generated_tokens for generation in generations)
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
        before, after = self._framed(_choice(index, self.shape.piece(Chunk(mark, 0)))).split(_json(mark))
        return before, after


def frame(content: dict[str, Any]) -> bytes:
    """One frame of a stream."""
    return b"data: " + _json(content) + b"\n\n"


def _choice(
    index: int,
    said: dict[str, Any],
    finish_reason: str | None = None,
    logprobs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {"index": index, **said, "logprobs": logprobs, "finish_reason": finish_reason}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
"""Made once: `json.dumps` makes one for every call that asks for more than its defaults, six times a token's work."""


def _json(content: Any) -> bytes:
    return _ENCODER.encode(content).encode()
