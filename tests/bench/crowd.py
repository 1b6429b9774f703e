"""A crowd of clients, each with habits of its own and a random state from a seed: short and long prompts, popular
models and rare ones, pauses, and one in five that goes away in the middle of its answer."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.bench.streaming import question

CHAT_PATH = "/v1/chat/completions"
TIMEOUT_S = 300.0

Connect = Callable[[], http.client.HTTPConnection]


@dataclass(frozen=True, slots=True)
class Habits:
    """What the clients of one crowd do.

    Attributes:
        models: from the most popular to the rarest; each is asked for half as often as the one before it.
        clients: how many ask at the same time.
        asks: how often each of them asks.
        short_characters, long_characters: ranges of the prompts' lengths; the tiny models' tokens are characters.
        long_share: how many of the prompts are long.
        tokens: the range of the answers' lengths.
        vanishing_share: how many go away before their answer is whole.
        longest_pause_s: between an answer and the next question.
        seed: of all choices.
    """

    models: Sequence[str]
    clients: int = 8
    asks: int = 6
    short_characters: tuple[int, int] = (10, 80)
    long_characters: tuple[int, int] = (300, 600)
    long_share: float = 0.25
    tokens: tuple[int, int] = (16, 120)
    vanishing_share: float = 0.2
    longest_pause_s: float = 0.2
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one question; `kind` is whole, cut (fewer tokens than asked for), vanished, or an error's code."""

    model: str
    kind: str
    prompt_characters: int
    asked_tokens: int
    got_tokens: int
    first_s: float | None
    total_s: float


@dataclass(slots=True)
class Crowd:
    """Clients at work; `outcomes` grows until `join` returns."""

    habits: Habits
    connect: Connect
    outcomes: list[Outcome] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> Crowd:
        """Let them come."""
        for number in range(self.habits.clients):
            choices = random.Random(f"{self.habits.seed}-{number}")
            thread = threading.Thread(target=self._visit, args=(choices,), name=f"client-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    @property
    def busy(self) -> bool:
        """Whether somebody still asks."""
        return any(thread.is_alive() for thread in self._threads)

    def join(self) -> Crowd:
        """Wait until all have got what they wanted."""
        for thread in self._threads:
            thread.join()
        return self

    def counts(self) -> Counter[str]:
        """How many questions ended which way."""
        return Counter(outcome.kind for outcome in self.outcomes)

    def _visit(self, choices: random.Random) -> None:
        habits = self.habits
        weights = [2.0**-rank for rank in range(len(habits.models))]
        for _ in range(habits.asks):
            (model,) = choices.choices(habits.models, weights)
            span = habits.long_characters if choices.random() < habits.long_share else habits.short_characters
            prompt = "".join(choices.choices("abcdefgh ", k=choices.randint(*span)))
            tokens = choices.randint(*habits.tokens)
            leaves = choices.random() < habits.vanishing_share
            patience = choices.randint(0, tokens // 2) if leaves else None
            self.outcomes.append(_ask(self.connect, model, prompt, tokens, patience))
            time.sleep(choices.uniform(0, habits.longest_pause_s))


def _ask(connect: Connect, model: str, prompt: str, tokens: int, patience: int | None) -> Outcome:
    """One streamed question; with `patience` the client hangs up after so many pieces of text, or before the first."""
    began_s = time.monotonic()
    connection = connect()
    kind, got, first_s = "silence", 0, None
    try:
        connection.request("POST", CHAT_PATH, question(model, prompt, tokens), {"Content-Type": "application/json"})
        if patience == 0:
            kind = "vanished"
        else:
            response = connection.getresponse()
            if response.status != http.client.OK:
                kind = str(json.loads(response.read())["error"]["code"])
            else:
                pieces = 0
                for frame in _frames(response):
                    if "error" in frame:
                        kind = str(frame["error"]["code"])
                        break
                    if "omlxd" in frame:
                        got = frame["omlxd"]["generated_tokens"]
                        kind = "whole" if got == tokens else "cut"
                    elif frame["choices"][0]["delta"].get("content"):
                        first_s = first_s if first_s is not None else time.monotonic() - began_s
                        pieces += 1
                        if patience is not None and pieces >= patience:
                            kind = "vanished"
                            break
    finally:
        connection.close()
    return Outcome(model, kind, len(prompt), tokens, got, first_s, time.monotonic() - began_s)


def _frames(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for raw in iter(response.readline, b""):
        text = raw.strip()
        if text.startswith(b"data:") and (content := text.removeprefix(b"data:").strip()) != b"[DONE]":
            yield json.loads(content)
