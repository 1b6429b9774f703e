"""One connection: what is no request, or comes too late, is answered all the same, in the shape that is expected."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from omlxd.core.events import EventLevel, EventName
from omlxd.daemon import connection, server
from tests.daemon.doors import Doors, both_doors, doors, knock, raw
from tests.fakes.wire import fetch

OURS, OPENAI = {"code", "message", "hint", "details"}, {"message", "type", "param", "code", "hint"}
ANTHROPIC = {"type", "message", "code", "hint"}
SHAPES = {
    ("unix", "/nothing"): OURS,
    ("unix", "/v1/control/status"): OURS,
    ("unix", "/v1/models"): OPENAI,
    ("unix", "/v1/messages"): ANTHROPIC,
    ("tcp", "/nothing"): OPENAI,
    ("tcp", "/v1/control/status"): OPENAI,
    ("tcp", "/v1/models"): OPENAI,
    ("tcp", "/v1/messages"): ANTHROPIC,
}
in_every_shape = pytest.mark.parametrize(
    ("door", "path", "shape"), [(*where, shape) for where, shape in SHAPES.items()]
)


@dataclass(frozen=True)
class Parsed:
    """An answer that was read to the end of its connection."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        return dict(json.loads(self.body)["error"])


def parsed(answer: bytes) -> Parsed:
    """The one answer in these bytes."""
    assert answer.count(b"HTTP/1.1 ") == 1
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return Parsed(int(status.split()[1]), headers, body)


def post(path: str, headers: str, body: bytes = b"", method: str = "POST") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n\r\n".encode() + body


async def serves(made: Doors, door: str) -> bool:
    return (await fetch(made.door(door), "GET", "/health")).status == 200


@in_every_shape
@pytest.mark.parametrize(
    ("is_whole", "header_bytes"), [(False, 40_000), (True, 40_000), (False, 10_000_000)], ids=["begun", "whole", "huge"]
)
async def test_a_header_that_is_too_long_is_refused_and_the_client_reads_why(
    tmp_path: Path, door: str, path: str, shape: set[str], is_whole: bool, header_bytes: int
) -> None:
    """The huge one is far larger than what the sockets hold: were it not heard out, `sendall` would fail."""
    async with doors(tmp_path) as made:
        sent = post(path, "Connection: close\r\nX: " + "x" * header_bytes)
        answer = parsed(await raw(made.door(door), sent if is_whole else sent.rstrip()))
        assert (answer.status, answer.error["code"]) == (431, "header_too_large")
        assert set(answer.error) - {"details"} == shape - {"details"}
        assert await serves(made, door)


