"""Time to first token of short prompts to a small resident model: idle, beside loads, and beside a long prompt."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import count

from tests.bench.background import again_and_again
from tests.bench.report import Row, Target, against, alone, percentile_95
from tests.bench.scratch import Scratch
from tests.bench.servers import RunningDaemon, our_daemon
from tests.bench.streaming import chat

PROMPT = "Say a word."
LONG_PROMPT = "so many words that nobody will ever read them all " * 80  # 4,000 tokens of the tiny models
LOOK_S = 0.01


def run(scratch: Scratch) -> Iterator[Row]:
    """The same client each time; a bound is idle's 95th percentile and the longest step of that phase."""
    models = {
        "small": scratch.llama(5),
        "reader": scratch.llama(20),
        "big": scratch.llama(50 if scratch.quick else 200),
    }
    with our_daemon(scratch.home("latency"), models) as daemon:
        daemon.load("small")
        daemon.load("reader")
        chat(daemon.api, "small", PROMPT, 2)
        chat(daemon.api, "reader", PROMPT, 2)
        times, numbers = scratch.rounds(100, 20), count()
        idle_ms, _ = _ask(daemon, times)
        yield alone("first token, idle", "ms", idle_ms, note=f"95 %: {percentile_95(idle_ms):.1f} ms")

        def loads() -> None:
            daemon.load("big")
            daemon.unload("big")

        def reads() -> None:
            chat(daemon.api, "reader", f"{next(numbers)}: {LONG_PROMPT}", 1)  # never one that it knows

        for what, work in (("another model loads", loads), ("another prefills 4,000 tokens", reads)):
            with again_and_again(work) as (rounds,):
                busy_ms, step_ms = _ask(daemon, times)
            yield from _rows(what, idle_ms, busy_ms, step_ms, len(rounds))


def _rows(what: str, idle_ms: Sequence[float], busy_ms: Sequence[float], step_ms: float, rounds: int) -> Iterator[Row]:
    yield against(f"first token while {what}", "ms", busy_ms, "idle", idle_ms, note=f"{rounds} times meanwhile")
    bound = Target(percentile_95(idle_ms) + step_ms)
    note = f"bound: idle's 95 % ({percentile_95(idle_ms):.1f} ms) and the longest of the steps seen ({step_ms:.0f} ms)"
    yield alone("  its 95 %", "ms", [percentile_95(busy_ms)], bound, note)


def _ask(daemon: RunningDaemon, times: int) -> tuple[list[float], float]:
    """First-token times of one short prompt after the other, and the longest step that was seen meanwhile, in ms."""
    longest_s = [0.0]

    def look() -> None:
        health = daemon.client.get("/health", timeout_s=60.0)
        longest_s[0] = max(longest_s[0], health["stalled_s"] or 0.0)
        time.sleep(LOOK_S)

    with again_and_again(look):
        first_ms = [1000 * chat(daemon.api, "small", f"{at}: {PROMPT}", 2).first_token_s for at in range(times)]
    return first_ms, 1000 * longest_s[0]
