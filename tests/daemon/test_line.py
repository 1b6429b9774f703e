"""The straight way of a token to its client: the same bytes in the same order, and nothing lost where it is blocked."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.daemon import anthropic_api, connection, openai_api
from omlxd.daemon.listening import hear_pieces
from omlxd.daemon.patience import Patience
from omlxd.daemon.replies import Reply
from omlxd.daemon.request import Chunk, Generation
from tests.daemon.doors import raw
from tests.fakes.clock import run
from tests.fakes.daemon import RunningDaemon, running
from tests.fakes.engine import FakeEngine
from tests.fakes.wire import connect

CHAT = {"messages": [{"role": "user", "content": "Hello there"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hello there"},
    "/v1/messages": CHAT,
}
every_api = pytest.mark.parametrize("path", BODIES)


def post(path: str, version: str = "1.1", **more: Any) -> bytes:
    body = json.dumps({"model": "chat", "stream": True, "max_tokens": 300, **BODIES[path], **more}).encode()
    lines = [f"POST {path} HTTP/{version}", "Host: localhost", "Connection: close", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def told(answer: bytes) -> str:
    """The text in a stream of any of the APIs, wherever it is cut into chunks."""
    return "".join(re.findall(r'"(?:content|text)":"((?:tok\d+ )+)"', answer.decode()))


def expected(tokens: int) -> str:
    return "".join(f"tok{number} " for number in range(tokens))


@pytest.fixture
def straight_pieces(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Each piece that goes the straight way."""
    pieces, write = list[bytes](), connection._BodyLine.write

    def counting(self: Any, piece: bytes) -> None:
        pieces.append(piece)
        write(self, piece)

    monkeypatch.setattr(connection._BodyLine, "write", counting)
    return pieces


def daemon_of(tmp_path: Path, tokens: int = 300, step_s: float = 0.001) -> Any:
    """Each token comes by itself, as from a model."""
    return running(tmp_path, {"chat": {}}, engine=FakeEngine("thread", answer_tokens=tokens, step_s=step_s))


def undated(answer: bytes) -> bytes:
    """Without what differs from one answer to the next: when it was made, its number and how long it took."""
    answer = re.sub(rb'"created":\d+|(chatcmpl-|cmpl-|msg_)r\d+|_s":[\d.]+|date: [^\r]*', b"", answer)
    return re.sub(rb"\r\n[0-9a-f]+\r\n", b"\r\n#\r\n", answer)  # sizes of chunks, with those figures in them


@every_api
async def test_the_bytes_are_those_that_the_server_would_have_written(
    tmp_path: Path, path: str, straight_pieces: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with daemon_of(tmp_path) as daemon:
        await daemon.control("POST", "models/chat/load")
        straight = await raw(daemon.home.socket, post(path))
        assert straight_pieces, "none went the straight way"
        went = len(straight_pieces)
        for module in (openai_api, anthropic_api):
            monkeypatch.setattr(module, "straight", lambda scope, compose: None)
        assert undated(await raw(daemon.home.socket, post(path))) == undated(straight)
        assert len(straight_pieces) == went
    assert told(straight) == expected(300)


@every_api
async def test_a_client_of_http_1_0_gets_no_chunks(tmp_path: Path, path: str, straight_pieces: list[bytes]) -> None:
    async with daemon_of(tmp_path) as daemon:
        head, _, body = (await raw(daemon.home.socket, post(path, "1.0"))).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert body.startswith((b"data: ", b"event: ", b": "))
    assert told(body) == expected(300)
    assert not straight_pieces


@every_api
async def test_a_slow_reader_loses_nothing_and_what_it_has_not_read_is_not_piled_up(
    tmp_path: Path, path: str, straight_pieces: list[bytes]
) -> None:
    tokens = 3000  # far more than sockets and asyncio hold together
    async with daemon_of(tmp_path, tokens, step_s=0.0003) as daemon:
        peer = await asyncio.to_thread(connect, daemon.home.socket)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.sendall(post(path, max_tokens=tokens))
        async with asyncio.timeout(20):
            while await generated(daemon) < tokens:
                pass
        held_bytes = sum(map(len, straight_pieces))
        assert held_bytes, "none went the straight way"
        answer = await asyncio.to_thread(read_all, peer)
    assert told(answer) == expected(tokens)
    assert len(answer) > 3 * held_bytes, "it wrote on to a client that read nothing"


async def generated(daemon: RunningDaemon) -> int:
    """The tokens of the one request; all of them once it has ended."""
    seen = (await daemon.control("GET", "requests"))["requests"]
    if seen:
        return int(seen[0]["generated_tokens"])
    return 10**9 if any(record["event"] == "request_finished" for record in daemon.log()) else 0


def read_all(peer: socket.socket) -> bytes:
    with peer:
        return b"".join(iter(lambda: peer.recv(65536), b""))


class _NobodyAborts:
    def abort(self, request_id: str, reason: str) -> bool:
        return False


TURNS = st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 4)), max_size=30)
"""Of each step: how many chunks come, whether the line is clear, and for how many turns of the loop nothing happens."""


@given(TURNS)
def test_every_chunk_is_told_once_and_in_order_whenever_the_line_is_clear(turns: list[tuple[int, bool, int]]) -> None:
    async def main() -> None:
        generation = Generation("r1", "chat", _NobodyAborts(), time.monotonic)
        clear, said, numbers = False, list[str](), itertools.count()

        def at_once(chunk: Chunk) -> bool:
            if clear:
                said.append(chunk.text)
            return clear

        async def hear() -> None:
            engine: Any = None  # nobody asks a plain reply's engine for anything
            async for news in hear_pieces(engine, [Reply(generation, is_chat=False)], at_once):
                if news is not None and isinstance(news[1], Chunk):
                    said.append(news[1].text)

        hearing = asyncio.create_task(hear())
        pushed = list[str]()
        for chunks, is_clear, idle in turns:
            clear = is_clear
            for _ in range(chunks):
                pushed.append(f"{next(numbers)} ")
                generation.push(pushed[-1], 1)
            for _ in range(idle):
                await asyncio.sleep(0)
        generation.fail(RuntimeError("the end"))  # type: ignore[arg-type]
        await asyncio.gather(hearing, return_exceptions=True)
        assert said == pushed

    run(main())


@pytest.mark.parametrize("every_s", [0.1, 0.9])
def test_a_wait_that_goes_on_does_not_end_and_ends_within_two_timeouts_after_the_last(every_s: float) -> None:
    async def main() -> None:
        loop, gave_up = asyncio.get_running_loop(), asyncio.Event()
        patience = Patience(gave_up.set)
        patience.begin(1.0)
        for _ in range(50):
            await asyncio.sleep(every_s)
            patience.go_on()
        assert not gave_up.is_set()
        last_s = loop.time()
        await gave_up.wait()
        assert 1.0 <= loop.time() - last_s <= 2.0

    run(main())
