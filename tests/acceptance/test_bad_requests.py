"""Whatever comes in at either door: a clear 4xx in the shape of its API, nothing left behind, no prompt in the log."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.acceptance.harness import CHAT, MIB, TIMEOUT_S, Daemon, chat_body, has_text
from tests.fakes.scripted_model import make_scripted
from tests.fakes.wire import connect

pytestmark = pytest.mark.mlx

MARKER = "xyzzy-plover-4711"
"""In whatever a prompt may hold; it must come back in no error and stand in no file of the home."""
COMPLETIONS, MESSAGES, COUNT = "/v1/completions", "/v1/messages", "/v1/messages/count_tokens"
REFUSING = "{{ raise_exception('I do not take: ' + messages[0].content) }}"
both_doors = pytest.mark.parametrize("door", ["socket", "TCP"])


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Iterator[Daemon]:
    """One daemon that logs all it can; whatever was sent, it is as it was at the end, and the prompts are nowhere."""
    folder = tmp_path_factory.mktemp("bad-requests")
    chat = tiny_model("llama", 1_000_000, context=2048)
    broken, refusing = (Path(shutil.copytree(chat, folder / name)) for name in ("broken", "refusing"))
    (broken / "model.safetensors").write_bytes(b"\0" * 100)
    config = json.loads((refusing / "tokenizer_config.json").read_text())
    (refusing / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": REFUSING}))
    scripted = make_scripted(folder / "tools")
    models = {"chat": chat, "broken": broken, "refusing": refusing, "tools": scripted}
    with Daemon(models, daemon={"log_level": "debug", "prefix_cache": 0}) as made:
        assert made.chat("chat", "Hello.", max_tokens=4).status == 200
        files, committed = psutil.Process(made.pid).num_fds(), made.memory["committed"]
        yield made
        made.until_idle()
        for name in ("refusing", "tools"):
            made.control("POST", f"models/{name}/unload")
        assert made.requests == []
        assert made.memory["committed"] == committed
        assert all(model["kv_bytes"] == 0 for model in made.control("GET", "models")["models"])
        _until(lambda: psutil.Process(made.pid).num_fds() <= files)
        assert [line for line in made.log("api_error") if "traceback" in line] == []
        assert made.chat("chat", "Hello.", max_tokens=4).status == 200
        told = [path.name for path in made.home.rglob("*") if path.is_file() and MARKER.encode() in path.read_bytes()]
        assert told == []


def _until(true: Callable[[], bool]) -> None:
    """Ask until it is so; connections that we closed are closed at the other end a moment later."""
    for _ in range(20_000):
        if true():
            return
    raise AssertionError("it never came true")


@contextlib.contextmanager
def knock(daemon: Daemon, door: str) -> Iterator[socket.socket]:
    """A connection to one of the doors."""
    if door == "socket":
        peer = connect(daemon.home / "omlxd.sock")
    else:
        host, _, port = daemon.ready["api"].rpartition(":")
        peer = socket.create_connection((host, int(port)))
    with peer:
        peer.settimeout(TIMEOUT_S)
        yield peer


def all_of(peer: socket.socket) -> bytes:
    """What comes until the other side closes."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := peer.recv(65_536):
            received += part
    return received


def talk(daemon: Daemon, door: str, sent: bytes) -> bytes:
    """The answer to these bytes; the daemon may close before it has read them all."""
    with knock(daemon, door) as peer:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            peer.sendall(sent)
        return all_of(peer)


def post(path: str, body: bytes, *headers: str, close: bool = True) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, *(["Connection: close"] if close else []), "", ""]).encode() + body


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def error_of(answer: bytes) -> Any:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


def chat(**fields: Any) -> bytes:
    return json.dumps({**chat_body("chat", MARKER), **fields}).encode()


def says(content: Any, **fields: Any) -> bytes:
    return chat(messages=[{"role": "user", "content": content}], **fields)


def message(**fields: Any) -> bytes:
    asked = {"model": "chat", "max_tokens": 4, "messages": [{"role": "user", "content": MARKER}]}
    return json.dumps({**asked, **fields}).encode()


