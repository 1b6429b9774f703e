"""Log probabilities in OpenAI's two shapes: a list of tokens in a chat, four parallel lists in a completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from omlxd.engine.codec import TextCodec
from omlxd.engine.events import TokenLogprob


class Logprobs(Protocol):
    """Tells of the tokens of one choice, in order."""

    def tell(self, tokens: Sequence[TokenLogprob], codec: TextCodec) -> dict[str, Any]:
        """The `logprobs` of a choice, or of a piece of it."""
        ...


class ChatLogprobs:
    """`{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}`."""

    def tell(self, tokens: Sequence[TokenLogprob], codec: TextCodec) -> dict[str, Any]:
        """One entry a token; half a character has bytes of its own."""

        def entry(token: int, logprob: float) -> dict[str, Any]:
            spelled = codec.token_bytes(token)
            told = {"token": codec.token_text(token), "logprob": logprob}
            return {**told, "bytes": None if spelled is None else list(spelled)}

        content = [
            {**entry(each.token, each.logprob), "top_logprobs": [entry(*likely) for likely in each.top]}
            for each in tokens
        ]
        return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`."""

    def __init__(self) -> None:
        self._offset = 0

    def tell(self, tokens: Sequence[TokenLogprob], codec: TextCodec) -> dict[str, Any]:
        """Four lists, one entry a token; offsets count on from piece to piece."""
        texts = [codec.token_text(each.token) for each in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        top = [{codec.token_text(token): logprob for token, logprob in reversed(each.top)} for each in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": top if any(top) else None,
            "text_offset": offsets,
        }
