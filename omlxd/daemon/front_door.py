"""What every HTTP request passes first: which door it came through, who may enter, how much it may carry.

The Unix socket is guarded by its mode and the peer's uid and shows everything. On TCP the control routes do not
exist, a web page of a foreign name cannot reach us under it (DNS rebinding: `Host`) or post to us (`Origin`), and the
manifest's key is asked for.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import socket
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omlxd.core.errors import InvalidRequest, NotPermitted, OmlxError
from omlxd.core.events import Emit, Event, EventLevel, EventName
from omlxd.core.manifest import ListenAddress
from omlxd.core.wording import shown
from omlxd.daemon.http_errors import BodyTooLarge, CodedBody, HeaderTooLarge, KeyRefused, error_response, is_over_tcp
from omlxd.daemon.log import trace_of
from omlxd.daemon.turnstile import Turnstile

MAX_BODY_BYTES = 8 * 2**20
MAX_HEADER_BYTES = 32 * 1024
LINGER_S = 2.0
POSTS_AT_ONCE = 4
"""Requests with a body that begin in one turn of the loop: with tools each takes milliseconds to be read."""
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_OPEN_TO_ALL = frozenset({"/health"})


@dataclass(frozen=True, slots=True)
class TcpRules:
    """Who may use the TCP door.

    Attributes:
        listen: the address in the manifest.
        api_key: the bearer key, or None when none is asked for.
        allow_origins: web pages of these origins may use it from a browser (CORS); of others they may not.
    """

    listen: ListenAddress
    api_key: str | None = field(default=None, repr=False)
    allow_origins: frozenset[str] = frozenset()

    def is_our_name(self, host: str) -> bool:
        """Whether a `Host` or `Origin` of this name is meant for us and not a rebound foreign name."""
        if host in _LOOPBACK or host == self.listen.host:
            return True
        # Listening on all addresses: any address is ours, and an address cannot be rebound; of the names only our own.
        return self._hears_all and (_is_address(host) or host == socket.gethostname().lower())

    @property
    def our_names(self) -> tuple[str, ...]:
        """Names in an address that are taken, for who has used another."""
        if self._hears_all:
            return ("localhost", "127.0.0.1", socket.gethostname().lower())
        return tuple(dict.fromkeys((self.listen.host, "localhost")))

    @property
    def _hears_all(self) -> bool:
        return self.listen.host in ("0.0.0.0", "::")

    def is_our_page(self, origin: str) -> bool:
        """Whether web pages of this origin may use it: those of this machine, and those that the manifest lists."""
        return origin.lower() in self.allow_origins or self.is_our_name(_origin_host(origin))


class FrontDoor:
    """The ASGI application of the server: checks, then the Unix or the TCP application.

    Args:
        unix: answers on the Unix socket.
        tcp: answers on TCP.
        rules: who may use TCP; None when there is no TCP socket.
        emit: where an unexpected exception is reported.
        max_body_bytes: longer bodies get 413.
    """

    def __init__(
        self, unix: ASGIApp, tcp: ASGIApp, rules: TcpRules | None, emit: Emit, *, max_body_bytes: int = MAX_BODY_BYTES
    ) -> None:
        self._unix = unix
        self._tcp = tcp
        self.rules = rules
        self._emit = emit
        self._max_body_bytes = max_body_bytes
        self._turnstile = Turnstile(POSTS_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return None
        over_tcp = is_over_tcp(scope)
        body = _BoundedBody(receive, self._max_body_bytes, unread=_has_body(scope))
        send = body.lingering(send)
        try:
            _check_header(scope)
            _check_framing(scope)
            if over_tcp:
                if (origin := self._allowed_origin(scope)) is not None:
                    send = _telling_the_browser(send, origin)
                    if scope["method"] == "OPTIONS":
                        return await _preflight(scope)(scope, receive, send)  # browsers ask without the key
                self._check_tcp(scope)
            if (_header(scope, b"upgrade") or "").lower() == "websocket":
                raise InvalidRequest("omlxd does not speak WebSocket", hint="send a plain HTTP request")
            body.check_announced(_header(scope, b"content-length"))
            if scope["method"] == "POST":
                await self._turnstile.through()
            await (self._tcp if over_tcp else self._unix)(scope, body.receive, send)
        except OmlxError as refused:  # only from the checks: the applications answer their own errors
            await error_response(refused, scope["path"], over_tcp=over_tcp)(scope, receive, send)
        except ClientDisconnect:
            fields = {"method": scope["method"], "path": shown(scope["path"]), "message": "the client went away"}
            self._emit(Event(EventName.API_ERROR, level=EventLevel.WARNING, fields=fields))
        except Exception as error:
            # The client has its 500, or a broken stream; the frames go to the log without the message, which may quote.
            fields = {"method": scope["method"], "path": shown(scope["path"]), "traceback": trace_of(error)}
            self._emit(Event(EventName.API_ERROR, level=EventLevel.ERROR, fields=fields))

    def _allowed_origin(self, scope: Scope) -> str | None:
        """The origin of the request when it is one of those that the manifest lists."""
        origin = _header(scope, b"origin")
        if origin is None or self.rules is None or origin.lower() not in self.rules.allow_origins:
            return None
        return origin if self.rules.is_our_name(_host_of(_header(scope, b"host") or "")) else None

    def _check_tcp(self, scope: Scope) -> None:
        rules = self.rules
        if rules is None:
            raise NotPermitted("this daemon does not listen on TCP")
        asked = _header(scope, b"host")
        if not asked:
            raise InvalidRequest("the request has no `Host`", hint="send one, as `Host: localhost`")
        host = _host_of(asked)
        if not rules.is_our_name(host):
            raise NotPermitted(
                f"the `Host` `{shown(host or asked)}` is not this server's name",
                hint=f"in the address use {' or '.join(f'`{name}`' for name in rules.our_names)}",
            )
        origin = _header(scope, b"origin")
        if origin is not None and not rules.is_our_page(origin):
            raise NotPermitted(
                f"web pages of `{shown(origin)}` may not use this server",
                hint="`allow_origins` in the `[api]` table of the manifest names those that may",
            )
        if rules.api_key is not None and scope["path"] not in _OPEN_TO_ALL:
            _check_key(rules.api_key, _header(scope, b"authorization") or "", _header(scope, b"x-api-key") or "")


_USUAL_HEADERS = "authorization, content-type, x-api-key, anthropic-version, anthropic-beta"
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_, -]{1,2048}")


def _preflight(scope: Scope) -> Response:
    """What a page of a listed origin may send: any header, since the clients' libraries add a dozen of their own."""
    asked = _header(scope, b"access-control-request-headers") or ""
    headers = {
        "access-control-allow-methods": "GET, POST",
        "access-control-allow-headers": asked if _HEADER_NAMES.fullmatch(asked) else _USUAL_HEADERS,
        "access-control-max-age": "600",
    }
    return Response(status_code=204, headers=headers)


