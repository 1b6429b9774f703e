"""One stream and eight: tokens per second and first token of every peer beside ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Final

from tests.bench.peers.asking import Reply
from tests.bench.peers.catalogue import Needs
from tests.bench.peers.contest import OURS, contest, whole
from tests.bench.peers.processes import Running
from tests.bench.peers.rows import rows
from tests.bench.report import Judged, Row, Target
from tests.bench.scratch import Scratch

MEGABYTES: Final = 50
MAX_TOKENS: Final = 64
CLIENTS: Final = (1, 8)
NEEDS: Final = Needs()
AS_FAST: Final = Target(1.0, Judged.RATIO, at_most=False)
AS_SOON: Final = Target(1.0, Judged.RATIO)


@dataclass(frozen=True, slots=True)
class _Round:
    """The whole answers of all clients of one round."""

    replies: Sequence[Reply]

    @property
    def tokens_per_s(self) -> float:
        """All tokens over the time from the first question to the last token."""
        took_s = max(each.last_s for each in self.replies) - min(each.sent_s for each in self.replies)
        return sum(len(each.text) for each in self.replies) / took_s

    @property
    def first_token_ms(self) -> float:
        return 1000 * median(each.first_token_s for each in self.replies)

    @property
    def decode_tokens_per_s(self) -> float:
        return median(each.decode_tokens_per_s for each in self.replies)


def run(scratch: Scratch) -> Iterator[Row]:
    """The same greedy chats of a 50 MB llama; another question each time, so that no prompt cache answers."""
    with contest(scratch, {"chat": scratch.llama(MEGABYTES)}, NEEDS, warm=["chat"]) as up:
        for clients in CLIENTS:
            found = up.turns(
                scratch.rounds(15, 2), lambda server, number, clients=clients: _ask(server, clients, number)
            )
            what = f"{clients} stream{'s' if clients > 1 else ''}"

            def same(name: str, found: dict[str, list[_Round]] = found) -> str:
                texts = [[each.text for one in found[who] for each in one.replies] for who in (OURS, name)]
                agreed = sum(mine == theirs for mine, theirs in zip(*texts, strict=True))
                return f"{agreed} of {len(texts[0])} texts the same"

            def figures(of: str, found: dict[str, list[_Round]] = found) -> dict[str, list[float]]:
                return {name: [getattr(each, of) for each in rounds] for name, rounds in found.items()}

            yield from rows(up, NEEDS, f"tokens/s, {what}", "tok/s", figures("tokens_per_s"), target=AS_FAST, note=same)
            if clients == 1:
                yield from rows(
                    up, NEEDS, f"decode only, {what}", "tok/s", figures("decode_tokens_per_s"), target=AS_FAST
                )
            yield from rows(up, NEEDS, f"first token, {what}", "ms", figures("first_token_ms"), target=AS_SOON)


def _ask(server: Running, clients: int, number: int) -> _Round:
    with ThreadPoolExecutor(clients) as pool:
        asked = [
            pool.submit(server.ask, "chat", f"{number}.{clients}.{client}: a word", MAX_TOKENS)
            for client in range(clients)
        ]
        return _Round([whole(each.result()) for each in asked])
