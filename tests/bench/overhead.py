"""What the server costs: tokens/s of streams over HTTP, against the same engine that a loop in its process drives."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.report import Judged, Row, Target, against
from tests.bench.scratch import CHECKOUT, Scratch
from tests.bench.servers import Address, our_daemon
from tests.bench.streaming import chat

PEER = "bare engine"
PROMPT = "Tell me what a computer does with its memory when there is too little of it."
AT_MOST_3_PERCENT = Target(0.97, Judged.RATIO, at_most=False)


@dataclass(frozen=True, slots=True)
class _Case:
    """A model, how many stream from it at once, how many tokens each, and what is asked of the ratio."""

    megabytes: int
    clients: int
    max_tokens: int
    target: Target | None


CASES = (
    _Case(50, 1, 128, AT_MOST_3_PERCENT),
    _Case(50, 8, 64, AT_MOST_3_PERCENT),
    _Case(5, 1, 512, None),  # smaller than any model in use: a token takes 1 ms, and the rest shows most
)


def run(scratch: Scratch) -> Iterator[Row]:
    """The daemon and the bare engine are up at once and take turns; one is idle while the other works."""
    for case in CASES:
        model = scratch.llama(case.megabytes)
        with (
            our_daemon(scratch.home("overhead"), {"chat": model}, prefix_cache=0) as daemon,
            _bare_engine(model) as bare,
            ThreadPoolExecutor(case.clients) as pool,
        ):
            daemon.load("chat")
            ours, peer, same, asked = [], [], 0, 0
            for number in range(scratch.rounds(12, 3) + 1):
                prompts = [f"{number}.{client}: {PROMPT}" for client in range(case.clients)]
                if number % 2:
                    mine, theirs = _over_http(daemon.api, prompts, case, pool), _ask(bare, prompts, case)
                else:
                    theirs, mine = _ask(bare, prompts, case), _over_http(daemon.api, prompts, case, pool)
                if number:  # the first round warms up
                    ours.append(mine["tokens_per_s"])
                    peer.append(theirs["tokens_per_s"])
                    same += sum(map(str.__eq__, mine["texts"], theirs["texts"]))
                    asked += len(prompts)
            what = f"tokens/s, {case.megabytes} MB, {case.clients} stream{'s' if case.clients > 1 else ''}"
            yield against(what, "tok/s", ours, PEER, peer, case.target, f"{same} of {asked} answers have the same text")


def _over_http(address: Address, prompts: Sequence[str], case: _Case, pool: ThreadPoolExecutor) -> dict[str, Any]:
    asked = [pool.submit(chat, address, "chat", prompt, case.max_tokens) for prompt in prompts]
    answers = [each.result() for each in asked]
    took_s = max(answer.last_s for answer in answers) - min(answer.sent_s for answer in answers)
    return {
        "tokens_per_s": sum(answer.tokens for answer in answers) / took_s,
        "texts": [answer.text for answer in answers],
    }


@contextmanager
def _bare_engine(model: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.bench.overhead_child", str(model)]
    with subprocess.Popen(command, cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            assert child.stdin is not None
            child.stdin.close()  # its end


def _ask(child: subprocess.Popen[str], prompts: Sequence[str], case: _Case) -> dict[str, Any]:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps({"prompts": list(prompts), "max_tokens": case.max_tokens}) + "\n")
    child.stdin.flush()
    return dict(json.loads(child.stdout.readline()))
