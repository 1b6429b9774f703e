"""Clients that go away in the middle of a long prompt: how long the next one waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Final

from tests.bench.peers.asking import ask_and_leave
from tests.bench.peers.catalogue import Needs
from tests.bench.peers.contest import contest, whole
from tests.bench.peers.processes import Running
from tests.bench.peers.rows import rows
from tests.bench.report import Judged, Row, Target
from tests.bench.scratch import Scratch

MEGABYTES: Final = 10
PROMPT_TOKENS: Final = 3000
LEAVING: Final = 3
STAY_S: Final = 0.3
MAX_TOKENS: Final = 4
NEEDS: Final = Needs()
AS_SOON: Final = Target(1.0, Judged.RATIO)


def run(scratch: Scratch) -> Iterator[Row]:
    """Three clients ask 3,000 tokens each and are gone 0.3 s later; then one comes who waits for his answer."""
    with contest(scratch, {"chat": scratch.llama(MEGABYTES)}, NEEDS, warm=["chat"]) as up:
        found = up.turns(scratch.rounds(5, 1), _look)
        figures = {name: [1000 * after_s for after_s, _ in seen] for name, seen in found.items()}
        what = f"first token after {LEAVING} clients left their prompts"
        yield from rows(up, NEEDS, what, "ms", figures, target=AS_SOON)
        dearer = {name: [after_s / idle_s for after_s, idle_s in seen] for name, seen in found.items()}
        yield from rows(up, NEEDS, "  of one that nobody was before", "×", dearer)


def _look(server: Running, number: int) -> tuple[float, float]:
    """Seconds to the first token after the others have left, and when nobody had been there."""
    idle = whole(server.ask("chat", f"{number} nobody", MAX_TOKENS))
    leaving = [
        threading.Thread(
            target=ask_and_leave,
            args=(server.address, server.names["chat"], f"{number}.{client} " + "x" * PROMPT_TOKENS, 8, STAY_S),
        )
        for client in range(LEAVING)
    ]
    for thread in leaving:
        thread.start()
    for thread in leaving:
        thread.join()
    after = whole(server.ask("chat", f"{number} somebody", MAX_TOKENS))
    time.sleep(STAY_S)
    return after.first_token_s, idle.first_token_s
