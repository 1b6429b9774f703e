"""Several generations heard as one: what each says, as it comes, and a sign of life while none says anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

from omlxd.daemon.app import Daemon
from omlxd.daemon.replies import Piece, Reply
from omlxd.daemon.request import Chunk, Generation, Taker
from omlxd.daemon.waits import progress_words
from omlxd.engine.protocol import Engine

HEARTBEAT_S = 1.0
JUDGED_S = 10.0
ABORTED_AT_ONCE = 8


Heard = tuple[int, Chunk | None]
"""A chunk of the generation of this index; no chunk when that one has ended well."""


async def hear_pieces(
    engine: Engine, replies: Sequence[Reply], at_once: Taker | None = None
) -> AsyncGenerator[tuple[int, Piece | None] | None, None]:
    """What the replies say: (index, piece), (index, None) when that one has ended, None after a second of silence.

    Raises the first error of a generation; aborts none of them.

    Args:
        engine: knows the tokenizers of the models.
        replies: who speaks.
        at_once: says more of the answer of a single plain reply as soon as the loop hears of it, without waking who
            waits here; what it cannot say, and all else, comes out here. With it silence is up to two seconds.
    """
    generations = [reply.generation for reply in replies]
    if len(replies) == 1:
        hear = _one(generations[0], None if at_once is None else partial(_say_plainly, replies[0], at_once))
    else:
        hear = _several(generations)
    async with aclosing(hear) as heard:
        async for news in heard:  # once for each token of a stream: nothing here that can be left out
            if news is None:
                yield None
                continue
            index, chunk = news
            reply = replies[index]
            if chunk is None:
                for piece in await reply.end():
                    yield index, piece
                yield index, None
            elif reply.is_plain:
                if chunk.text or chunk.logprobs:
                    yield index, chunk
            else:
                for piece in await reply.add(chunk, engine.codec(reply.generation.model)):
                    yield index, piece


async def wait_before_stream(generations: Sequence[Generation], *, wants_progress: bool = False) -> bool:
    """Wait while an HTTP status may still say what is wrong; True whatever came of it.

    That is until all prompts are known to fit (a model that was never loaded has no tokenizer before its load begins),
    but not for ever, and then a moment for the first one to say something. A client that wants to see the progress
    waits for that moment only.
    """
    if not wants_progress:
        await asyncio.gather(*(generation.wait_judged(JUDGED_S) for generation in generations))
    waiting = [asyncio.ensure_future(generation.wait(HEARTBEAT_S)) for generation in generations]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waiting:
            wait.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return True


async def close_all(generations: Sequence[Generation]) -> None:
    """Abort those that still run, a few in each turn of the loop: many clients may leave together."""
    for number, generation in enumerate(generations, 1):
        await generation.aclose()
        if number % ABORTED_AT_ONCE == 0:
            await asyncio.sleep(0)


def waiting_for(daemon: Daemon, generations: Sequence[Generation]) -> str:
    """What the request waits for now, in a few words."""
    generation = next((each for each in generations if not each.ended), generations[0])
    return progress_words(daemon.pool, generation)


def _say_plainly(reply: Reply, at_once: Taker, chunk: Chunk) -> bool:
    if not reply.is_plain or chunk.logprobs:
        return False
    return not chunk.text or at_once(chunk)


async def _one(generation: Generation, taker: Taker | None) -> AsyncGenerator[Heard | None, None]:
    while True:
        if not await generation.wait(HEARTBEAT_S, taker):
            yield None
            continue
        yield 0, (chunk := generation.take())
        if chunk is None:
            return


async def _several(generations: Sequence[Generation]) -> AsyncGenerator[Heard | None, None]:
    heard: asyncio.Queue[Heard | BaseException] = asyncio.Queue()

    async def hear(index: int, generation: Generation) -> None:
        try:
            while await generation.wait():  # which aborts nothing when this is cancelled
                heard.put_nowait((index, chunk := generation.take()))
                if chunk is None:
                    return
        except Exception as error:
            heard.put_nowait(error)

    tasks = [asyncio.create_task(hear(index, generation)) for index, generation in enumerate(generations)]
    running = len(tasks)
    try:
        while running:
            try:
                async with asyncio.timeout(HEARTBEAT_S):  # `wait_for` loses a cancellation that comes with its result
                    news = await heard.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(news, BaseException):
                raise news
            running -= news[1] is None
            yield news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
