"""Three models, asked for by Zipf's law in bursts, under a limit for one and a half: answers, waits and losses."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Final

from tests.bench.peers.asking import Reply
from tests.bench.peers.catalogue import Needs
from tests.bench.peers.contest import contest
from tests.bench.peers.processes import Running
from tests.bench.peers.rows import rows
from tests.bench.peers.venvs import Unavailable
from tests.bench.report import Judged, Row, Target, percentile_95
from tests.bench.scratch import Scratch

MEGABYTES: Final = {"often": 10, "sometimes": 12, "seldom": 15}
LIMIT_BYTES: Final = 25_000_000
CLIENTS: Final = 6
BURSTS: Final = 3
PAUSE_S: Final = 0.3
PATIENCE_S: Final = 15.0
NEEDS: Final = Needs(several=True, limit_bytes=LIMIT_BYTES)
AS_MANY: Final = Target(1.0, Judged.RATIO, at_most=False)
AS_SOON: Final = Target(1.0, Judged.RATIO)
NONE: Final = Target(0.0, Judged.WORST)


@dataclass(frozen=True, slots=True)
class _Question:
    model: str
    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class _Round:
    """All replies of one round, and the seconds that somebody waited for one."""

    replies: Sequence[Reply]
    took_s: float

    @property
    def lost(self) -> list[Reply]:
        return [reply for reply in self.replies if not reply.whole]

    @property
    def answers_per_s(self) -> float:
        return (len(self.replies) - len(self.lost)) / self.took_s

    @property
    def waits_ms(self) -> list[float]:
        return [1000 * reply.first_token_s for reply in self.replies if reply.whole]


def run(scratch: Scratch) -> Iterator[Row]:
    """Six clients ask at the same instant, wait until all are answered, pause, and ask again.

    Who hears nothing for `PATIENCE_S` goes away, and that request is lost.
    The nth model is asked for 1/n as often as the first. Questions come from a seed: the same for all servers.
    """
    models = {name: scratch.llama(size) for name, size in MEGABYTES.items()}
    with contest(scratch, models, NEEDS, warm=["often"]) as up:
        found = up.turns(scratch.rounds(3, 1), _bursts)

        def lost(name: str) -> str:
            troubles = [reply.trouble for each in found[name] for reply in each.lost]
            return f"of {CLIENTS * BURSTS} a round" + (f"; {troubles[0]}" if troubles else "")

        def figures(of: str) -> dict[str, list[float]]:
            return {name: [getattr(each, of) for each in rounds] for name, rounds in found.items()}

        yield from rows(up, NEEDS, "answers/s, three models in bursts", "1/s", figures("answers_per_s"), target=AS_MANY)
        middle = {name: [median(each.waits_ms) for each in rounds] for name, rounds in found.items()}
        yield from rows(up, NEEDS, "  median first token", "ms", middle, target=AS_SOON)
        late = {name: [percentile_95(each.waits_ms) for each in rounds] for name, rounds in found.items()}
        yield from rows(up, NEEDS, "  95 % of the first tokens", "ms", late, target=AS_SOON)
        losses = {name: [float(len(each.lost)) for each in rounds] for name, rounds in found.items()}
        yield from rows(up, NEEDS, "  requests lost", "", losses, target=NONE, note=lost, counts=True)


def _bursts(server: Running, number: int) -> _Round:
    chance, replies, took_s = random.Random(number), list[Reply](), 0.0
    with ThreadPoolExecutor(CLIENTS) as pool:
        for _ in range(BURSTS):
            together = threading.Barrier(CLIENTS)
            asked = [pool.submit(_ask, server, _drawn(chance), together) for _ in range(CLIENTS)]
            burst = [each.result() for each in asked]
            took_s += time.perf_counter() - min(reply.sent_s for reply in burst)
            replies += burst
            time.sleep(PAUSE_S)
    if not any(reply.whole for reply in replies):
        raise Unavailable(f"no whole answer in {len(replies)}: {replies[-1].trouble}")
    return _Round(replies, took_s)


def _drawn(chance: random.Random) -> _Question:
    weights = [1 / rank for rank in range(1, len(MEGABYTES) + 1)]
    (model,) = chance.choices(list(MEGABYTES), weights)
    prompt = "".join(chance.choices("abcdefgh ", k=chance.randint(5, 40)))
    return _Question(model, prompt, chance.randint(8, 32))


def _ask(server: Running, question: _Question, together: threading.Barrier) -> Reply:
    together.wait()
    return server.ask(question.model, question.prompt, question.max_tokens, timeout_s=PATIENCE_S)
