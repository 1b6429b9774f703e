"""Chats with the same long system prompt and another question each: the first token with a prefix cache and without it.

Two daemons, one that keeps prefixes and one that does not, are asked the same in turns: both see the same noise.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from tests.bench.report import Judged, Row, Target, against, alone
from tests.bench.scratch import Scratch
from tests.bench.servers import RunningDaemon, our_daemon
from tests.bench.streaming import Answer, chat

MODELS = (("llama", 10), ("gemma3_text", 8), ("qwen3_moe", 6), ("mamba2", 4))
SYSTEM_CHARACTERS, ANSWER_TOKENS = 1500, 16  # the tiny models' tokenizer makes a token of a character
SEVERAL_TIMES_FASTER = Target(0.33, Judged.RATIO)


def run(scratch: Scratch) -> Iterator[Row]:
    """A row a family, in milliseconds; what was kept, and whether the texts are the same, are said beside it."""
    for kind, megabytes in MODELS:
        model = scratch.tiny(kind, megabytes)
        with _daemon(scratch, model, "auto") as keeping, _daemon(scratch, model, 0) as plain:
            for daemon in (keeping, plain):
                daemon.load("model")
                _ask(daemon, 0)  # the first one fills the cache, and both warm up
            rounds = range(1, scratch.rounds(8, 2) + 1)
            answers = [(_ask(keeping, number), _ask(plain, number)) for number in rounds]
            kept_bytes = keeping.status()["memory"]["prefix_cache"]
        ours, peer = ([1000 * answer.first_token_s for answer in each] for each in zip(*answers, strict=True))
        same = sum(one.text == other.text for one, other in answers)
        note = f"{same} of {len(answers)} texts the same"
        what = f"first token behind {SYSTEM_CHARACTERS} tokens, {kind} {megabytes} MB"
        yield against(what, "ms", ours, "no cache", peer, SEVERAL_TIMES_FASTER, note)
        yield alone(f"kept after {len(answers) + 1} chats, {kind}", "MB", [kept_bytes / 1e6])


def _daemon(scratch: Scratch, model: Path, prefix_cache: str | int) -> AbstractContextManager[RunningDaemon]:
    home = scratch.home(f"prefix-{prefix_cache}")
    return our_daemon(home, {"model": model}, policy="graceful", max_memory="2G", prefix_cache=prefix_cache)


def _ask(daemon: RunningDaemon, number: int) -> Answer:
    letters = random.Random(1).choices("abcdefgh ", k=SYSTEM_CHARACTERS)
    question = "".join(random.Random(100 + number).choices("ijklmnop ", k=40))
    return chat(daemon.api, "model", question, ANSWER_TOKENS, system="".join(letters))
