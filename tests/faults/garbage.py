"""Messages that mean nothing, at both doors."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable, Iterator

from tests.acceptance.harness import CHAT, Daemon
from tests.fakes.wire import connect
from tests.faults.asking import PROMPTS, ask, judge
from tests.faults.campaign import MOST_LOG_BYTES, Campaign, events
from tests.faults.tally import Tally

BATCH = 100
Connect = Callable[[], socket.socket]


def run(campaign: Campaign) -> Iterator[Tally]:
    """10,000 in full; after each hundred of them a question has to be answered rightly."""
    daemon = campaign.daemon
    host, _, port = daemon.ready["api"].rpartition(":")
    doors: tuple[tuple[str, Connect], ...] = (
        ("the socket", lambda: connect(daemon.home / "omlxd.sock")),
        ("TCP", lambda: socket.create_connection((host, int(port)), timeout=20)),
    )
    for door, open_door in doors:
        tally = Tally(f"garbage at {door}")
        daemon.control("POST", "models/small/load")
        for _ in range(campaign.times(5000, 100) // BATCH):
            open_ones = [_send(campaign.random, open_door) for _ in range(BATCH)]
            judge(tally, ask(daemon, "small", PROMPTS[0]), campaign.right("small", PROMPTS[0]))
            for each in open_ones:
                _look_at_the_answer(tally, *each)
            tally.times += BATCH
        _check_log(tally, daemon)
        campaign.check_serves(tally)
        campaign.check_base(tally)
        yield tally


def _send(choices: random.Random, open_door: Connect) -> tuple[socket.socket, bytes]:
    made = open_door()
    message = _message(choices)
    try:
        made.sendall(message)
        if choices.random() < 0.5:
            made.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # it was cut off in the middle of a long one
    return made, message


def _look_at_the_answer(tally: Tally, made: socket.socket, message: bytes) -> None:
    """None, or one that begins as HTTP does, says that it was wrong, and shows no traceback."""
    made.settimeout(0.001)
    try:
        answer = made.recv(65_536)
    except OSError:
        answer = b""  # it waits for more, or has hung up
    finally:
        made.close()
    if answer and not answer.startswith(b"HTTP/1.1 4"):
        tally.wrong.append(f"{message[:60]!r} is answered with {answer[:60]!r}")
    if b"Traceback" in answer:
        tally.wrong.append(f"{message[:60]!r} is answered with a traceback")


def _message(choices: random.Random) -> bytes:
    noise = choices.randbytes(choices.randint(1, 300))
    body = json.dumps({"model": "small", "messages": [{"role": "user", "content": "hi"}]}).encode()
    broken = bytearray(body)
    broken[choices.randrange(len(body) - 1)] = choices.choice(b'"{}[]:,\x00\xff')
    kinds: tuple[bytes, ...] = (
        noise,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise,  # a TLS hello
        b"GET " + noise + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
        b"GET /v1/nowhere/" + noise.hex().encode() + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 400_000 + b"\r\n\r\n",
        _post(bytes(broken[:-1])),
        _post(noise),
        _post(b"[" * 20_000),
        _post(b'{"model": "small", "messages": 7}'),
        _post(body, b"Content-Length: 99999999999\r\n"),
        _post(body, b"Content-Length: -5\r\n"),
        _post(body, b"Transfer-Encoding: chunked\r\n"),
        b"POST " + CHAT.encode() + b" HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n" + noise,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + noise,
        b"\r\n" * 50,
        b"DELETE /v1/control/requests/" + noise.hex().encode() + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    )
    return choices.choice(kinds)


def _post(body: bytes, length: bytes = b"") -> bytes:
    length = length or b"Content-Length: %d\r\n" % len(body)
    return b"POST " + CHAT.encode() + b" HTTP/1.1\r\nHost: localhost\r\n" + length + b"\r\n" + body


def _check_log(tally: Tally, daemon: Daemon) -> None:
    """What anybody can cause by the thousand does not push everything else out of the log."""
    total = sum(path.stat().st_size for path in (daemon.home / "logs").glob("omlxd.jsonl*"))
    if total > MOST_LOG_BYTES:
        tally.wrong.append(f"{total} bytes of logs")
    complaints = events(daemon, "api_error")
    if len(complaints) > 100:
        tally.wrong.append(f"{len(complaints)} lines about it in the log")
