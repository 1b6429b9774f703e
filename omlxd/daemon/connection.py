"""One connection at a door: who may have it and for how long, and an answer even to what never became a request."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from omlxd.core.errors import Busy, InvalidRequest, OmlxError
from omlxd.core.events import Event, EventLevel, EventName
from omlxd.daemon.front_door import LINGER_S, MAX_HEADER_BYTES, header_too_large
from omlxd.daemon.http_errors import TooLate, error_response
from omlxd.daemon.sockets import may_connect
from omlxd.daemon.streams import LINE

READ_TIMEOUT_S = 30.0
BODY_TIMEOUT_S = 300.0
WRITE_TIMEOUT_S = 300.0
_MOST_TURNED_AWAY = 8
_LONGEST_PATH_BYTES = 1024
_TLS = b"\x16\x03"
_ABSOLUTE_FORM = re.compile(rb"http://(?P<authority>[^/?#]*)(?P<rest>.*)", re.IGNORECASE)
_CHUNK_HINT = "begin each chunk with its size in hexadecimal digits, on a line of its own, and end it with CRLF"
_LINE_HINT = "write a name, a colon without a space before it, and a value"
_FAULTS = {
    "Missing mandatory Host": ("the request has no `Host`", "send one, as `Host: localhost`"),
    "Found multiple Host": ("the request has more than one `Host`", "send one"),
    "conflicting Content-Length": ("`Content-Length` says more than one size", "send it once, with the body's size"),
    "bad Content-Length": ("`Content-Length` is not a size", "send the size of the body in bytes, in digits"),
    "multiple Transfer-Encoding": ("the request has more than one `Transfer-Encoding`", "send one, with `chunked`"),
    "Only Transfer-Encoding": ("omlxd knows no `Transfer-Encoding` but `chunked`", "send that, or `Content-Length`"),
    "illegal chunk header": ("a chunk of the body does not begin with its size", _CHUNK_HINT),
    "malformed chunk footer": ("a chunk of the body does not end where its size says", _CHUNK_HINT),
    "illegal header line": ("a line of the header is not `Name: value`", _LINE_HINT),
    "continuation line": ("the first line of the header begins with a space", _LINE_HINT),
}
"""What is said, and the next step, by how h11's words begin; they go on with what the client sent."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What clients may take.

    Attributes:
        most_connections: on each door; one more is told to come back.
        read_timeout_s: a request's header, and each further piece of its body, must come within this.
        body_timeout_s: all of the body must come within this.
        write_timeout_s: a client that has left more unread than the system and we hold for it must go on within this.
    """

    most_connections: int
    read_timeout_s: float = READ_TIMEOUT_S
    body_timeout_s: float = BODY_TIMEOUT_S
    write_timeout_s: float = WRITE_TIMEOUT_S


class Connection(H11Protocol):
    """uvicorn's, with bounds; another user's process is cut off at once.

    Args:
        arguments, named: uvicorn's.
        bounds: what the client may take.
        tell: where it is told what was refused here.
    """

    def __init__(self, *arguments: Any, bounds: Bounds, tell: Callable[[Event], None], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.conn: _Messages = _Messages()
        self._bounds = bounds
        self._tell = tell
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._body_of: object = None
        self._body_until_s = 0.0
        self._is_unix = False
        self._is_refused = False

    def connection_made(self, transport: Any) -> None:
        """Look who it is."""
        super().connection_made(transport)  # first, so that connection_lost finds what it expects
        peer: socket.socket | None = transport.get_extra_info("socket")
        self._is_unix = peer is not None and peer.family == socket.AF_UNIX
        if peer is not None and self._is_unix and not may_connect(peer):
            transport.abort()
        elif not self._turn_away_one_too_many():
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all clocks."""
        self._unwatch()
        self._is_read_again()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client reads slower than we write."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """It has read."""
        self._is_read_again()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Go on with the request; what comes after a refusal is of no interest."""
        if self._is_refused or self.transport.is_closing():
            return
        super().data_received(data)
        self._watch()

    def eof_received(self) -> None:
        """The client sends nothing more: what it has begun is refused; the transport writes that and closes."""
        if not self._is_refused and self._is_cut_off():
            # Most have gone away, which is told elsewhere; some only send no more, and still read.
            self._end_with(InvalidRequest("the request ended before all of it had come", hint="send it whole"))

    def handle_events(self) -> None:
        """Hand on what has come, and refuse what is none of HTTP."""
        last = self.cycle
        super().handle_events()
        if self.cycle is not last:  # its application begins with the loop's next turn
            scope: Any = self.cycle.scope
            scope["extensions"] = {**scope.get("extensions", {}), LINE: _BodyLine(self, self.cycle)}
        if self.conn.problem is not None:
            self._refuse(self.conn.problem)

    def on_response_complete(self) -> None:
        """The client's turn again."""
        super().on_response_complete()
        self._watch()

    def shutdown(self) -> None:
        """The server stops."""
        if self._is_refused:
            self.transport.close()
        else:
            super().shutdown()

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: uvicorn would advise the user to install something; the front door answers."""

    def _refuse(self, error: OmlxError) -> None:
        if self._can_answer:
            fields = {"source": self._door, "status": error.http_status, "code": error.code, "message": error.message}
            self._tell(Event(EventName.API_ERROR, level=EventLevel.WARNING, fields=fields))
        self._end_with(error)

    def _end_with(self, error: OmlxError) -> None:
        """The last answer of this connection, unless another has begun.

        A socket that is closed before all that was sent to it has been read is reset, and the client may lose the
        answer: it is told that nothing more comes, and gets a moment to hang up.
        """
        is_pending = self.cycle is not None and not self.cycle.response_complete
        if self._can_answer:
            path = self.scope["path"] if is_pending else self.conn.path
            self._write(error, path, with_body=not is_pending or self.scope["method"] != "HEAD")
        if is_pending:
            # Its application must not go on as if this answer had not been given.
            self.cycle.disconnected = True
            self.cycle.waiting_for_100_continue = False
            self.cycle.message_event.set()
        self._unset_keepalive_if_required()
        self._unwatch()
        self._is_refused = True
        self.flow.resume_reading()
        self.transport.write_eof()
        self._deadline = self.loop.call_later(LINGER_S, self._out_of_time)

    def _write(self, error: OmlxError, path: str, *, with_body: bool) -> None:
        answer = error_response(error, path, over_tcp=not self._is_unix)
        status, headers = answer.status_code, [*self.server_state.default_headers, *answer.raw_headers]
        if (b"connection", b"close") not in headers:
            headers.append((b"connection", b"close"))
        head = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
        self.transport.write(self.conn.send(head) or b"")
        if with_body:
            self.transport.write(self.conn.send(h11.Data(data=bytes(answer.body))) or b"")
        self.transport.write(self.conn.send(h11.EndOfMessage()) or b"")

    @property
    def _can_answer(self) -> bool:
        return self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE)

    @property
    def _door(self) -> str:
        return "the socket" if self._is_unix else "TCP"

    def _turn_away_one_too_many(self) -> bool:
        """Counted for each door: a crowd on TCP must not keep `omlxd stop` out."""
        most = self._bounds.most_connections
        if len(self.connections) <= most:
            return False
        here = [each for each in self.connections if getattr(each, "_is_unix", None) == self._is_unix]
        turned_away = sum(getattr(each, "_is_refused", False) for each in here)
        if len(here) - turned_away <= most:
            return False
        if turned_away < _MOST_TURNED_AWAY:
            self._end_with(Busy("too many connections are open", details={"retry_after_s": 1.0}))
        else:
            self.transport.abort()  # a crowd that hears each other out would take the descriptors after all
        return True

    def _watch(self) -> None:
        """Let the deadline run while it is the client's turn: for a header in all, for a body from piece to piece."""
        if self._is_refused:
            return
        if self.transport.is_closing():
            self._unwatch()
            if self._unread is None and self.transport.get_write_buffer_size():
                self._watch_reader()
            return
        between_requests = self.cycle is None or self.cycle.response_complete
        reads_body = not between_requests and bool(self.cycle.more_body) and not self.flow.read_paused
        if not between_requests:
            self._unwatch()
        if (between_requests or reads_body) and self._deadline is None:
            within_s = self._within_s() if reads_body else self._bounds.read_timeout_s
            self._deadline = self.loop.call_later(within_s, self._out_of_time)

    def _within_s(self) -> float:
        """When the next piece of the body has to be there."""
        now_s = self.loop.time()
        if self._body_of is not self.cycle:
            self._body_of, self._body_until_s = self.cycle, now_s + self._bounds.body_timeout_s
        return min(self._bounds.read_timeout_s, self._body_until_s - now_s)

    def _out_of_time(self) -> None:
        if self.transport.get_write_buffer_size():  # it still reads the last answer
            self._deadline = self.loop.call_later(self._bounds.write_timeout_s, self.transport.abort)
        elif self._is_refused or not self._has_begun():
            self.transport.abort()
        else:
            self._refuse(TooLate("the rest of the request did not come in time", hint="send it without pauses"))

    def _has_begun(self) -> bool:
        """Whether the client waits for an answer to the request that it has not sent to its end."""
        if self.cycle is not None and not self.cycle.response_complete:
            return True
        return self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])

    def _is_cut_off(self) -> bool:
        """Whether more of a request would have to come."""
        if self.cycle is not None and not self.cycle.response_complete:
            return bool(self.cycle.more_body)
        return self._has_begun()

    def _watch_reader(self) -> None:
        """Look again and again whether the client has read some of what waits for it, and cut it off when not."""
        left_bytes = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(self._bounds.write_timeout_s, self._cut_off_unless_read, left_bytes)

    def _cut_off_unless_read(self, left_bytes: int) -> None:
        if self.transport.get_write_buffer_size() < left_bytes:
            self._watch_reader()
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