GOOD = chat(max_tokens=2)
BODIES: dict[str, tuple[str, bytes, int, str]] = {
    "cut off": (CHAT, GOOD[:-1], 400, "not JSON"),
    "another encoding": (CHAT, GOOD.decode().encode("utf-16"), 400, "not JSON"),
    "bytes that are no UTF-8": (CHAT, GOOD.replace(MARKER.encode(), MARKER.encode() + b"\xff\xc3"), 400, "not JSON"),
    "half a surrogate": (CHAT, GOOD.replace(MARKER.encode(), MARKER.encode() + b"\\ud800"), 400, "not JSON"),
    "nothing": (CHAT, b"", 400, "`model`: is missing"),
    "a text": (CHAT, json.dumps(MARKER).encode(), 400, "must be a JSON object"),
    "a hundred thousand brackets": (CHAT, b"[" * 100_000, 400, "not JSON"),
    "a deep object": (CHAT, says("x").replace(b'"x"', b'{"x":' * 50_000), 400, "not JSON"),
    "not a number": (CHAT, chat(temperature=float("nan")), 400, "`temperature`"),
    "infinity": (CHAT, GOOD.replace(b'"max_tokens": 2', b'"max_tokens": 1e999'), 400, "`max_tokens`"),
    "a number of many digits": (CHAT, chat(max_tokens=10**3000), 400, "`max_tokens`"),
    "a seed of many digits": (CHAT, chat(seed=-(10**40)), 400, "`seed`"),
    "a billion answers": (CHAT, chat(n=10**9), 400, "`n`"),
    "a number as a text": (CHAT, chat(max_tokens="4"), 400, "`max_tokens`"),
    "truth as a number": (CHAT, chat(max_tokens=True), 400, "`max_tokens`"),
    "messages as a text": (CHAT, chat(messages=MARKER), 400, "`messages`"),
    "no messages": (CHAT, chat(messages=[]), 400, "`messages`"),
    "messages of texts": (CHAT, chat(messages=[MARKER] * 1000), 400, "`messages[0].role`"),
    "content as an object": (CHAT, says({"text": MARKER}), 400, "`messages[0].content`"),
    "an image": (CHAT, says([{"type": "image_url", "image_url": {"url": MARKER}}]), 400, "`messages[0].content[0]"),
    "a role of its own": (CHAT, chat(messages=[{"role": MARKER, "content": MARKER}]), 400, "`messages[0].role`"),
    "ten thousand stop words": (CHAT, chat(stop=[f"{MARKER}{each}" for each in range(10_000)]), 400, "`stop`"),
    "an empty stop word": (CHAT, chat(stop=[""]), 400, "`stop`"),
    "a hundred thousand biases": (
        CHAT,
        chat(logit_bias={str(each): 1 for each in range(100_000)}),
        400,
        "`logit_bias`",
    ),
    "a bias beyond the vocabulary": (CHAT, chat(logit_bias={"99999": 1}), 400, "99999"),
    "tools without a template": (
        CHAT,
        chat(tools=[{"type": "function", "function": {"name": "f", "description": MARKER}}]),
        400,
        "`tools`",
    ),
    "a template that refuses and quotes": (CHAT, chat(model="refusing"), 400, "chat template refuses"),
    "a prompt beyond the context": (CHAT, says(MARKER * 1000), 400, "context of 2048"),
    "the same, streamed": (CHAT, says(MARKER * 1000, stream=True), 400, "context of 2048"),
    "a prompt of half a million characters": (CHAT, says(MARKER * 30_000), 400, "510000 characters"),
    "an unknown model": (CHAT, chat(model="chatt"), 404, "did you mean `chat`?"),
    "a path as a model": (CHAT, chat(model="../../etc/passwd"), 404, "passwd"),
    "a damaged model": (CHAT, chat(model="broken"), 500, "model.safetensors"),
    "a prompt of token ids beyond the vocabulary": (
        COMPLETIONS,
        b'{"model": "chat", "prompt": [1000000000]}',
        400,
        "1000000000",
    ),
    "no prompt": (COMPLETIONS, json.dumps({"model": "chat", "prompt": ""}).encode(), 400, "`prompt`"),
    "a thousand prompts": (
        COMPLETIONS,
        json.dumps({"model": "chat", "prompt": [MARKER] * 1000}).encode(),
        400,
        "prompt",
    ),
    "Anthropic: cut off": (MESSAGES, message()[:-1], 400, "not JSON"),
    "Anthropic: no messages": (MESSAGES, message(messages=[]), 400, "`messages`"),
    "Anthropic: an unknown model": (MESSAGES, message(model="chatt"), 404, "did you mean `chat`?"),
    "Anthropic: beyond the context": (MESSAGES, message(system=MARKER * 1000), 400, "context of 2048"),
    "Anthropic: ten thousand stop words": (
        MESSAGES,
        message(stop_sequences=[MARKER] * 10_000),
        400,
        "`stop_sequences`",
    ),
    "Anthropic: counted with a wrong field": (COUNT, message(), 400, "`max_tokens`"),
}

