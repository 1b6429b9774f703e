"""One uvicorn server on sockets that we bound; signals stay ours, and a foreign peer is cut off at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from omlxd.core.errors import InvalidRequest
from omlxd.daemon.sockets import may_connect

MAX_HEADER_BYTES = 32 * 1024
BACKLOG = 512
_TICK_S = 1.0
_GRACE_S = 0.5


class HttpServer:
    """The server of both doors.

    Args:
        app: answers the requests.
        sockets: bound by us; closed when the server stops.
    """

    def __init__(self, app: ASGIApp, sockets: Sequence[socket.socket]) -> None:
        self._server = _Server(
            uvicorn.Config(
                app,
                loop="none",
                http=_GuardedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                interface="asgi3",
                backlog=BACKLOG,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                timeout_graceful_shutdown=5,  # the net below `stop`, which has cut the connections long before
            )
        )
        self._sockets = list(sockets)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return when both sockets answer."""
        self._task = asyncio.create_task(self._server.serve(self._sockets), name="http-server")
        listening = asyncio.create_task(self._server.listening.wait())
        await asyncio.wait({self._task, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not listening.done():
            listening.cancel()
            await self._task  # raises why it could not start

    async def stop(self) -> None:
        """Close the sockets; answers under way get a moment, connections that still read after it are cut."""
        if self._task is None:
            return
        self._server.leave()
        await asyncio.wait({self._task}, timeout=_GRACE_S)
        # Cut and not cancelled: the applications see a client that went away and end as they always do.
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        await asyncio.wait({self._task})
        for bound in self._sockets:
            bound.close()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        self.should_exit = True
        self._leaving.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def main_loop(self) -> None:
        # uvicorn wakes ten times a second to look at a flag; an idle daemon should sleep.
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), _TICK_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the life cycle owns them


class _GuardedProtocol(H11Protocol):
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)  # first, so that connection_lost finds what it expects
        peer: socket.socket | None = transport.get_extra_info("socket")
        if peer is not None and peer.family == socket.AF_UNIX and not may_connect(peer):
            transport.abort()

    def send_400_response(self, msg: str) -> None:
        error = InvalidRequest("this is not HTTP that omlxd understands")
        body = json.dumps({"error": error.to_json()}).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
