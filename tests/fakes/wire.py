"""A small HTTP client for tests: over the Unix socket or TCP, from a thread, so that the loop under test stays free."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Answer:
    """A whole response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.body.splitlines()]


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = connect(self._path)


def connect(path: Path) -> socket.socket:
    """A connected Unix socket."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.settimeout(TIMEOUT_S)
    try:
        made.connect(str(path))
    except OSError:
        made.close()
        raise
    return made


def ask(
    where: Path | tuple[str, int],
    method: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """One request; `body` is sent as JSON unless it is bytes. Blocks: for other threads and other processes."""
    connection = (
        UnixConnection(where) if isinstance(where, Path) else http.client.HTTPConnection(*where, timeout=TIMEOUT_S)
    )
    content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request(method, path, content, dict(headers or {}))
        response = connection.getresponse()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


async def fetch(
    where: Path | tuple[str, int],
    method: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """`ask` from a thread."""
    return await asyncio.to_thread(ask, where, method, path, body, headers)
