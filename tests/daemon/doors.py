"""A running server with a little application behind both doors, and how to knock."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from omlxd.core.errors import Busy, OmlxError
from omlxd.core.events import Event
from omlxd.core.manifest import ListenAddress
from omlxd.daemon.connection import Bounds
from omlxd.daemon.front_door import FrontDoor, TcpRules
from omlxd.daemon.http_errors import (
    JsonResponse,
    answer_http_exception,
    answer_omlx_error,
    answer_unexpected,
)
from omlxd.daemon.log import libraries_to
from omlxd.daemon.server import HttpServer
from omlxd.daemon.sockets import bind_tcp, bind_unix
from omlxd.daemon.streams import NDJSON, Stream, while_connected
from tests.fakes.wire import connect

PROMPT = "a prompt that nobody may log"


@dataclass
class Doors:
    """Where the server is, and what has happened there."""

    unix: Path
    tcp: tuple[str, int]
    events: list[Event] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    def door(self, name: str) -> Path | tuple[str, int]:
        """Where to knock."""
        return self.unix if name == "unix" else self.tcp


both_doors = pytest.mark.parametrize("door", ["unix", "tcp"])


@asynccontextmanager
async def doors(
    tmp_path: Path, *, listen: str = "127.0.0.1", api_key: str | None = None, **limits: Any
) -> AsyncIterator[Doors]:
    address = ListenAddress(listen, 0)
    unix, tcp = bind_unix(tmp_path / "s"), bind_tcp(address, manifest=tmp_path / "omlxd.toml")
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # and its connections, so that little is "sent" unread
    made = Doors(tmp_path / "s", ("127.0.0.1", tcp.getsockname()[1]))

    async def endless(request: Request) -> Response:
        return Stream(_endless(made), NDJSON)

    async def wait(request: Request) -> Response:
        return await _wait(request, made)

    shared = [Route("/v1/models", _echo, methods=["GET", "POST"]), Route("/health", _echo), Route("/page", _page)]
    secret = [
        Route("/v1/control/status", _echo),
        Route("/v1/control/broken", _broken),
        Route("/v1/control/busy", _busy),
        Route("/v1/control/endless", endless),
        Route("/v1/control/long", _long),
        Route("/v1/control/wait", wait, methods=["POST"]),
    ]
    handlers = {OmlxError: answer_omlx_error, HTTPException: answer_http_exception, Exception: answer_unexpected}
    front = FrontDoor(
        Starlette(routes=shared + secret, exception_handlers=handlers),
        Starlette(routes=shared, exception_handlers=handlers),
        TcpRules(address, api_key),
        made.events.append,
        max_body_bytes=1_000,
    )
    bounds = Bounds(**{"most_connections": 100, **limits})
    server = HttpServer(front, [unix, tcp], made.events.append, bounds=bounds)
    with libraries_to(made.events.append):
        await server.start()
        try:
            yield made
        finally:
            await server.stop()


async def _echo(request: Request) -> Response:
    return JsonResponse({"bytes": len(await request.body())})


async def _broken(request: Request) -> Response:
    raise RuntimeError(PROMPT)


async def _long(request: Request) -> Response:
    return Response(b"x" * 4_000_000)  # more than sockets hold


async def _page(request: Request) -> Response:
    return Response(b"x" * 60_000)  # less than asyncio holds before it tells the writer to pause


async def _busy(request: Request) -> Response:
    raise Busy("the queue is full", hint="try again", details={"retry_after_s": 2.5})


async def _endless(made: Doors) -> AsyncIterator[bytes]:
    try:
        while True:
            yield b'{"filler":"' + b"x" * 4_000 + b'"}\n'
    finally:
        made.closed.set()


async def _wait(request: Request, made: Doors) -> Response:
    await request.body()

    async def forever() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            made.closed.set()
        return 0

    return JsonResponse({"result": await while_connected(request, forever())})


def knock(where: Path | tuple[str, int]) -> socket.socket:
    return connect(where) if isinstance(where, Path) else socket.create_connection(where, timeout=20)


async def raw(where: Path | tuple[str, int], sent: bytes) -> bytes:
    """What the server answers to these bytes, until it closes."""

    def talk() -> bytes:
        with knock(where) as peer:
            peer.sendall(sent)
            received = b""
            while part := peer.recv(65_536):
                received += part
            return received

    return await asyncio.to_thread(talk)
