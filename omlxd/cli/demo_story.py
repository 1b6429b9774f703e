"""The demo's story, step by step: every figure comes from the daemon, and a step that goes wrong ends it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from omlxd.cli import output
from omlxd.cli.answer import Answer, AnswerWriter, stream_answer
from omlxd.cli.client import Client
from omlxd.cli.daemon import answering_line
from omlxd.cli.models import load_with_progress
from omlxd.cli.sentences import decision_sentence
from omlxd.core.errors import OmlxError
from omlxd.core.events import EventName
from omlxd.core.units import format_bytes, format_duration

MIB: Final = 2**20
KV_ROOM_MIB: Final = 40  # less than a tiny model, so that two of them never fit beside the real one
HARD_ABOVE_MIB: Final = 32
QUESTION: Final = "What is the capital of France?"
SECOND_QUESTION: Final = "What is the capital of Italy?"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the models weigh in bytes, and limits that hold two of the three, in whole MiB as one would type them."""

    chat_bytes: int
    tiny_bytes: int

    @property
    def limit(self) -> str:
        """Room for the real model, one tiny one and some KV cache."""
        return f"{self._limit_mib}M"

    @property
    def hard_limit(self) -> str:
        """What a load or a prompt may never pass."""
        return f"{self._limit_mib + HARD_ABOVE_MIB}M"

    @property
    def lowered_limit(self) -> str:
        """Room for the real model alone."""
        return f"{-(-self.chat_bytes // MIB) + KV_ROOM_MIB}M"

    @property
    def _limit_mib(self) -> int:
        return -(-(self.chat_bytes + self.tiny_bytes) // MIB) + KV_ROOM_MIB


def tell(client: Client, ready: Mapping[str, Any], sizes: Sizes) -> None:
    """Run the story on a daemon that has the models `chat`, `tiny-a` and `tiny-b`.

    Raises:
        OmlxError: a step failed, no model was evicted, or the pinned one was.
    """
    story = _Story(client)
    _step("A daemon with a memory limit", f"omlxd start --max-memory {sizes.limit} --hard-limit {sizes.hard_limit}")
    _say(answering_line(ready, client))
    _say(f"The limit holds `chat` ({format_bytes(sizes.chat_bytes)}) and one tiny model.")

    _step("Load the real model, pin it, ask it", f'omlxd load chat --pin; omlxd run chat "{QUESTION}"')
    story.load("chat", pin=True)
    story.ask(QUESTION, max_tokens=40)

    _step("A second model fits", "omlxd load tiny-a")
    story.load("tiny-a")

    _step("A third does not: the least recently used one that is not pinned must go", "omlxd load tiny-b")
    story.load("tiny-b")
    story.expect_victim("tiny-a")
    story.show_status()

    _step("Lower the limit: the enforcer acts at once", f"omlxd limit {sizes.lowered_limit}")
    story.lower_limit(sizes.lowered_limit)
    story.expect_victim("tiny-b")
    story.show_status()

    _step("The pinned model never left", f'omlxd run chat "{SECOND_QUESTION}"')
    story.ask(SECOND_QUESTION, max_tokens=16)
    story.expect_loaded("chat")
    output.data("")


class _Story:
    """Steps that act through the daemon's API and tell what its answers and events say."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._seen_seq = 0
        self._victims: list[str] = []

    def load(self, model: str, *, pin: bool = False) -> None:
        """Load a model and tell what was decided for it, its size and what is used now."""
        result = load_with_progress(self._client, model, pin=pin)
        self._tell_decisions()
        view = result["model"]
        took = f" in {format_duration(result['load_s'])}" if result.get("load_s") is not None else ""
        pinned = ", pinned" if view["pinned"] else ""
        _say(f"loaded `{model}`{took}: {format_bytes(view['weights_bytes'] or 0)}{pinned}; {self._used()}")

    def ask(self, question: str, *, max_tokens: int) -> None:
        """Stream a real answer."""
        body = {
            "model": "chat",
            "messages": [{"role": "user", "content": question}],
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
        }
        answer = Answer("chat")
        stream_answer(self._client, body, answer, AnswerWriter(before="  chat: "))
        if not answer.text.strip():
            raise _wrong("`chat` gave no answer")
        figures = answer.to_json()
        if figures["tokens_per_s"]:
            first = format_duration(figures["first_token_s"] or 0)
            speed = f"{figures['tokens_per_s']:.1f} tokens/s"
            _say(f"({figures['generated_tokens']} tokens, the first after {first}, {speed})")

    def lower_limit(self, limit: str) -> None:
        """Set the limit; the daemon answers after the enforcer has acted."""
        body = {"max_memory": limit, "force": False}
        answer = self._client.call("PATCH", "/v1/control/limits", body, timeout_s=None)
        self._tell_decisions()
        _say(f"limit {format_bytes(answer['memory']['soft_limit'])}; {self._used()}")

    def expect_victim(self, model: str) -> None:
        """The decisions evicted this model and it is really gone, and `chat` is still there."""
        if model not in self._victims:
            raise _wrong(f"no decision evicted `{model}`")
        if (state := self._models()[model]["state"]) != "unloaded":
            raise _wrong(f"`{model}` should be unloaded and is {state}")
        self.expect_loaded("chat")

    def expect_loaded(self, model: str) -> None:
        """It is loaded and pinned."""
        view = self._models()[model]
        if view["state"] != "loaded" or not view["pinned"]:
            raise _wrong(f"the pinned model `{model}` is {view['state']}")

    def show_status(self) -> None:
        """Memory and models, as `omlxd status` shows them."""
        from omlxd.cli.render import console, draw  # Rich, only where a table is drawn
        from omlxd.cli.status_page import memory_lines, models_table

        status = self._client.get("/v1/control/status")
        output.data("\n  $ omlxd status")
        sys.stdout.flush()
        draw(memory_lines(status, console().width), "", models_table(status["models"]))

    def _tell_decisions(self) -> None:
        for event in self._client.ndjson("GET", f"/v1/control/events?since={self._seen_seq}", timeout_s=10.0):
            self._seen_seq = max(self._seen_seq, int(event.get("seq", 0)))
            if event.get("event") != EventName.DECISION.value:
                continue
            _say(decision_sentence(event))
            for candidate in event.get("candidates") or ():
                if not candidate.get("chosen"):
                    _say(f"  `{candidate['model']}` stays: {candidate['why']}")
            if event.get("action") == "unload":
                self._victims.append(str(event.get("victim") or event.get("model")))

    def _used(self) -> str:
        memory = self._client.get("/v1/control/status")["memory"]
        return f"{format_bytes(memory['used'])} of {format_bytes(memory['soft_limit'])} used"

    def _models(self) -> dict[str, dict[str, Any]]:
        return {model["name"]: model for model in self._client.get("/v1/control/models")["models"]}


def _step(title: str, command: str) -> None:
    output.data(f"\n{output.painted(title, '1', sys.stdout)}\n  $ {command}")
    sys.stdout.flush()


def _say(text: str) -> None:
    """An indented line: decisions are long, and they are what the demo is about."""
    output.sentence(f"  {text}", hang=0)
    sys.stdout.flush()


def _wrong(what: str) -> OmlxError:
    return OmlxError(f"the demo did not go as it should: {what}", hint="please report it with what is printed above")
