"""A client that asks any OpenAI-style server and tells what came of it; nothing that a server does is an exception."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tests.bench.servers import Address
from tests.bench.streaming import question

CHAT_PATH: Final = "/v1/chat/completions"
TIMEOUT_S: Final = 60.0
SHOWN: Final = 160


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of one question; seconds on `time.perf_counter`.

    Attributes:
        asked_tokens: its `max_tokens`.
        status: HTTP's, 0 when there was no answer.
        text: what was generated. The benches' models write printable ASCII only, a character a token, and never end by
            themselves: so its length is the number of tokens, whatever a server says of it.
        sent_s, first_s, last_s: when it was sent, and when the first and the last text came (`sent_s` without any).
        trouble: empty, or why the answer is not whole.
    """

    asked_tokens: int
    status: int
    text: str
    sent_s: float
    first_s: float
    last_s: float
    trouble: str

    @property
    def whole(self) -> bool:
        """Whether the answer has the tokens that were asked for."""
        return not self.trouble

    @property
    def first_token_s(self) -> float:
        """Seconds to the first text."""
        return self.first_s - self.sent_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Speed after the first text."""
        return (len(self.text) - 1) / max(self.last_s - self.first_s, 1e-9)


def ask(address: Address, model: str, prompt: str, max_tokens: int, *, timeout_s: float = TIMEOUT_S) -> Reply:
    """One greedy chat, streamed; `timeout_s` is between two pieces of the answer."""
    connection = http.client.HTTPConnection(*address, timeout=timeout_s)
    pieces: list[tuple[float, bytes]] = []
    status, trouble = 0, ""
    sent_s = time.perf_counter()
    try:
        _send(connection, model, prompt, max_tokens)
        response = connection.getresponse()
        status = response.status
        while piece := response.read1(65536):
            pieces.append((time.perf_counter(), piece))
    except TimeoutError:
        trouble = f"silent for {timeout_s:g} s"
    except (OSError, http.client.HTTPException) as error:
        trouble = f"{type(error).__name__}: {error}"[:SHOWN]
    finally:
        connection.close()
    return _read(sent_s, pieces, max_tokens, status, trouble)


def ask_and_leave(address: Address, model: str, prompt: str, max_tokens: int, after_s: float) -> None:
    """Ask, and hang up after so many seconds, whatever has come by then."""
    connection = http.client.HTTPConnection(*address, timeout=after_s)
    deadline_s = time.perf_counter() + after_s
    try:
        _send(connection, model, prompt, max_tokens)
        response = connection.getresponse()
        while response.read1(65536) and time.perf_counter() < deadline_s:
            pass
    except (OSError, http.client.HTTPException):
        pass  # silence, as a rule: the prompt is read
    finally:
        connection.close()


def _send(connection: http.client.HTTPConnection, model: str, prompt: str, max_tokens: int) -> None:
    connection.request("POST", CHAT_PATH, question(model, prompt, max_tokens), {"Content-Type": "application/json"})


def _read(sent_s: float, pieces: Sequence[tuple[float, bytes]], max_tokens: int, status: int, trouble: str) -> Reply:
    texts: list[tuple[float, str]] = []
    if status == http.client.OK:
        for at_s, frame in _frames(pieces):
            if "error" in frame:
                trouble = trouble or f"error in the stream: {str(frame['error'])[:SHOWN]}"
            for choice in frame.get("choices") or ():
                delta = choice.get("delta") or {}
                if text := delta.get("content") or delta.get("reasoning_content"):
                    texts.append((at_s, text))
    elif status:
        trouble = f"{status}: {b''.join(piece for _, piece in pieces).decode(errors='replace')[:SHOWN]}"
    text = "".join(text for _, text in texts)
    if not trouble and len(text) != max_tokens:
        trouble = f"{len(text)} of {max_tokens} tokens"
    first_s, last_s = (texts[0][0], texts[-1][0]) if texts else (sent_s, sent_s)
    return Reply(max_tokens, status, text, sent_s, first_s, last_s, trouble)


def _frames(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    rest = b""
    for at_s, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            text = line.strip().removeprefix(b"data:").strip()
            if line.startswith(b"data:") and text != b"[DONE]":
                try:
                    frame = json.loads(text)
                except ValueError:
                    continue
                if isinstance(frame, dict):
                    yield at_s, frame
