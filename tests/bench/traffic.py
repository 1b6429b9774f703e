"""Random traffic to a daemon, the same for the same seed: what is asked of it, and how each request ended."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Any

from omlxd.core.errors import OmlxError
from tests.bench.servers import Address, RunningDaemon

TEMPLATE_TOKENS = 40
"""Of the chat template; a character of the tiny models is a token."""

SHORTEST_TOKENS, LONGEST_TOKENS = 16, 8192
REQUEST_TIMEOUT_S = 120.0
_SYSTEM = "You are the one who answers, whatever is asked, in the fewest words that there are for it. " * 3


class End(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    REFUSED = "refused"
    ABORTED = "aborted"
    VANISHED = "vanished"
    FAILED = "failed"


@dataclass
class Outcome:
    """What came of the traffic.

    Attributes:
        ends: requests by how they ended.
        failures: what nobody should see, in the daemon's words.
        seconds: from the first request to the last end.
    """

    ends: Counter[End] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One chat request; `vanish_after_s` is when its client goes away."""

    model: str
    prompt_tokens: int
    max_tokens: int
    stream: bool
    shares_system: bool
    vanish_after_s: float | None

    @classmethod
    def drawn(cls, random: Random, models: Sequence[str]) -> Request:
        """A random one; short prompts are as likely as long ones, octave by octave."""
        tokens = SHORTEST_TOKENS * (LONGEST_TOKENS / SHORTEST_TOKENS) ** random.random()
        return cls(
            model=random.choice(models),
            prompt_tokens=round(tokens),
            max_tokens=random.choice((1, 8, 32, 200)),
            stream=random.random() < 0.5,
            shares_system=random.random() < 0.3,
            vanish_after_s=random.uniform(0.0, 2.0) if random.random() < 0.15 else None,
        )

    def body(self, random: Random) -> dict[str, Any]:
        """As it is sent; its words are random, but for a system message that many share."""
        messages = [{"role": "system", "content": _SYSTEM}] if self.shares_system else []
        left = max(1, self.prompt_tokens - TEMPLATE_TOKENS - sum(len(each["content"]) for each in messages))
        messages.append({"role": "user", "content": random.randbytes(left // 2 + 1).hex()[:left]})
        return {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": self.stream,
        }


def drive(
    daemon: RunningDaemon, models: Sequence[str], *, clients: int, requests: int, limits: Sequence[int]
) -> Outcome:
    """Let `clients` send `requests` each, while somebody loads, unloads and sets one of the `limits` all the time.

    The longest prompt is always among them, and has been answered before the operator begins: else chance would have it
    that nothing long ever gets through.
    """
    outcome, over, long_done = Outcome(), threading.Event(), threading.Event()
    began_s = time.perf_counter()
    asking = []
    for number in range(clients):
        random = Random(number)
        drawn = [Request.drawn(random, models) for _ in range(requests)]
        if number == 0:
            drawn[0] = Request(models[0], LONGEST_TOKENS, 8, stream=False, shares_system=False, vanish_after_s=None)
        first_done = threading.Event() if number else long_done
        asking.append(threading.Thread(target=_ask_all, args=(daemon.api, drawn, random, outcome, first_done)))

    def operate() -> None:
        long_done.wait()
        _operate(daemon, models, limits, Random(clients), over)

    operator = threading.Thread(target=operate)
    for thread in (*asking, operator):
        thread.start()
    for thread in asking:
        thread.join()
    outcome.seconds = time.perf_counter() - began_s
    over.set()
    operator.join()
    return outcome


def _ask_all(
    address: Address, drawn: Sequence[Request], random: Random, outcome: Outcome, first_done: threading.Event
) -> None:
    for request in drawn:
        end, words = _ask(address, request, random)
        first_done.set()
        outcome.ends[end] += 1
        if end is End.FAILED:
            outcome.failures.append(words)


def _ask(address: Address, request: Request, random: Random) -> tuple[End, str]:
    connection = http.client.HTTPConnection(*address, timeout=request.vanish_after_s or REQUEST_TIMEOUT_S)
    try:
        body = json.dumps(request.body(random))
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if request.vanish_after_s is not None and request.stream and response.status == http.client.OK:
            response.read1(1)
            return End.VANISHED, ""
        answer = response.read().decode()
        return _judge(response.status, answer), f"{response.status} {answer[-300:]}"
    except TimeoutError:
        return (End.FAILED if request.vanish_after_s is None else End.VANISHED), "no answer in time"
    except (OSError, http.client.HTTPException) as error:
        return End.FAILED, repr(error)
    finally:
        connection.close()


def _judge(status: int, answer: str) -> End:
    """From the status, or from the last frame but one of a stream."""
    if status == http.client.OK and '"error":' not in answer:
        return End.COMPLETED
    if '"request_aborted"' in answer:
        return End.ABORTED
    refusals = ("prefill_memory_exceeded", "does_not_fit", "busy", "load_cancelled")
    return End.REFUSED if any(f'"{code}"' in answer for code in refusals) else End.FAILED


def _operate(
    daemon: RunningDaemon, models: Sequence[str], limits: Sequence[int], random: Random, over: threading.Event
) -> None:
    while not over.wait(random.uniform(0.2, 2.0)):
        try:
            match random.choices(("load", "limit", "unload"), weights=(4, 5, 1))[0]:
                case "load":
                    daemon.load(random.choice(models))
                case "unload":
                    daemon.unload(random.choice(models))
                case "limit":
                    daemon.limit(random.choice(limits))
        except OmlxError:
            pass  # a load that does not fit, or that somebody cancelled: as it should be
    daemon.limit(max(limits))
