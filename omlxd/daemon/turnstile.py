"""A few at a time: what very many want to do at once is spread over turns of the event loop, which answers others in
between."""

from __future__ import annotations

import asyncio
from collections import deque


class Turnstile:
    """Lets so many through in each turn of the running loop, in the order they came; the others in later turns.

    Args:
        at_once: how many; who comes alone never waits.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._passed = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def through(self) -> None:
        """Wait for a turn of the loop that has room."""
        if self._waiting or self._passed >= self._at_once:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn  # counted when it was let through; one that was cancelled since has only kept its place
        else:
            self._count(1)

    def _count(self, more: int) -> None:
        if not self._passed:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._passed += more

    def _next_turn(self) -> None:
        self._passed = 0
        let = [self._waiting.popleft() for _ in range(min(self._at_once, len(self._waiting)))]
        for turn in let:
            if not turn.done():
                turn.set_result(None)
        if let:
            self._count(len(let))
