"""One exchange over HTTP/1.1 on a connection of its own; h11 reads it, in half of the time that `http.client` needs to
be imported."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping

import h11

_READ_BYTES = 65_536


class Answer:
    """The answer to one request, which has been sent.

    Args:
        connection: to the daemon; closed by its owner.
        method, target, headers, body: the request.

    Attributes:
        status, reason: its first line.

    Raises:
        BrokenAnswer: there is none, here or while it is read.
        OSError: the connection's, among them TimeoutError.
    """

    def __init__(
        self, connection: socket.socket, method: str, target: str, headers: Mapping[str, str], body: bytes | None
    ) -> None:
        self._connection = connection
        self._messages = h11.Connection(h11.CLIENT)
        size = {} if body is None else {"Content-Length": str(len(body))}
        named = [*{"Host": "localhost", **headers, **size}.items()]
        sent = self._messages.send(h11.Request(method=method, target=target, headers=named)) or b""
        if body:
            sent += self._messages.send(h11.Data(data=body)) or b""
        connection.sendall(sent + (self._messages.send(h11.EndOfMessage()) or b""))
        head = self._next()
        while isinstance(head, h11.InformationalResponse):
            head = self._next()
        if not isinstance(head, h11.Response):
            raise BrokenAnswer("the connection ended before an answer")
        self.status, self.reason = head.status_code, head.reason.decode("latin-1")

    def read(self) -> bytes:
        """All of its body that is left."""
        return b"".join(self._pieces())

    def __iter__(self) -> Iterator[bytes]:
        """Its lines as they come, with their ends."""
        begun = b""
        for piece in self._pieces():
            *lines, begun = (begun + piece).split(b"\n")
            for line in lines:
                yield line + b"\n"
        if begun:
            yield begun

    def _pieces(self) -> Iterator[bytes]:
        while isinstance(event := self._next(), h11.Data):
            yield bytes(event.data)

    def _next(self) -> h11.Event:
        try:
            while (event := self._messages.next_event()) is h11.NEED_DATA:
                self._messages.receive_data(self._connection.recv(_READ_BYTES))
        except h11.RemoteProtocolError as error:
            raise BrokenAnswer(str(error)) from error
        if not isinstance(event, h11.Event):
            raise BrokenAnswer("the answer is none of HTTP")  # PAUSED: it has switched to another protocol
        return event


class BrokenAnswer(Exception):
    """What came is no answer, or not all of one."""