TOLD_OVER_TCP = {"a damaged model": "`broken` cannot be loaded"}


@both_doors
@pytest.mark.parametrize("case", BODIES)
def test_a_bad_body_is_told_what_is_wrong_with_it(daemon: Daemon, door: str, case: str) -> None:
    path, body, status, words = BODIES[case]
    words = TOLD_OVER_TCP.get(case, words) if door == "TCP" else words
    before = daemon.states["chat"]
    answer = talk(daemon, door, post(path, body))
    error = error_of(answer)
    assert status_of(answer) == status, answer
    assert words in f"{error['message']} {error['hint']}", error
    assert set(error) >= {"message", "type", "code", "hint"}
    assert MARKER.encode() not in answer
    assert daemon.states["chat"] == before == "loaded"


FAULTS = {
    "no host": "the request has no `Host`",
    "a length that is none": "`Content-Length` is not a size",
    "two lengths": "`Content-Length` says more than one size",
    "a chunk that is none": "a chunk of the body does not begin with its size",
}
HEADS: dict[str, tuple[bytes, set[int]]] = {
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\r\n\r\n", {400}),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400}),
    "HTTP/0.9": (b"GET /health\r\n\r\n", {400}),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", {400}),
    "a path that is no UTF-8": (b"GET /v1/models/\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n", {400}),
    "a model that is no UTF-8": (
        b"GET /v1/models/%ff%fe HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        {404},
    ),
    "a model with a path": (
        b"GET /v1/models/..%2f..%2fetc%2fpasswd HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        {404},
    ),
    "a length that is none": (post(CHAT, GOOD).replace(b"Content-Length: ", b"Content-Length: -"), {400}),
    "two lengths": (post(CHAT, GOOD, "Content-Length: 3"), {400}),
    "a chunk that is none": (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + b"zz\r\n",
        {400},
    ),
    "a header of 40 kB": (post(CHAT, GOOD, "X-Long: " + "x" * 40_000), {431}),
    "ten thousand headers": (post(CHAT, GOOD, *[f"X-{each}: y" for each in range(10_000)]), {431}),
    "a body of nine million bytes": (post(CHAT, GOOD + b" " * 9_000_000), {413}),
    "a web socket": (
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        {400},
    ),
}


@both_doors
@pytest.mark.parametrize("case", HEADS)
def test_what_is_not_a_request_gets_a_4xx(daemon: Daemon, door: str, case: str) -> None:
    sent, statuses = HEADS[case]
    answer = talk(daemon, door, sent)
    assert status_of(answer) in statuses, answer
    assert b'"error"' in answer
    assert FAULTS.get(case, "").encode() in answer


