"""An answer of a model: streamed from the daemon, written as it comes, and its figures in a line."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TextIO

from omlxd.cli import output
from omlxd.cli.safe_text import SafeText
from omlxd.cli.word_wrap import WordWrap
from omlxd.core.errors import OmlxError
from omlxd.core.units import format_bytes, format_duration

if TYPE_CHECKING:
    from omlxd.cli.client import Client

CHAT_ROUTE: Final = "/v1/chat/completions"
_DIM: Final = "\x1b[2m"
_NORMAL: Final = "\x1b[0m"


@dataclass(slots=True)
class Answer:
    """What came back, growing while it streams.

    Attributes:
        model: who answers.
        text: the answer so far.
        finish_reason: `stop` or `length`; None until it has ended.
        figures: `prompt_tokens`, `generated_tokens`, `first_token_s` and `tokens_per_s`, at its end.
    """

    model: str
    text: str = ""
    finish_reason: str | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The schema of `run --json`; seconds as floats."""
        from omlxd.core.states import SCHEMA  # 8 ms of dataclasses that streaming does not need

        keys = ("prompt_tokens", "generated_tokens", "first_token_s", "tokens_per_s")
        head = {"schema": SCHEMA, "model": self.model, "text": self.text, "finish_reason": self.finish_reason}
        return head | {key: self.figures.get(key) for key in keys}


class AnswerWriter:
    """Writes an answer to stdout, and the thoughts before it, dimmed, to stderr when that is a terminal.

    A pipe receives the text as it is; a terminal receives it without control characters, and broken between words.
    """

    def __init__(self, *, before: str = "", quiet: bool = False) -> None:
        """`before` is written with the first words; `quiet`: nothing is, the whole answer is wanted at its end."""
        self._before, self._quiet = before, quiet
        self._text = _Stream(sys.stdout)
        self._thoughts = _Stream(sys.stderr)
        self._thinks = False

    def write(self, piece: str) -> None:
        """More of the answer."""
        self._end_thoughts()
        if not self._quiet:
            self._text.write(self._before + piece)
            self._before = ""

    def think(self, piece: str) -> None:
        """More of the reasoning before the answer."""
        if self._quiet or not output.is_terminal(sys.stderr):
            return
        if not self._thinks:
            if output.is_terminal(sys.stdout):
                self._text.end_line()
            self._thoughts.mark(_DIM)
        self._thinks = True
        self._thoughts.write(piece)

    def end(self) -> None:
        """The answer is over, or has broken off: its last line ends."""
        self._end_thoughts()
        self._text.end_line()

    def _end_thoughts(self) -> None:
        if self._thinks:
            self._thoughts.end_line()
            self._thoughts.mark(_NORMAL)
            self._thinks = False


class _Stream:
    """A stream that text is written to piece by piece; remembers whether its last line is open."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._safe = SafeText() if stream.isatty() else None
        self._wrap = WordWrap(lambda: output.columns(stream)) if output.is_terminal(stream) else None
        self._open_line = False

    def write(self, piece: str) -> None:
        text = self._safe.feed(piece) if self._safe else piece
        self._put(self._wrap.feed(text) if self._wrap else text)

    def end_line(self) -> None:
        text = self._safe.rest() if self._safe else ""
        self._put(self._wrap.feed(text) + self._wrap.rest() if self._wrap else text)
        if self._open_line:
            self._put("\n")

    def mark(self, sequence: str) -> None:
        """A colour, where the stream wants colours."""
        if output.is_colourful(self._stream):
            self._stream.write(sequence)
            self._stream.flush()

    def _put(self, text: str) -> None:
        if text:
            self._stream.write(text)
            self._stream.flush()
            self._open_line = not text.endswith("\n")


def stream_answer(client: Client, body: Mapping[str, Any], answer: Answer, writer: AnswerWriter) -> None:
    """Fill `answer` and write its text as it comes; ends the line also when the answer breaks off.

    Leaving early, as by Ctrl-C, closes the connection, at which the daemon ends the request.
    """
    events = client.sse(CHAT_ROUTE, body)
    with closing(events), output.Progress() as progress:
        try:
            for event in events:
                if isinstance(event, str):
                    if not answer.text:
                        progress.show(event)
                    continue
                choice = event["choices"][0]
                if thought := choice["delta"].get("reasoning_content"):
                    progress.clear()
                    writer.think(thought)
                if piece := choice["delta"].get("content"):
                    progress.clear()
                    answer.text += piece
                    writer.write(piece)
                answer.model = event.get("model", answer.model)
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                answer.figures |= event.get("omlxd") or {}
        finally:
            writer.end()


def stats_text(answer: Answer, client: Client) -> str:
    """Tokens, speed, first token and memory in a line; memory is left out when the daemon does not tell it."""
    return ", ".join([*_speed(answer.figures), *_memory(answer.model, client)])


def _speed(figures: Mapping[str, Any]) -> list[str]:
    if not figures:
        return ["the answer was stopped, so there are no figures of it"]
    found = [f"{figures.get('prompt_tokens') or 0} prompt tokens, {figures.get('generated_tokens') or 0} generated"]
    if (rate := figures.get("tokens_per_s")) is not None:
        found.append(f"{rate:.1f} tokens/s")
    if (first_s := figures.get("first_token_s")) is not None:
        found.append(f"first token after {format_duration(first_s)}")
    return found


def _memory(name: str, client: Client) -> list[str]:
    try:
        status = client.get("/v1/control/status")
    except OmlxError:
        return []
    view: dict[str, Any] = next((each for each in status["models"] if each["name"] == name), {})
    held_bytes = sum(view.get(key) or 0 for key in ("weights_bytes", "kv_bytes", "prefix_cache_bytes"))
    memory = status["memory"]
    limit = f" of {format_bytes(memory['soft_limit'])}" if memory["soft_limit"] else ""
    return [f"memory {format_bytes(held_bytes)} for `{name}`, {format_bytes(memory['used'])}{limit} in all"]
