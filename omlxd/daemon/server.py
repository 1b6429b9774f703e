"""One uvicorn server on sockets that we bound; signals stay ours, and a foreign peer is cut off at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from omlxd.core.errors import Busy, InvalidRequest, OmlxError
from omlxd.daemon.front_door import MAX_HEADER_BYTES
from omlxd.daemon.sockets import may_connect

BACKLOG = 512
READ_TIMEOUT_S = 30.0
WRITE_TIMEOUT_S = 300.0
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
        read_timeout_s: a request's header, and each further piece of its body, must come within this.
        write_timeout_s: a client that has left more unread than the system and we hold for it must go on within this.
        most_connections: on each door; one more is told to come back. By default so many that a crowd at both doors
            leaves the daemon descriptors for its own files.
    """

    def __init__(
        self,
        app: ASGIApp,
        sockets: Sequence[socket.socket],
        *,
        read_timeout_s: float = READ_TIMEOUT_S,
        write_timeout_s: float = WRITE_TIMEOUT_S,
        most_connections: int | None = None,
    ) -> None:
        if most_connections is None:
            most_connections = connections_within(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        protocol = partial(
            _GuardedProtocol,
            read_timeout_s=read_timeout_s,
            write_timeout_s=write_timeout_s,
            most_connections=most_connections,
        )
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
                await asyncio.wait_for(self._leaving.wait(), _TICK_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the life cycle owns them


class _GuardedProtocol(H11Protocol):
    def __init__(
        self, *arguments: Any, read_timeout_s: float, write_timeout_s: float, most_connections: int, **named: Any
    ) -> None:
        super().__init__(*arguments, **named)
        self._read_timeout_s = read_timeout_s
        self._write_timeout_s = write_timeout_s
        self._most_connections = most_connections
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._is_unix = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)  # first, so that connection_lost finds what it expects
        peer: socket.socket | None = transport.get_extra_info("socket")
        self._is_unix = peer is not None and peer.family == socket.AF_UNIX
        if peer is not None and self._is_unix and not may_connect(peer):
            transport.abort()
        elif self._is_one_too_many():
            self._refuse(503, Busy("too many connections are open", details={"retry_after_s": 1.0}))
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self._is_read_again()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self._write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._is_read_again()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return  # refused; the rest is of no interest
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: uvicorn would advise the user to install something; the front door answers."""

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # In the middle of a body. Its application must not go on as if this answer had not been given.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._refuse(
            400, InvalidRequest("this is not HTTP that omlxd understands", hint="send requests as HTTP libraries do")
        )

    def _refuse(self, status: int, error: OmlxError) -> None:
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        if isinstance(error, Busy):
            headers.append((b"retry-after", b"%d" % error.retry_after_s))
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for event in (
                h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status]),
                h11.Data(data=json.dumps({"error": error.to_json()}).encode()),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _is_one_too_many(self) -> bool:
        """Counted for each door: a crowd on TCP must not keep `omlxd stop` out."""
        if len(self.connections) <= self._most_connections:
            return False
        same_door: int = sum(getattr(each, "_is_unix", None) == self._is_unix for each in self.connections)
        return same_door > self._most_connections

    def _watch(self) -> None:
        """Let the deadline run while it is the client's turn: for a header in all, for a body from piece to piece."""
        if self.transport.is_closing():
            self._unwatch()
            return
        between_requests = self.cycle is None or self.cycle.response_complete
        reads_body = not between_requests and bool(self.cycle.more_body) and not self.flow.read_paused
        if not between_requests:
            self._unwatch()
        if (between_requests or reads_body) and self._deadline is None:
            self._deadline = self.loop.call_later(self._read_timeout_s, self._out_of_time)

    def _out_of_time(self) -> None:
        if self.transport.get_write_buffer_size():  # it still reads the last answer
            self._deadline = self.loop.call_later(self._write_timeout_s, self.transport.abort)
        else:
            self.transport.abort()

    def _is_read_again(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