@both_doors
def test_pipelined_requests_are_answered_in_order_good_and_bad(daemon: Daemon, door: str) -> None:
    first, last = chat(max_tokens=3), chat(max_tokens=5)
    sent = post(CHAT, first, close=False) + post(CHAT, b"{", close=False) + post(CHAT, last)
    answers = talk(daemon, door, sent).split(b"HTTP/1.1 ")[1:]
    assert [int(answer[:3]) for answer in answers] == [200, 400, 200]
    assert b'"completion_tokens":3' in answers[0]
    assert b'"completion_tokens":5' in answers[2]


@both_doors
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_half_early_leaves_no_request_behind(daemon: Daemon, door: str, stream: bool) -> None:
    with knock(daemon, door) as peer:
        peer.sendall(post(CHAT, chat(max_tokens=2000, stream=stream)))
        peer.shutdown(socket.SHUT_WR)
        all_of(peer)
    daemon.until_idle()
    assert daemon.requests == []


@both_doors
def test_a_client_that_closes_its_half_in_its_body_is_let_go(daemon: Daemon, door: str) -> None:
    with knock(daemon, door) as peer:
        peer.sendall(post(CHAT, GOOD)[:-5])
        peer.shutdown(socket.SHUT_WR)
        assert not all_of(peer).startswith(b"HTTP/1.1 2")


@both_doors
def test_slow_clients_hold_nobody_up(daemon: Daemon, door: str) -> None:
    """A header byte by byte, half a body, and an answer that nobody reads, four of each, beside a quick one."""
    with contextlib.ExitStack() as stack:
        for sent in (
            b"GET /health HTTP/1.1\r\nHo",
            post(CHAT, GOOD)[:-5],
            post(CHAT, chat(max_tokens=500, stream=True)),
        ):
            for _ in range(4):
                stack.enter_context(knock(daemon, door)).sendall(sent)
        answer = talk(daemon, door, post(CHAT, GOOD))
        assert (status_of(answer), b'"completion_tokens":2' in answer) == (200, True)
        assert status_of(talk(daemon, door, b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")) == 200
    daemon.until_idle()


def test_no_prompt_and_no_answer_is_in_the_log_however_a_request_ends(daemon: Daemon) -> None:
    """The fixture looks for the marker in all files; what the scripted model says is looked for here."""
    tool = {"type": "function", "function": {"name": "weather", "description": MARKER}}
    answer = daemon.chat("tools", MARKER, tools=[tool], stop=[MARKER], user=MARKER, metadata={"note": MARKER})
    assert answer.json["choices"][0]["finish_reason"] == "tool_calls"
    for path in (MESSAGES, COUNT):
        fields = {} if path == COUNT else {"max_tokens": 2, "stop_sequences": [MARKER]}
        asked = {"model": "chat", "messages": [{"role": "user", "content": MARKER}], "system": MARKER, **fields}
        assert daemon.ask("POST", path, asked).status == 200
    assert daemon.ask("POST", COMPLETIONS, {"model": "chat", "prompt": MARKER, "max_tokens": 2}).status == 200
    with daemon.chat_stream("chat", MARKER, max_tokens=2000) as gone:
        gone.until(has_text)
    daemon.until_idle()
    with daemon.chat_stream("chat", MARKER, max_tokens=2000) as aborted:
        aborted.until(has_text)
        daemon.control("DELETE", f"requests/{daemon.requests[-1]['id']}")
        assert [each for each in aborted if "error" in each]
    for name in ("tools", "refusing"):
        daemon.control("POST", f"models/{name}/unload")
    limit = daemon.memory["soft_limit"]
    daemon.control("PATCH", "limits", {"max_memory": daemon.memory["committed"] + MIB // 2})
    try:
        refused = daemon.chat("chat", MARKER * 100, max_tokens=100)
        assert refused.json["error"]["code"] == "prefill_memory_exceeded"
        assert MARKER.encode() not in refused.body
    finally:
        daemon.control("PATCH", "limits", {"max_memory": limit})
    written = "".join(path.read_text(errors="replace") for path in (daemon.home / "logs").iterdir())
    assert "request_refused" in written
    assert "Let me look" not in written
    assert "Bern" not in written
