"""Clients that time streamed chat completions: they only note when bytes came, and read them afterwards."""

from __future__ import annotations

import http.client
import io
import json
import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from tests.bench.servers import Address

PATH: Final = "/v1/chat/completions"


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
    body = question(model, prompt, max_tokens, system)
    connection = http.client.HTTPConnection(*address, timeout=300)
    try:
        sent_s = time.perf_counter()
        connection.request("POST", PATH, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise RuntimeError(f"{address} answered {response.status}: {response.read()[:500]!r}")
        pieces: list[tuple[float, bytes]] = []
        while piece := response.read1(65536):
            pieces.append((time.perf_counter(), piece))
    finally:
        connection.close()
    return _read(sent_s, pieces, max_tokens)


def chats(address: Address, model: str, prompts: Sequence[str], max_tokens: int) -> list[Answer]:
    """The same for all prompts at once, heard by one thread that only reads and notes the time.

    A thread and a parser for each would take from the server, on the same machine, what is to be measured.

    Raises:
        RuntimeError: one failed, or ended early.
    """
    heard: list[list[tuple[float, bytes]]] = [[] for _ in prompts]
    with selectors.DefaultSelector() as selector, ExitStack() as sockets:
        requests = []
        for pieces, prompt in zip(heard, prompts, strict=True):
            connection = sockets.enter_context(socket.create_connection(address, timeout=300))
            selector.register(connection, selectors.EVENT_READ, pieces)
            body = question(model, prompt, max_tokens)
            head = f"POST {PATH} HTTP/1.1\r\nHost: {address[0]}\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            requests.append((connection, head.encode() + body))
        sent_s = time.perf_counter()
        for connection, request in requests:
            connection.sendall(request)
        while selector.get_map():
            for key, _ in selector.select():
                connection, pieces = key.fileobj, key.data
                assert isinstance(connection, socket.socket)
                if piece := connection.recv(65536):
                    pieces.append((time.perf_counter(), piece))
                else:
                    selector.unregister(connection)
    return [_read(sent_s, _decoded(address, pieces), max_tokens) for pieces in heard]


def question(model: str, prompt: str, max_tokens: int, system: str = "") -> bytes:
    """The body of a greedy completion that is to be streamed, as every server here takes it."""
    body = {
        "model": model,
        "messages": [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    return json.dumps(body).encode()


def _decoded(address: Address, pieces: Sequence[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """The frames of a whole response, each with the time at which its last byte had come."""
    raw = b"".join(piece for _, piece in pieces)
    response = http.client.HTTPResponse(_Recorded(raw))  # type: ignore[arg-type]
    response.begin()
    body = response.read()
    if response.status != http.client.OK:
        raise RuntimeError(f"{address} answered {response.status}: {body[:500]!r}")
    ends, end = [], 0
    for at_s, piece in pieces:
        end += len(piece)
        ends.append((end, at_s))
    found, position = [], 0
    for frame in body.splitlines(keepends=True):
        position = raw.index(frame.strip(), position) + len(frame.strip())
        while ends[0][0] < position:
            ends.pop(0)
        found.append((ends[0][1], frame))
    return found


class _Recorded:
    """A connection over which everything has come already."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._raw)


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
