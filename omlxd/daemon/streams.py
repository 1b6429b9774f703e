"""Answers that notice when their client goes away: streams, and the wait for a whole answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
NDJSON = "application/x-ndjson"
SERVER_SENT_EVENTS = "text/event-stream"
PIECES_AT_ONCE = 16
CLIENT_GONE = 499
"""The status of an answer that nobody reads."""


LINE: Final = "omlxd.line"
"""The `Line` of a request, among the extensions of its scope."""


class Line(Protocol):
    """A body's straight way to its client, which spares a token's piece the way through tasks and applications.

    It is for a body that has begun, has no length and is still made: `Stream`'s.
    """

    @property
    def is_clear(self) -> bool:
        """Whether a piece can be written now: the answer has begun, and its client is there and has read the last."""
        ...

    def write(self, piece: bytes) -> None:
        """Write more of the body, behind all that was sent; only while the line is clear."""
        ...


def straight(scope: Scope, compose: Callable[[T], bytes]) -> Callable[[T], bool] | None:
    """What writes a piece at once and says whether it did; None where the server has no such way.

    Args:
        compose: makes the piece; only called for what is then written.
    """
    line: Line | None = scope.get("extensions", {}).get(LINE)
    if line is None:
        return None

    def write(said: T) -> bool:
        if not line.is_clear:
            return False
        line.write(compose(said))
        return True

    return write


class Stream(Response):
    """A body made while it is sent; a slow reader slows only its own stream, a gone one closes its source at once.

    Args:
        source: the pieces of the body; closed in every case.
        media_type: `application/x-ndjson` or `text/event-stream`.
    """

    def __init__(self, source: AsyncGenerator[bytes, None], media_type: str) -> None:
        super().__init__(media_type=media_type, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]  # Response counted the empty body
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the pieces until the source ends or the client is gone."""
        sending = asyncio.create_task(self._send_all(send))
        gone = asyncio.create_task(_until_disconnect(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            failed = await _ended(sending, gone)
            await self._source.aclose()
        if failed is not None:
            raise failed

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pieces = 0
        async for piece in self._source:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            # uvicorn's send returns at once while there is room, and for ever when the client is gone; a source that
            # always has more would never let anybody else run.
            pieces += 1
            if pieces % PIECES_AT_ONCE == 0:
                await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, which is cancelled when the client goes away; None then. The body must have been read."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_until_disconnect(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await _ended(working, gone)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ended(work: asyncio.Task[Any], watch: asyncio.Task[None]) -> Exception | None:
    # Cancelled and awaited, so that nothing of this request runs on; the work's own failure is returned.
    work.cancel()
    watch.cancel()
    results = await asyncio.gather(work, watch, return_exceptions=True)
    return results[0] if isinstance(results[0], Exception) else None