@both_doors
async def test_a_request_line_that_is_too_long_is_refused_like_a_header(tmp_path: Path, door: str) -> None:
    async with doors(tmp_path) as made:
        for end in (b"", b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"):
            answer = parsed(await raw(made.door(door), b"GET /health?" + b"x" * 40_000 + end))
            assert (answer.status, answer.error["code"]) == (431, "header_too_large")


@pytest.mark.parametrize(
    "sent",
    [
        b"rubbish\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x00" * 1_000_000,
    ],
    ids=["rubbish", "TLS", "HTTP/2", "zeroes"],
)
@pytest.mark.parametrize(("door", "shape", "source"), [("unix", OURS, "the socket"), ("tcp", OPENAI, "TCP")])
async def test_what_is_not_http_is_an_error_of_the_usual_shape_and_one_event_of_ours(
    tmp_path: Path, door: str, shape: set[str], source: str, sent: bytes
) -> None:
    async with doors(tmp_path) as made:
        answer = parsed(await raw(made.door(door), sent))
        assert (answer.status, set(answer.error)) == (400, shape)
        assert answer.headers["content-type"] == "application/json"
        assert int(answer.headers["content-length"]) == len(answer.body)
        assert answer.error["message"].startswith("this is TLS" if sent[:1] == b"\x16" else "this is not HTTP")
        assert await serves(made, door)
    (event,) = made.events
    assert (event.event, event.level) == (EventName.API_ERROR, EventLevel.WARNING)
    assert event.fields == {
        "source": source,
        "status": 400,
        "code": "invalid_request",
        "message": answer.error["message"],
    }


MARKER = "xyzzy"
NO_HOST, CHUNKED = "GET /health HTTP/1.1\r\nX: y\r\n\r\n", "Transfer-Encoding: chunked"
FAULTS = {
    "no host": (NO_HOST.encode(), "the request has no `Host`"),
    "two hosts": (post("/health", f"Host: {MARKER}"), "more than one `Host`"),
    "a length in letters": (post("/health", f"Content-Length: {MARKER}"), "`Content-Length` is not a size"),
    "a length below zero": (post("/health", "Content-Length: -5"), "`Content-Length` is not a size"),
    "a length of many digits": (post("/health", "Content-Length: " + "9" * 30), "`Content-Length` is not a size"),
    "two lengths": (post("/health", "Content-Length: 1\r\nContent-Length: 2"), "says more than one size"),
    "two lengths in one": (post("/health", "Content-Length: 1, 2"), "says more than one size"),
    "another coding": (post("/health", f"Transfer-Encoding: {MARKER}"), "no `Transfer-Encoding` but `chunked`"),
    "two codings": (post("/health", f"{CHUNKED}\r\n{CHUNKED}"), "more than one `Transfer-Encoding`"),
    "a chunk without size": (post("/v1/models", CHUNKED, MARKER.encode() + b"\r\n"), "does not begin with its size"),
    "a chunk too long": (post("/v1/models", CHUNKED, b"2\r\n{}" + MARKER.encode()), "does not end where its size says"),
    "no colon": (post("/health", MARKER), "a line of the header is not `Name: value`"),
    "a space before the colon": (post("/health", f"{MARKER} : x"), "a line of the header is not `Name: value`"),
    "no colon behind the body": (
        post("/v1/models", CHUNKED, f"0\r\n{MARKER}\r\n\r\n".encode()),
        "a line of the header is not `Name: value`",
    ),
    "two ways to end": (post("/v1/models", f"{CHUNKED}\r\nContent-Length: 5", b"0\r\n\r\n"), "say where the body ends"),
    "a space at the start": (b"GET /health HTTP/1.1\r\n Host: localhost\r\n\r\n", "begins with a space"),
}


@both_doors
@pytest.mark.parametrize("case", FAULTS)
async def test_a_request_with_a_fault_is_told_which_and_what_to_send_instead(
    tmp_path: Path, door: str, case: str
) -> None:
    sent, words = FAULTS[case]
    async with doors(tmp_path) as made:
        answer = parsed(await raw(made.door(door), sent))
        assert answer.status == 400
        assert words in answer.error["message"]
        assert answer.error["hint"]
        assert MARKER.encode() not in answer.body
        assert await serves(made, door)
    assert not any(MARKER in str(event.fields) for event in made.events)
    assert made.events[0].fields["message"] == answer.error["message"]


async def test_http_1_0_without_a_host_is_told_on_tcp_that_one_is_needed(tmp_path: Path) -> None:
    async with doors(tmp_path) as made:
        answer = parsed(await raw(made.tcp, b"GET /health HTTP/1.0\r\n\r\n"))
        assert (answer.status, answer.error["message"]) == (400, "the request has no `Host`")
        assert "`Host: localhost`" in answer.error["hint"]
        assert parsed(await raw(made.unix, b"GET /health HTTP/1.0\r\n\r\n")).status == 200


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://127.0.0.1:8471/health", "localhost", 200),
        ("HTTP://localhost/v1/models?limit=3", "localhost", 200),
        ("http://localhost/health", None, 200),
        ("http://localhost/health", "evil.example", 200),
        ("http://evil.example/health", "localhost", 403),
        ("http://localhost@evil.example/health", "localhost", 403),
        ("http:///health", "localhost", 400),
        ("http://localhost", "localhost", 404),
        ("http://localhost?/health", "localhost", 404),
        ("http://localhost/v1/control/status", "localhost", 404),
    ],
)
async def test_of_an_absolute_target_the_path_is_taken_and_its_authority_is_checked_as_the_host(
    tmp_path: Path, target: str, host: str | None, status: int
) -> None:
    async with doors(tmp_path) as made:
        lines = ["Connection: close", *([] if host is None else [f"Host: {host}"])]
        version = "1.0" if host is None else "1.1"
        sent = f"GET {target} HTTP/{version}\r\n" + "\r\n".join(lines) + "\r\n\r\n"
        assert parsed(await raw(made.tcp, sent.encode())).status == status


async def test_the_body_and_the_key_of_an_absolute_target_are_asked_for_as_of_any(tmp_path: Path) -> None:
    async with doors(tmp_path, api_key="0123456789") as made:
        sent = post("http://localhost/v1/models", "Connection: close\r\nContent-Length: 2", b"{}")
        assert parsed(await raw(made.tcp, sent)).status == 401
        assert parsed(await raw(made.unix, sent)).body == b'{"bytes":2}'
        wrong = post("http://localhost/v1/messages", "Content-Length: x")
        assert set(parsed(await raw(made.unix, wrong)).error) == ANTHROPIC


async def test_of_rubbish_without_end_only_the_first_few_are_logged_and_the_others_counted(tmp_path: Path) -> None:
    async with doors(tmp_path) as made:
        for _ in range(8):
            await raw(made.tcp, b"rubbish\r\n\r\n")
        assert len(made.events) == 5
    assert made.events[-1].fields["alike_left_out"] == 3


