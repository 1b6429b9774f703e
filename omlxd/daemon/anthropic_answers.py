"""Answers in Anthropic's shape: a message of content blocks, whole or as the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from omlxd.core.states import FinishReason
from omlxd.daemon.replies import Piece, Reasoning, Reply, ToolCall
from omlxd.daemon.request import Chunk


class Message:
    """One message in the making.

    Args:
        reply: what the model says.
    """

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._blocks = 0
        self._open: str | None = None

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The body of an answer that does not stream."""
        blocks: list[dict[str, Any]] = []
        for piece in pieces:
            kind, text = _kind(piece), _text(piece)
            if isinstance(piece, ToolCall):
                blocks.append({**_empty(piece), "input": json.loads(text)})
            elif blocks and blocks[-1]["type"] == kind:
                blocks[-1][kind] += text
            elif text:
                blocks.append({**_empty(piece), kind: text})
        return {**self._head(), "content": blocks, **self._end(), "usage": self.usage()}

    def start(self) -> bytes:
        """The first event; the counts that are not known yet come with the last ones."""
        message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": self.usage()}
        return event("message_start", message=message)

    def piece(self, piece: Piece) -> Iterator[bytes]:
        """The events of one more piece: it goes on with the open block, or closes it and opens its own."""
        kind, text = _kind(piece), _text(piece)
        if not text:
            return
        if kind != self._open or isinstance(piece, ToolCall):
            yield from self._close_block()
            yield event("content_block_start", index=self._blocks, content_block=_empty(piece))
            self._open = kind
        yield event("content_block_delta", index=self._blocks, delta=_delta(piece))

    def more(self, piece: Piece) -> bytes:
        """The events of one more piece as they go out, one behind the other."""
        return b"".join(self.piece(piece))

    def finish(self) -> Iterator[bytes]:
        """The last events."""
        yield from self._close_block()
        yield event("message_delta", delta=self._end(), usage=self.usage())
        yield event("message_stop")

    def usage(self) -> dict[str, int]:
        """Token counts so far; those of the prompt that were not run again are counted apart."""
        generation = self._reply.generation
        return {
            "input_tokens": generation.prompt_tokens - generation.reused_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": generation.reused_tokens,
            "output_tokens": generation.generated_tokens,
        }

    def _close_block(self) -> Iterator[bytes]:
        if self._open is not None:
            yield event("content_block_stop", index=self._blocks)
            self._open = None
            self._blocks += 1

    def _head(self) -> dict[str, Any]:
        generation = self._reply.generation
        return {"id": f"msg_{generation.id}", "type": "message", "role": "assistant", "model": generation.model}

    def _end(self) -> dict[str, Any]:
        reason, generation = self._reply.finish_reason, self._reply.generation
        if reason == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if generation.finish_reason is FinishReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if generation.stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": generation.stop}
        return {"stop_reason": "end_turn", "stop_sequence": None}


def event(kind: str, **fields: Any) -> bytes:
    """One event of a stream."""
    content = json.dumps({"type": kind, **fields}, ensure_ascii=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {content}\n\n".encode()


def _kind(piece: Piece) -> str:
    return "text" if isinstance(piece, Chunk) else "thinking" if isinstance(piece, Reasoning) else "tool_use"


def _text(piece: Piece) -> str:
    return piece.arguments if isinstance(piece, ToolCall) else piece.text


def _empty(piece: Piece) -> dict[str, Any]:
    match piece:
        case ToolCall(id=call_id, name=name):
            return {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        case Reasoning():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case Chunk():
            return {"type": "text", "text": ""}


def _delta(piece: Piece) -> dict[str, Any]:
    match piece:
        case ToolCall(arguments=arguments):
            return {"type": "input_json_delta", "partial_json": arguments}
        case Reasoning(text=text):
            return {"type": "thinking_delta", "thinking": text}
        case Chunk(text=text):
            return {"type": "text_delta", "text": text}
