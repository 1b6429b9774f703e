"""Several generations heard as one: whoever hears them can stop at any moment."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from omlxd.daemon.listening import hear_pieces
from omlxd.daemon.replies import Reply
from omlxd.daemon.request import Chunk


class Talker:
    """A generation that never ends, with a chunk in each round of the loop."""

    def __aiter__(self) -> Talker:
        return self

    async def __anext__(self) -> Chunk:
        await asyncio.sleep(0)
        return Chunk("a", 1)

    async def wait(self, timeout_s: float) -> bool:
        await asyncio.sleep(0)
        return True


@pytest.mark.parametrize("talkers", [1, 2, 5])
async def test_hearing_ends_whenever_it_is_cancelled(talkers: int) -> None:
    """Also when the next chunk is there in the same round of the loop."""
    generations: list[Any] = [Talker() for _ in range(talkers)]
    engine: Any = None  # nobody asks a plain reply's engine for anything

    async def hear() -> None:
        async for _ in hear_pieces(engine, [Reply(each, is_chat=False) for each in generations]):
            pass

    for rounds in range(40):
        hearing = asyncio.create_task(hear())
        for _ in range(rounds):
            await asyncio.sleep(0)
        hearing.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert hearing.cancelled(), f"it went on after it was cancelled in round {rounds}"
