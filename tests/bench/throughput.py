"""Tokens per second and time to first token over HTTP, against `mlx_lm.server`: same model, same prompts, greedy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from tests.bench.report import Judged, Row, Target, against
from tests.bench.scratch import CHECKOUT, Scratch
from tests.bench.servers import PEER, Address, cpu_s, mlx_lm_server, our_daemon
from tests.bench.streaming import Answer, chats

CLIENTS = (1, 4, 8)
PROMPT = "Tell me what a computer does with its memory when there is too little of it."
AT_LEAST_AS_FAST = Target(1.0, Judged.RATIO, at_most=False)
FASTER_TOGETHER = Target(1.1, Judged.RATIO, at_most=False)  # eight streams are where batching shows
NO_LATER = Target(1.0, Judged.RATIO)


@dataclass(frozen=True, slots=True)
class _Case:
    """A model, and how many tokens to ask of it: enough for a second or so."""

    megabytes: int
    max_tokens: int


CASES = (_Case(50, 64), _Case(5, 256))


@dataclass(frozen=True, slots=True)
class _Server:
    """Somebody to ask."""

    address: Address
    model: str
    process: psutil.Process


@dataclass(frozen=True, slots=True)
class _Round:
    """The answers of all clients of one round, and the processor time that the server took for them."""

    answers: list[Answer]
    cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        """All tokens over the time from the first request to the last token, prefill included."""
        began_s = min(answer.sent_s for answer in self.answers)
        return self.tokens / (max(answer.last_s for answer in self.answers) - began_s)

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def cpu_ms_per_token(self) -> float:
        return 1000 * self.cpu_s / self.tokens

    @property
    def first_token_ms(self) -> float:
        return 1000 * median(answer.first_token_s for answer in self.answers)

    @property
    def decode_tokens_per_s(self) -> float:
        """Of one client, after the first token."""
        return median(answer.decode_tokens_per_s for answer in self.answers)


def run(scratch: Scratch) -> Iterator[Row]:
    """For each model both servers are up at once and take turns; one is idle while the other answers."""
    for case in CASES:
        model = scratch.llama(case.megabytes)
        with (
            our_daemon(scratch.home("throughput"), {"chat": model}) as daemon,
            mlx_lm_server(model) as (address, process),
        ):
            daemon.load("chat")
            ours, peer = _Server(daemon.api, "chat", daemon.process), _Server(address, "default_model", process)
            for clients in CLIENTS:
                rounds = list(_take_turns(case, clients, scratch.rounds(7), ours, peer))
                what = f"{case.megabytes} MB, {clients} client{'s' if clients > 1 else ''}"
                yield from _rows(what, [mine for mine, _ in rounds], [theirs for _, theirs in rounds])
            yield _limit(case, model, scratch.rounds(7), peer)


def _limit(case: _Case, model: Path, rounds: int, peer: _Server) -> Row:
    """What mlx-lm's batch does by itself with what the most clients ask: no server that uses it can be faster."""
    command = [sys.executable, "-m", "tests.bench.mlx_alone_child", str(model)]
    with subprocess.Popen(command, cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        alone, served = list[float](), list[float]()
        for number in range(rounds + 1):
            prompts = [f"{number}.alone.{client}: {PROMPT}" for client in range(max(CLIENTS))]
            print(json.dumps({"prompts": prompts, "max_tokens": case.max_tokens}), file=child.stdin, flush=True)
            alone.append(float(child.stdout.readline()))
            served.append(_ask(peer, prompts, case).tokens_per_s)
        child.stdin.close()  # its end
    what = f"  of MLX alone, {case.megabytes} MB, {max(CLIENTS)} prompts"
    note = "mlx-lm's batch_generate, without a server: the most that one above it can do"
    return against(what, "tok/s", alone[1:], PEER, served[1:], note=note)  # the first round warms up


def _take_turns(
    case: _Case, clients: int, rounds: int, ours: _Server, peer: _Server
) -> Iterator[tuple[_Round, _Round]]:
    for number in range(rounds + 1):
        # another prompt each time, or the peer would answer from its prompt cache
        prompts = [f"{number}.{clients}.{client}: {PROMPT}" for client in range(clients)]
        if number % 2:
            mine, theirs = _ask(ours, prompts, case), _ask(peer, prompts, case)
        else:
            theirs, mine = _ask(peer, prompts, case), _ask(ours, prompts, case)
        if number:  # the first round warms up
            yield mine, theirs


def _ask(server: _Server, prompts: Sequence[str], case: _Case) -> _Round:
    before_s = cpu_s(server.process)
    answers = chats(server.address, server.model, prompts, case.max_tokens)
    return _Round(answers, cpu_s(server.process) - before_s)


def _rows(what: str, ours: Sequence[_Round], peer: Sequence[_Round]) -> Iterator[Row]:
    def compare(figure: str, unit: str, of: Callable[[_Round], float], target: Target | None, note: str = "") -> Row:
        return against(f"{figure}, {what}", unit, list(map(of, ours)), PEER, list(map(of, peer)), target, note)

    pairs = [pair for a, b in zip(ours, peer, strict=True) for pair in zip(a.answers, b.answers, strict=True)]
    same = sum(mine.text == theirs.text for mine, theirs in pairs)
    note = f"{same} of {len(pairs)} answers have the peer's text"
    clients = len(ours[0].answers)
    in_all = FASTER_TOGETHER if clients == max(CLIENTS) else AT_LEAST_AS_FAST
    yield compare("tokens/s", "tok/s", lambda each: each.tokens_per_s, in_all, note)
    if clients == 1:
        yield compare("decode only", "tok/s", lambda each: each.decode_tokens_per_s, AT_LEAST_AS_FAST)
    yield compare("first token", "ms", lambda each: each.first_token_ms, NO_LATER if clients == 1 else None)
    yield compare("processor time a token", "ms", lambda each: each.cpu_ms_per_token, None)
