"""Several generations heard as one: whoever hears them can stop at any moment."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from omlxd.daemon.listening import close_all, hear_pieces
from omlxd.daemon.replies import Reply
from omlxd.daemon.request import Chunk, Generation


class Talker:
    """A generation that never ends, with a chunk in each round of the loop."""

    async def wait(self, timeout_s: float | None = None, taker: object = None) -> bool:
        await asyncio.sleep(0)
        return True

    def take(self) -> Chunk:
        return Chunk("a", 1)


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


class Aborts:
    """Who runs the generations, and is told to stop them."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def abort(self, request_id: str, reason: str) -> bool:
        """Set it down."""
        self.told.append(request_id)
        return True


@pytest.mark.parametrize("count", [1, 3])
async def test_hearing_that_is_cancelled_aborts_none_and_closing_aborts_all(count: int) -> None:
    owner = Aborts()
    generations = [Generation(f"r{number}", "chat", owner, time.monotonic) for number in range(count)]
    engine: Any = None

    async def hear() -> None:
        async for _ in hear_pieces(engine, [Reply(each, is_chat=False) for each in generations]):
            pass

    hearing = asyncio.create_task(hear())
    for _ in range(10):
        await asyncio.sleep(0)
    hearing.cancel()
    await asyncio.wait([hearing])
    assert owner.told == []
    await close_all(generations)
    assert owner.told == [generation.id for generation in generations]