@in_every_shape
async def test_unknown_paths_and_wrong_methods_are_errors_of_the_shape_that_is_expected_there(
    tmp_path: Path, door: str, path: str, shape: set[str]
) -> None:
    async with doors(tmp_path) as made:
        answer = await fetch(made.door(door), "DELETE", path)
        assert answer.status in (404, 405)
        assert set(answer.json["error"]) - {"details"} == shape - {"details"}


@in_every_shape
@pytest.mark.parametrize("sent", [b"zzz\r\n", b"5\r\n{}"], ids=["not HTTP", "half of it"])
async def test_a_body_that_never_becomes_one_is_answered_once_in_the_shape_that_is_expected(
    tmp_path: Path, door: str, path: str, shape: set[str], sent: bytes
) -> None:
    async with doors(tmp_path, read_timeout_s=0.05) as made:
        if path == "/v1/control/status":
            path = "/v1/control/wait"  # which reads a body
        reading = {"unix": {"/v1/control/wait", "/v1/models"}, "tcp": {"/v1/models"}}[door]
        answer = parsed(await raw(made.door(door), post(path, "Transfer-Encoding: chunked", sent)))
        late = (408, "request_timeout") if path in reading else (404, "no_such_path")  # which was answered at once
        assert (answer.status, answer.error["code"]) == ((400, "invalid_request") if sent == b"zzz\r\n" else late)
        assert set(answer.error) - {"details"} == shape - {"details"}
        assert await serves(made, door)
    assert not any("traceback" in event.fields for event in made.events)
    assert all(event.event is EventName.API_ERROR for event in made.events)
    assert [event.fields["status"] for event in made.events[:1]] == [answer.status] * (answer.status != 404)
    assert len(made.events) <= 2  # the server's word, and the application's where it was reading


@both_doors
async def test_a_body_that_was_refused_is_not_asked_for_any_more(tmp_path: Path, door: str) -> None:
    async with doors(tmp_path) as made:
        sent = post("/v1/models", "Transfer-Encoding: chunked\r\nExpect: 100-continue", b"zzz\r\n")
        assert parsed(await raw(made.door(door), sent)).status == 400
    assert not any("traceback" in event.fields for event in made.events)


@both_doors
@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        (b"", []),
        (b"GET /health HTTP/1.1\r\nHo", [408]),
        (post("/v1/models", "Content-Length: 9", b"{}"), [408]),
        (post("/v1/models", "Content-Length: 9\r\nExpect: 100-continue"), [100, 408]),
        (post("/v1/models", "Content-Length: 9", b"{}", method="HEAD"), [408]),
        (post("/health", "Accept: */*", method="GET"), [200]),
        (post("/health", "Accept: */*", method="GET") + b"GET /hea", [200, 408]),
        (post("/health", "Accept: */*", method="GET") * 3 + b"rubbish\r\n\r\n", [200, 200, 200, 400]),
    ],
    ids=[
        "nothing",
        "half a header",
        "half a body",
        "a body that was asked for",
        "half a body of HEAD",
        "no second request",
        "half a second header",
        "rubbish behind requests",
    ],
)
async def test_a_client_that_does_not_go_on_is_told_so_and_the_connection_closed(
    tmp_path: Path, sent: bytes, statuses: list[int], door: str
) -> None:
    async with doors(tmp_path, read_timeout_s=0.05) as made:
        answers = (await raw(made.door(door), sent)).split(b"HTTP/1.1 ")[1:]
        assert [int(answer[:3]) for answer in answers] == statuses
        assert await serves(made, door)
    assert not any("traceback" in event.fields for event in made.events)


@both_doors
async def test_a_body_that_comes_in_drops_does_not_hold_its_connection_for_ever(tmp_path: Path, door: str) -> None:
    def drip(where: Any) -> bytes:
        with knock(where) as peer:
            peer.sendall(post("/v1/models", "Content-Length: 900"))
            while not select.select([peer], [], [], 0.005)[0]:
                peer.sendall(b"x")
            return peer.recv(65_536)

    async with doors(tmp_path, body_timeout_s=0.1) as made:
        assert (await asyncio.to_thread(drip, made.door(door))).startswith(b"HTTP/1.1 408")


@both_doors
@pytest.mark.parametrize(
    "sent",
    [post("/v1/models", "Content-Length: 5", b"{"), post("/v1/models", CHUNKED, b"5\r\n{"), b"GET /health HT"],
    ids=["half a body", "half a chunk", "half a line"],
)
async def test_a_client_that_ends_in_the_middle_is_told_so(tmp_path: Path, door: str, sent: bytes) -> None:
    def talk(where: Any) -> bytes:
        with knock(where) as peer:
            peer.sendall(sent)
            peer.shutdown(socket.SHUT_WR)
            return read(peer, 65_536)

    async with doors(tmp_path) as made:
        answer = parsed(await asyncio.to_thread(talk, made.door(door)))
        assert answer.status == 400
        assert answer.error["message"] == "the request ended before all of it had come"
        assert await serves(made, door)


