"""Text on both sides of the model: chat templates and prompts in, streamed text with stop sequences out."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from omlxd.core.errors import InvalidRequest


class ChatCodec:
    """A tokenizer with its chat template; implements `protocol.TextCodec`.

    Args:
        tokenizer: mlx-lm's tokenizer wrapper.
        vocab_size: rows of the model's embedding; ids at or above it would read beyond the table.
        context_length: tokens, None when unknown.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, context_length: int | None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._lock = threading.Lock()  # transformers changes padding state inside encode: "Already borrowed"

    @property
    def vocab_size(self) -> int:
        """Number of token ids the model knows."""
        return self._vocab_size

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and answer together."""
        return self._context_length

    @property
    def end_ids(self) -> frozenset[int]:
        """Token ids that end a generation."""
        return frozenset(self._tokenizer.eos_token_ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Prompt tokens of a conversation, by the model's own template, or plain `role: text` lines without one."""
        if not self._tokenizer.has_chat_template:
            lines = [f"{message['role']}: {message['content']}" for message in messages]
            return self.encode_text("\n".join([*lines, "assistant:"]))
        from jinja2.exceptions import TemplateError

        try:
            with self._lock:
                ids = self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages], add_generation_prompt=True
                )
        except TemplateError as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}",
                hint="check the order of the roles; some models take no system message",
            ) from None
        return [int(token) for token in ids]

    def encode_text(self, text: str) -> list[int]:
        """Prompt tokens of plain text."""
        with self._lock:
            return [int(token) for token in self._tokenizer.encode(text)]

    def stream_text(self, stop: Sequence[str]) -> StreamText:
        """A fresh detokenizer for one request."""
        with self._lock:
            return StreamText(self._tokenizer.detokenizer, stop)


class StreamText:
    """Turns token ids into text piece by piece and ends it at the first stop sequence.

    Text that could still become a stop sequence is held back until it cannot.
    """

    def __init__(self, detokenizer: Any, stop: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(word for word in stop if word)
        self._held = ""

    def add(self, token: int) -> tuple[str, bool]:
        """Text that is certain now, and whether a stop sequence was completed (it is not part of the text)."""
        self._detokenizer.add_token(token)
        return self._push(self._detokenizer.last_segment)

    def finish(self) -> str:
        """The rest: incomplete characters and what was held back."""
        self._detokenizer.finalize()
        text, _ = self._push(self._detokenizer.last_segment)
        rest, self._held = self._held, ""
        return text + rest

    def _push(self, piece: str) -> tuple[str, bool]:
        if not self._stop:
            return piece, False
        text = self._held + piece
        hits = [at for at in (text.find(word) for word in self._stop) if at >= 0]
        if hits:
            self._held = ""
            return text[: min(hits)], True
        keep = longest_stop_prefix(text, self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False


def longest_stop_prefix(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` with which one of the stop sequences begins (0 when none)."""
    longest = 0
    for word in stop:
        for size in range(min(len(word) - 1, len(text)), longest, -1):
            if text.endswith(word[:size]):
                longest = size
                break
    return longest
