"""A client that times a streamed chat completion: it only notes when bytes came, and reads them afterwards."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.bench.servers import Address


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer; seconds on `time.perf_counter`.

    Attributes:
        sent_s, first_s, last_s: when the request was sent, the first and the last text arrived.
        tokens: as many as were asked for (the tiny models never end by themselves).
        text: what was generated.
    """

    sent_s: float
    first_s: float
    last_s: float
    tokens: int
    text: str

    @property
    def first_token_s(self) -> float:
        """Seconds to the first text."""
        return self.first_s - self.sent_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Speed after the first token."""
        return (self.tokens - 1) / (self.last_s - self.first_s)


def chat(address: Address, model: str, prompt: str, max_tokens: int, system: str = "") -> Answer:
    """One greedy completion, streamed; with a system prompt unless it is empty.

    Raises:
        RuntimeError: it failed, or ended early.
    """
    body = {
        "model": model,
        "messages": [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    connection = http.client.HTTPConnection(*address, timeout=300)
    try:
        sent_s = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise RuntimeError(f"{address} answered {response.status}: {response.read()[:500]!r}")
        pieces: list[tuple[float, bytes]] = []
        while piece := response.read1(65536):
            pieces.append((time.perf_counter(), piece))
    finally:
        connection.close()
    return _read(sent_s, pieces, max_tokens)


def _read(sent_s: float, pieces: Sequence[tuple[float, bytes]], max_tokens: int) -> Answer:
    texts: list[tuple[float, str]] = []
    reason, rest = None, b""
    for at_s, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for frame in map(_frame, lines):
            if "error" in frame:
                raise RuntimeError(f"the stream failed: {frame['error']}")
            for choice in frame.get("choices", ()):
                reason = choice.get("finish_reason") or reason
                if text := choice.get("delta", {}).get("content"):
                    texts.append((at_s, text))
    if reason != "length" or not texts:
        raise RuntimeError(f"the stream ended early ({reason}) after {len(texts)} pieces of text")
    return Answer(sent_s, texts[0][0], texts[-1][0], max_tokens, "".join(text for _, text in texts))


def _frame(line: bytes) -> dict[str, Any]:
    text = line.strip().removeprefix(b"data:").strip()
    if not line.startswith(b"data:") or text == b"[DONE]":
        return {}
    return dict(json.loads(text))