class _BodyLine:
    """The `Line` of one request's answer: what uvicorn and h11 would write, without the way through them."""

    def __init__(self, connection: Connection, cycle: Any) -> None:
        self._connection, self._cycle = connection, cycle
        self._has_chunks: bool | None = None  # known once the body has begun

    @property
    def is_clear(self) -> bool:
        connection, cycle = self._connection, self._cycle
        if not cycle.response_started or cycle.response_complete or cycle.disconnected or connection.flow.write_paused:
            return False
        if self._has_chunks is None:
            self._has_chunks = connection.conn.sends_chunks
        return self._has_chunks and not connection.transport.is_closing()

    def write(self, piece: bytes) -> None:
        if piece:  # an empty chunk would end the body
            self._connection.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


class _Messages(h11.Connection):
    """h11's, but what it cannot read is a problem for us: of its exception uvicorn would make a line of its own.

    Attributes:
        problem: why nothing more can be read from this connection.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)
        self.problem: OmlxError | None = None
        self._line = b""

    @property
    def path(self) -> str:
        """What its request line says, as far as it says anything."""
        target = _origin_form(self._line.partition(b" ")[2].partition(b" ")[0])
        return target.partition(b"?")[0].decode("latin-1")

    @property
    def sends_chunks(self) -> bool:
        """Whether an answer without a length is on its way in chunks, as it is to all but clients of HTTP/1.0."""
        return self.our_state is h11.SEND_BODY and self.their_http_version == b"1.1"

    def next_event(self) -> Any:
        """The next event; none when there is a problem."""
        in_header = self.their_state is h11.IDLE
        if in_header:
            self._line = self.trailing_data[0][:_LONGEST_PATH_BYTES]  # it is gone when it turns out to be wrong
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if self.problem is None:
                is_long = in_header and error.error_status_hint == 431
                self.problem = header_too_large() if is_long else _not_http(self._line, str(error))
            return h11.NEED_DATA
        if isinstance(event, h11.Request) and not event.http_version.startswith(b"1."):
            self.problem = _not_http(self._line)  # the greeting of HTTP/2 looks like a request
            return h11.NEED_DATA
        if not isinstance(event, h11.Request):
            return event
        if {b"transfer-encoding", b"content-length"} <= {name for name, _ in event.headers}:
            self.problem = InvalidRequest(  # RFC 9112, section 6.1: and nothing behind it may be read
                "both `Transfer-Encoding` and `Content-Length` say where the body ends", hint="send one"
            )
            return h11.NEED_DATA
        return _with_path_alone(event)


def _with_path_alone(request: h11.Request) -> h11.Request:
    """RFC 9112, section 3.2.2: of `GET http://HOST/PATH` the path, and its authority in the place of `Host`."""
    absolute = _ABSOLUTE_FORM.fullmatch(request.target)
    if absolute is None:
        return request
    headers = [(b"host", absolute["authority"]), *(each for each in request.headers if each[0] != b"host")]
    target, version = _origin_form(request.target), request.http_version
    return h11.Request(method=request.method, target=target, headers=headers, http_version=version)


def _origin_form(target: bytes) -> bytes:
    absolute = _ABSOLUTE_FORM.fullmatch(target)
    if absolute is None:
        return target
    return absolute["rest"] if absolute["rest"].startswith(b"/") else b"/" + absolute["rest"]


def _not_http(line: bytes, found: str = "") -> InvalidRequest:
    if line.startswith(_TLS):
        return InvalidRequest("this is TLS; omlxd speaks plain HTTP", hint="begin the address with `http://`")
    for begins, (message, hint) in _FAULTS.items():
        if found.startswith(begins):
            return InvalidRequest(message, hint=hint)
    return InvalidRequest("this is not HTTP that omlxd understands", hint="send HTTP/1.1, as HTTP libraries do")
