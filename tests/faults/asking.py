"""Greedy questions whose answers are known, and what became of each."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.acceptance.harness import Daemon, errors_in, in_thread, text_of
from tests.faults.tally import Tally

TOKENS = 16
PROMPTS = ("Hello.", "Tell me more about it, if you can.", "word " * 24, "One, two, three, four.")
LONG_PROMPT = "tell me more " * 1500


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a question ended.

    Attributes:
        model, prompt: what was asked.
        text: what came.
        whole: the answer says itself that it is complete.
        error: the one error that it ended with, code and message.
        broken: what else happened to it, which no client can make sense of.
    """

    model: str
    prompt: str
    text: str = ""
    whole: bool = False
    error: str = ""
    broken: str = ""

    def __str__(self) -> str:
        end = self.error or self.broken or ("whole" if self.whole else "cut")
        return f"{self.model} {self.prompt[:12]!r}: {end}"


def ask(daemon: Daemon, model: str, prompt: str, *, tokens: int = TOKENS, stream: bool = True) -> Outcome:
    """One question to its end, whatever that is."""
    try:
        if stream:
            return _streamed(daemon, model, prompt, tokens)
        answer = daemon.chat(model, prompt, max_tokens=tokens)
        body = answer.json
        if answer.status != 200:
            return Outcome(model, prompt, error=_error(body["error"]))
        choice = body["choices"][0]
        return Outcome(model, prompt, choice["message"]["content"], whole=choice["finish_reason"] == "length")
    except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
        return Outcome(model, prompt, broken=f"{type(error).__name__}: {error}")


def _streamed(daemon: Daemon, model: str, prompt: str, tokens: int) -> Outcome:
    frames: list[Any] = []
    broken = ""
    with daemon.chat_stream(model, prompt, max_tokens=tokens) as lines:
        if lines.response.status != 200:
            return Outcome(model, prompt, error=_error(json.loads(lines.response.read())["error"]))
        try:
            frames += lines
        except (OSError, http.client.HTTPException) as error:
            broken = f"{type(error).__name__}: {error}"
    text, errors, done = text_of(frames), errors_in(frames), bool(frames) and frames[-1] == "[DONE]"
    if len(errors) > 1 or (errors and not done) or (broken and done):
        return Outcome(model, prompt, text, broken=f"{len(errors)} errors, done {done}, {broken}")
    if errors:
        return Outcome(model, prompt, text, error=_error(errors[0]))
    if not done:
        return Outcome(model, prompt, text, broken=broken or "the stream ended without an end")
    return Outcome(model, prompt, text, whole=True)


def _error(error: Any) -> str:
    return f"{error['code']}: {error['message']}"


class Answers:
    """The undisturbed greedy text of each question, asked once of whichever daemon is there."""

    def __init__(self) -> None:
        self._texts: dict[tuple[Path, str, int], str] = {}
        self._lock = threading.Lock()

    def right(self, daemon: Daemon, model: str, folder: Path, prompt: str, tokens: int = TOKENS) -> str:
        """The text, when nothing is wrong with the daemon now."""
        with self._lock:
            key = (folder, prompt, tokens)
            if key not in self._texts:
                outcome = ask(daemon, model, prompt, tokens=tokens)
                assert outcome.whole, outcome
                self._texts[key] = outcome.text
            return self._texts[key]


def judge(tally: Tally, outcome: Outcome, right: str, *, may_fail: Callable[[str], bool] = lambda _: False) -> None:
    """Count the outcome: its whole right text, or an error that `may_fail` allows."""
    if outcome.whole:
        if outcome.text != right:
            tally.wrong.append(f"{outcome}: {outcome.text!r} instead of {right!r}")
    elif not right.startswith(outcome.text):
        tally.wrong.append(f"{outcome}: {outcome.text!r} is no beginning of {right!r}")
    elif not (outcome.error and may_fail(outcome.error)):
        tally.lost.append(str(outcome))


def ask_all(daemon: Daemon, model: str, *, times: int = 1) -> list[Future[Outcome]]:
    """Each prompt at the same time, streamed and not."""
    questions = [(prompt, at % 2 == 0) for at, prompt in enumerate(PROMPTS * times)]
    return [
        in_thread(lambda prompt=prompt, stream=stream: ask(daemon, model, prompt, stream=stream))  # type: ignore[misc]
        for prompt, stream in questions
    ]
