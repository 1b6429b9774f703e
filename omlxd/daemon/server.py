"""One uvicorn server on sockets that we bound; signals stay ours."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Iterator, Sequence
from functools import partial
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from omlxd.core.events import Emit
from omlxd.daemon.connection import Bounds, Connection
from omlxd.daemon.log import FewAlike

BACKLOG = 512
MOST_CONNECTIONS = 512
OWN_FILES = 64
"""Descriptors that connections leave to the rest of the process: sockets, log, state file, shards of a load."""
_TICK_S = 1.0
_GRACE_S = 0.5


class HttpServer:
    """The server of both doors.

    Args:
        app: answers the requests.
        sockets: bound by us; closed when the server stops.
        emit: is told what was refused before it became a request.
        bounds: how long clients may take, and how many there may be at each door; by default so many that a crowd at
            both leaves the daemon descriptors for its own files.
    """

    def __init__(
        self,
        app: ASGIApp,
        sockets: Sequence[socket.socket],
        emit: Emit,
        *,
        bounds: Bounds | None = None,
    ) -> None:
        if bounds is None:
            bounds = Bounds(most_connections=connections_within(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
        self._refusals = FewAlike(emit)
        protocol = partial(Connection, bounds=bounds, tell=self._refusals.emit)
        self._server = _Server(
            uvicorn.Config(
                app,
                loop="none",
                http=cast(type[asyncio.Protocol], protocol),  # uvicorn only calls it
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                interface="asgi3",
                backlog=BACKLOG,
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
        self._refusals.tell_left_out()


def connections_within(most_files: int) -> int:
    """How many connections each of the two doors may have in a process that may open so many files."""
    if most_files == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(1, min(MOST_CONNECTIONS, (most_files - OWN_FILES) // 2))


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
                async with asyncio.timeout(_TICK_S):
                    await self._leaving.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the life cycle owns them