def _telling_the_browser(send: Send, origin: str) -> Send:
    """Answers that a page of this origin may read."""

    async def telling(message: Message) -> None:
        if message["type"] == "http.response.start":
            told = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]
            message = {**message, "headers": [*message.get("headers", ()), *told]}
        await send(message)

    return telling


class _BoundedBody:
    def __init__(self, receive: Receive, max_bytes: int, *, unread: bool) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._seen_bytes = 0
        self._unread = unread

    def check_announced(self, content_length: str | None) -> None:
        if content_length is not None and content_length.isascii() and content_length.isdigit():
            self._check(int(content_length))

    async def receive(self) -> Message:
        message = await self._receive()
        self._unread = message["type"] == "http.request" and message.get("more_body", False)
        if message["type"] == "http.request":
            self._seen_bytes += len(message.get("body", b""))
            self._check(self._seen_bytes)
        return message

    def lingering(self, send: Send) -> Send:
        """The whole answer goes out, but ends only when the client has said all it wanted, or LINGER_S later.

        A client that still sends when the connection is closed gets a reset in place of the answer that refuses it.
        """

        async def sending(message: Message) -> None:
            if self._unread and message["type"] == "http.response.body" and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await self._discard()
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        return sending

    async def _discard(self) -> None:
        try:
            async with asyncio.timeout(LINGER_S):
                while self._unread:
                    message = await self._receive()
                    self._unread = message["type"] == "http.request" and message.get("more_body", False)
        except TimeoutError:
            self._unread = False

    def _check(self, size_bytes: int) -> None:
        if size_bytes > self._max_bytes:
            raise BodyTooLarge(f"the body is longer than {self._max_bytes} bytes", hint="send less at a time")


def _has_body(scope: Scope) -> bool:
    return _header(scope, b"transfer-encoding") is not None or _header(scope, b"content-length") not in (None, "0")


def _check_key(expected: str, authorization: str, key_alone: str) -> None:
    """Anthropic's clients send the key alone, all others as a bearer."""
    scheme, _, bearer = authorization.partition(" ")
    key = bearer if scheme.lower() == "bearer" else key_alone
    if not hmac.compare_digest(key.strip().encode("latin-1"), expected.encode()):
        raise KeyRefused(
            "the API key is missing or wrong",
            hint="send `Authorization: Bearer KEY` with the key that the daemon was given (`api.api_key`,"
            " `api.api_key_file` or `OMLXD_API_KEY`)",
        )


def _check_header(scope: Scope) -> None:
    """The server's parser bounds a header that it waits for; one that came at once it takes at any length."""
    line_bytes = len(scope["path"]) + len(scope["query_string"])
    if line_bytes + sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
        raise header_too_large()


def header_too_large() -> HeaderTooLarge:
    """The answer to a header that is longer than MAX_HEADER_BYTES."""
    return HeaderTooLarge(f"the header is longer than {MAX_HEADER_BYTES} bytes", hint="send fewer or shorter headers")


def _check_framing(scope: Scope) -> None:
    """Whether the body is what its bytes say."""
    if (_header(scope, b"content-encoding") or "identity").strip().lower() != "identity":
        raise CodedBody("the body is compressed or otherwise encoded", hint="send it plain, without `Content-Encoding`")


def _header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


def _host_of(authority: str) -> str:
    try:
        return (urlsplit(f"//{authority.strip()}").hostname or "").lower()
    except ValueError:
        return ""


def _origin_host(origin: str) -> str:
    try:
        return (urlsplit(origin.strip()).hostname or "").lower()  # `null` has none
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