@both_doors
async def test_a_client_that_is_refused_and_does_not_hang_up_is_cut_off(
    tmp_path: Path, door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def talk(where: Any) -> bytes:
        with knock(where) as peer:
            peer.sendall(b"rubbish\r\n\r\n")
            answer = peer.recv(65_536)
            with pytest.raises(ConnectionError):
                send_without_end(peer)
            return answer

    monkeypatch.setattr(connection, "LINGER_S", 0.05)
    async with doors(tmp_path) as made:
        assert (await asyncio.to_thread(talk, made.door(door))).startswith(b"HTTP/1.1 400")


@both_doors
async def test_a_client_that_was_refused_and_stays_does_not_hold_up_the_end(
    tmp_path: Path, door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 600.0)
    monkeypatch.setattr(server, "_GRACE_S", 600.0)
    async with asyncio.timeout(4), doors(tmp_path) as made:  # uvicorn would give it 5 s
        peer = await asyncio.to_thread(knock, made.door(door))
        peer.sendall(post("/v1/models", "Transfer-Encoding: chunked", b"zzz\r\n"))
        assert (await asyncio.to_thread(peer.recv, 12)) == b"HTTP/1.1 400"
    peer.close()


async def test_a_last_answer_that_nobody_reads_does_not_keep_its_connection(tmp_path: Path) -> None:
    async with doors(tmp_path, read_timeout_s=0.1, write_timeout_s=0.05) as made:
        with socket.socket() as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.settimeout(20)
            await asyncio.to_thread(peer.connect, made.tcp)
            peer.sendall(post("/page", "Connection: close", method="GET"))
            await pass_time(made, rounds=2)
            assert len(await asyncio.to_thread(read, peer, 100_000)) < 60_000


async def test_a_client_that_reads_little_by_little_gets_all_of_its_answer(tmp_path: Path) -> None:
    async with doors(tmp_path, read_timeout_s=0.1, write_timeout_s=1.0) as made:
        with await asyncio.to_thread(knock, made.unix) as peer:
            peer.sendall(post("/v1/control/long", "Connection: close", method="GET"))
            received = 0
            for _ in range(14):
                received += len(await asyncio.to_thread(read, peer, 250_000))
                await pass_time(made, rounds=1)
            assert received + len(await asyncio.to_thread(read, peer, 4_000_000)) > 4_000_000


async def pass_time(made: Doors, rounds: int) -> None:
    """Until so many connections that send nothing have been cut off, one after the other."""
    for _ in range(rounds):
        assert await raw(made.unix, b"") == b""


def read(peer: socket.socket, most_bytes: int) -> bytes:
    """So much, or what comes until the other side closes or cuts the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while len(received) < most_bytes and (part := peer.recv(65_536)):
            received += part
    return received


async def test_one_connection_too_many_is_told_to_come_back_and_the_other_door_stays_open(tmp_path: Path) -> None:
    async with doors(tmp_path, most_connections=2) as made:
        first, second = [await asyncio.to_thread(socket.create_connection, made.tcp, 20) for _ in range(2)]
        with first, second:
            for sent in (b"", post("/v1/models", "Content-Length: 10000000", b"x" * 10_000_000)):
                answer = parsed(await raw(made.tcp, sent))
                assert (answer.status, answer.headers["retry-after"]) == (503, "1")
                assert set(answer.error) - {"details"} == OPENAI
            assert (await fetch(made.unix, "GET", "/v1/control/status")).status == 200
        async with asyncio.timeout(20):
            while (await raw(made.tcp, b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")).startswith(b"HTTP/1.1 503"):
                pass
    assert made.events == []


async def test_a_crowd_that_is_turned_away_does_not_keep_the_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 600.0)
    async with doors(tmp_path, most_connections=1) as made:
        crowd = [await asyncio.to_thread(socket.create_connection, made.tcp, 20) for _ in range(30)]
        answers = [await asyncio.to_thread(first_words, peer) for peer in crowd[1:]]
        assert all(answer.startswith(b"HTTP/1.1 503") for answer in answers[:8])
        assert answers[8:] == [b""] * 21
        for peer in crowd:
            peer.close()


def send_without_end(peer: socket.socket) -> None:
    while True:
        peer.sendall(b"x" * 65_536)


def first_words(peer: socket.socket) -> bytes:
    try:
        return peer.recv(65_536)
    except ConnectionResetError:
        return b""
