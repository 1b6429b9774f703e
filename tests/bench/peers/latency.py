"""First tokens of a small resident model while two big ones are swapped by somebody else, and alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Final

from tests.bench.background import again_and_again
from tests.bench.peers.catalogue import Needs
from tests.bench.peers.contest import contest
from tests.bench.peers.processes import Running
from tests.bench.peers.rows import rows
from tests.bench.peers.venvs import Unavailable
from tests.bench.report import Judged, Row, Target, percentile_95
from tests.bench.scratch import Scratch

SMALL_MB, BIG_MB = 5, 100
LIMIT_BYTES: Final = 150_000_000
ASKS: Final = 20
MAX_TOKENS: Final = 4
NEEDS: Final = Needs(several=True, limit_bytes=LIMIT_BYTES, keep="small")
AS_SOON: Final = Target(1.0, Judged.RATIO)
NONE: Final = Target(0.0, Judged.WORST)


@dataclass(frozen=True, slots=True)
class _Seen:
    """Milliseconds to the first token alone and beside loads, how many of the latter there were, and who got none."""

    idle_ms: list[float]
    busy_ms: list[float]
    loads: int
    lost: list[str]


def run(scratch: Scratch) -> Iterator[Row]:
    """The limit holds the small model and one of the big ones."""
    models = {"small": scratch.llama(SMALL_MB), **{f"big{n}": scratch.tiny("llama", BIG_MB, seed=n) for n in (1, 2)}}
    with contest(scratch, models, NEEDS, warm=["big1", "small"]) as up:
        found = up.turns(scratch.rounds(5, 1), _look)

        def late(of: str) -> dict[str, list[float]]:
            return {name: [percentile_95(getattr(each, of)) for each in seen] for name, seen in found.items()}

        def loads(name: str) -> str:
            return f"{median(each.loads for each in found[name]):.0f} questions to the big models meanwhile"

        what = "95 % of first tokens, small model"
        yield from rows(up, NEEDS, f"{what}, alone", "ms", late("idle_ms"), target=AS_SOON)
        yield from rows(up, NEEDS, f"{what}, beside loads", "ms", late("busy_ms"), target=AS_SOON, note=loads)
        lost = {name: [float(len(each.lost)) for each in seen] for name, seen in found.items()}

        def why(name: str) -> str:
            return "; ".join([trouble for each in found[name] for trouble in each.lost][:1])

        yield from rows(up, NEEDS, "  of which lost", "", lost, target=NONE, note=why, counts=True)


def _look(server: Running, number: int) -> _Seen:
    lost: list[str] = []
    idle_ms = _first_ms(server, f"{number}i", lost)
    turns = count()

    def swap() -> None:
        turn = next(turns)
        server.ask(f"big{1 + turn % 2}", f"{number}.{turn} hi", 1)

    with again_and_again(swap) as (loads,):
        busy_ms = _first_ms(server, f"{number}b", lost)
    return _Seen(idle_ms, busy_ms, len(loads), lost)


def _first_ms(server: Running, tag: str, lost: list[str]) -> list[float]:
    found = []
    for number in range(ASKS):
        reply = server.ask("small", f"{tag}{number} hi", MAX_TOKENS)
        if reply.whole:
            found.append(1000 * reply.first_token_s)
        else:
            lost.append(reply.trouble)
    if not found:
        raise Unavailable(f"no whole answer in {ASKS}: {lost[-1]}")
    return found
