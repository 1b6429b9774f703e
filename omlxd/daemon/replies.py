"""A generation's text as what it is to a client: answer, reasoning and whole tool calls, piece by piece."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from omlxd.core.errors import EngineFailed
from omlxd.core.reply import ANSWER, REASONING, TOOL_CALL, Part, ReplySplitter
from omlxd.core.states import FinishReason
from omlxd.daemon.request import Chunk, Generation
from omlxd.engine.codec import TextCodec

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call of a tool: its number in this reply from 0 on, an id, the tool's name and its arguments as JSON."""

    number: int
    id: str
    name: str
    arguments: str


Piece: TypeAlias = Chunk | Reasoning | ToolCall
"""A chunk is more of the answer."""


class Reply:
    """What one generation says, told apart.

    Args:
        generation: whose chunks are added.
        tools: the functions on offer; without any, nothing is a tool call.
        one_call: nothing counts that comes behind the first call of a tool.
        must_call: it is nothing but calls.
        is_chat: text that continues a prompt is never told apart.

    Attributes:
        calls: tool calls so far.
        is_plain: each chunk is a piece as it is; known with the first one.
    """

    def __init__(
        self,
        generation: Generation,
        *,
        tools: Tools = (),
        one_call: bool = False,
        must_call: bool = False,
        is_chat: bool = True,
    ) -> None:
        self.generation = generation
        self.calls = 0
        self._tools, self._one_call, self._must_call = tools, one_call, must_call
        self.is_plain = not is_chat
        self._codec: TextCodec | None = None
        self._splitter: ReplySplitter | None = None
        self._blank = ""
        self._calls_end = False

    @property
    def finish_reason(self) -> str:
        """`stop`, `length` or `tool_calls`; raises EngineFailed when the generation does not say."""
        reason = self.generation.finish_reason
        if reason is None:
            raise EngineFailed(f"the request to `{self.generation.model}` ended without a reason")
        called = self.calls and (self._one_call or reason is FinishReason.STOP)
        return "tool_calls" if called else reason.value

    async def add(self, chunk: Chunk, codec: TextCodec | None) -> list[Piece]:
        """The pieces that are certain with this chunk."""
        if self._codec is None and codec is not None:
            self._begin(codec)
        if self._splitter is None:
            return [chunk] if chunk.text or chunk.logprobs else []
        pieces = await self._pieces(self._splitter.add(chunk.text))
        return [*pieces, Chunk("", 0, chunk.logprobs)] if chunk.logprobs else pieces

    async def end(self) -> list[Piece]:
        """The last pieces, once nothing more will come."""
        if self._splitter is None:
            return []
        pieces = await self._pieces(self._splitter.finish())
        return pieces if self.calls or self._must_call or not self._blank else [*pieces, Chunk(self._blank, 0)]

    def _begin(self, codec: TextCodec) -> None:
        self._codec = codec
        reply_format = codec.reply_format(self.generation.prompt, with_tools=bool(self._tools))
        self.is_plain = reply_format.is_plain
        self._calls_end = bool(reply_format.transitions.get(TOOL_CALL))
        self._splitter = None if self.is_plain else ReplySplitter(reply_format)

    async def _pieces(self, parts: Sequence[Part]) -> list[Piece]:
        pieces: list[Piece] = []
        for part in parts:
            if self._one_call and self.calls:
                break
            if part.is_open and self._is_half_call(part):
                self._blank = ""  # only stood before the call
            elif part.state == REASONING:
                pieces.append(Reasoning(part.text))
            elif part.state == ANSWER:
                pieces += self._said(part.text)
            elif part.state == TOOL_CALL:
                pieces += await self._called(part)
        return pieces

    def _is_half_call(self, part: Part) -> bool:
        """Whether this is what the length has left of a call, or of its marker: no use to a client, and no content."""
        is_cut = self.generation.finish_reason is FinishReason.LENGTH
        if part.state == TOOL_CALL:
            return is_cut and self._calls_end
        return self._must_call or (is_cut and len(part.text) > 1)  # one character may be anything

    def _said(self, text: str) -> list[Piece]:
        if not self._tools:
            return [Chunk(text, 0)]
        # Models write line breaks around their tool calls; nobody wants them as an answer.
        text = self._blank + text
        said = text.rstrip()
        self._blank = text[len(said) :]
        return [Chunk(said, 0)] if said else []

    async def _called(self, part: Part) -> list[Piece]:
        assert self._codec is not None
        found = await asyncio.to_thread(self._codec.parse_tool_calls, part.text, self._tools)
        if (
            not found
            and part.is_open
            and (self.generation.stop or self.generation.finish_reason is FinishReason.LENGTH)
        ):
            self._blank = ""
            return []  # cut off in its middle
        if not found:  # not a call after all: the client shall see what the model wrote
            return self._said(part.before + part.text + part.after)
        calls: list[Piece] = []
        for call in found[:1] if self._one_call else found:
            calls.append(ToolCall(self.calls, new_call_id(), call.name, call.arguments))
            self.calls += 1
        self._blank = ""
        return calls


def new_call_id() -> str:
    """An id for a tool call: 9 letters and digits, because some chat templates take nothing else."""
    return secrets.token_hex(5)[:9]
