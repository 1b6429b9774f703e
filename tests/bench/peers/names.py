"""Somebody asks for a model that is not there: what he is told, and what it costs the one who asks next."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tests.bench.peers.asking import Reply, ask
from tests.bench.peers.catalogue import Needs
from tests.bench.peers.contest import contest, whole
from tests.bench.peers.processes import Running
from tests.bench.peers.rows import rows
from tests.bench.report import Judged, Row, Target
from tests.bench.scratch import Scratch

MEGABYTES: Final = 50
MAX_TOKENS: Final = 4
NEEDS: Final = Needs(several=True)
AS_SOON: Final = Target(1.0, Judged.RATIO)
ALL: Final = Target(1.0, Judged.WORST, at_most=False)


@dataclass(frozen=True, slots=True)
class _Seen:
    bad: Reply
    before_ms: float
    after_ms: float

    @property
    def not_found(self) -> float:
        return float(self.bad.status == http.client.NOT_FOUND)


def run(scratch: Scratch) -> Iterator[Row]:
    """A good question, one with a name that nobody has, and a good one again."""
    models = {"chat": scratch.llama(MEGABYTES), "other": scratch.llama(1)}
    with contest(scratch, models, NEEDS, warm=["chat"]) as up:
        found = up.turns(scratch.rounds(7, 2), _look)
        told = {name: [each.not_found for each in seen] for name, seen in found.items()}

        def answer(name: str) -> str:
            bad = found[name][0].bad
            return bad.trouble if bad.trouble else f"{bad.status}, answered by another model"

        figure = "a name that is not there: answered 404"
        yield from rows(up, NEEDS, figure, "", told, target=ALL, note=answer, counts=True)
        after = {name: [each.after_ms for each in seen] for name, seen in found.items()}
        yield from rows(up, NEEDS, "  first token of the next good question", "ms", after, target=AS_SOON)
        dearer = {name: [each.after_ms / each.before_ms for each in seen] for name, seen in found.items()}
        yield from rows(up, NEEDS, "  of the one before", "×", dearer)


def _look(server: Running, number: int) -> _Seen:
    def first_ms(tag: str) -> float:
        return 1000 * whole(server.ask("chat", f"{number}{tag} hi", MAX_TOKENS)).first_token_s

    before_ms = first_ms("b")
    bad = ask(server.address, f"no-such-model-{number}", "hi", MAX_TOKENS)
    return _Seen(bad, before_ms, first_ms("a"))
