"""A stand-in for the daemon on a real Unix socket: canned answers made from the same views, requests remembered."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import orjson

from omlxd.core.errors import InvalidRequest, OmlxError, UnknownModel
from omlxd.core.states import (
    DaemonState,
    EnforcerView,
    EntryState,
    Level,
    MemoryView,
    ModelView,
    RequestState,
    RequestView,
    StatusView,
)

MIB = 2**20

CHAT = ModelView(
    name="chat",
    state=EntryState.LOADED,
    pinned=True,
    aliases=("default",),
    path="/models/SmolLM2-135M-Instruct",
    weights_bytes=257 * MIB,
    kv_bytes=6 * MIB,
    prefix_cache_bytes=0,
    committed_bytes=263 * MIB,
    running=1,
    waiting=1,
    parked=0,
    tokens_per_s=17.84,
    last_used_s=0.0,
    ttl_left_s=None,
    load_progress=None,
    context_length=8192,
    error=None,
)
SMALL = replace(
    CHAT,
    name="small",
    state=EntryState.UNLOADED,
    pinned=False,
    aliases=(),
    path="/models/small",
    weights_bytes=48 * MIB,
    kv_bytes=0,
    committed_bytes=0,
    running=0,
    waiting=0,
    tokens_per_s=None,
    last_used_s=75.0,
)
LOADING = replace(SMALL, name="big", state=EntryState.LOADING, load_progress=0.42, last_used_s=None, ttl_left_s=590.0)
FAILED = replace(SMALL, name="[red]broken[/red]", state=EntryState.FAILED, error="`model.safetensors` is truncated")
MEMORY = MemoryView(
    used=263 * MIB,
    active=263 * MIB,
    cache=12 * MIB,
    footprint=420 * MIB,
    base=140 * MIB,
    peak=310 * MIB,
    committed=311 * MIB,
    unaccounted=0,
    soft_limit=400 * MIB,
    hard_limit=420 * MIB,
    binding="max_memory",
    hard_binding="ram",
    system_total=32 * 1024 * MIB,
    system_available=20 * 1024 * MIB,
)
DECISION = {
    "seq": 41,
    "ts": 1_764_438_048.25,
    "level": "info",
    "event": "decision",
    "decision": "d3",
    "rung": "unload",
    "action": "unload",
    "victim": "small",
    "reason": "active memory 450 MiB is 50.0 MiB over the soft limit 400 MiB (max_memory); `small` is the least"
    " recently used model that is not pinned (unused for 12.0 s)",
    "before_bytes": 450 * MIB,
    "after_bytes": 402 * MIB,
    "freed_bytes": 48 * MIB,
    "candidates": [
        {"model": "chat", "chosen": False, "why": "pinned"},
        {"model": "small", "chosen": True, "why": "least recently used and not pinned"},
    ],
}
REQUEST = RequestView("r7", "chat", RequestState.DECODE, 40, 40, 12, 1.5)
STATUS = StatusView(
    version="0.1.0",
    pid=4321,
    state=DaemonState.READY,
    uptime_s=125.0,
    backend="cpu",
    manifest="/home/me/.omlxd/omlxd.toml",
    memory=MEMORY,
    enforcer=EnforcerView("reference", 1.0, Level.OK, 3),
    models=(CHAT, SMALL, LOADING, FAILED),
    requests=(REQUEST,),
    recent_decisions=(DECISION,),
    api="127.0.0.1:8321",
)

Answer = tuple[int, str, Iterator[bytes]]
Route = Callable[[dict[str, Any]], Answer]


def status_json() -> dict[str, Any]:
    """That status as the daemon writes it."""
    return dict(json.loads(orjson.dumps(STATUS.to_json())))


def as_json(body: Any, status: int = 200) -> Route:
    """A route that answers this JSON."""
    return lambda _: (status, "application/json", iter([json.dumps(body).encode()]))


def as_error(error: OmlxError) -> Route:
    """A route that answers this error as the daemon does."""
    return as_json({"error": error.to_json()}, error.http_status)


def as_lines(*bodies: Any) -> Route:
    """A route that answers NDJSON."""
    return lambda _: (200, "application/x-ndjson", iter([json.dumps(body).encode() + b"\n" for body in bodies]))


def as_events(*frames: str | dict[str, Any], done: bool = True) -> Route:
    """A route that answers server-sent events: text is a comment, a dict a data frame."""

    def written() -> Iterator[bytes]:
        for frame in frames:
            yield (f": {frame}\n\n" if isinstance(frame, str) else f"data: {json.dumps(frame)}\n\n").encode()
        if done:
            yield b"data: [DONE]\n\n"

    return lambda _: (200, "text/event-stream", written())


def chunk(text: str = "", finish: str | None = None, **more: Any) -> dict[str, Any]:
    """One frame of a streamed chat completion."""
    choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}
    return {"id": "chatcmpl-r7", "object": "chat.completion.chunk", "model": "chat", "choices": [choice], **more}


def model_json(model: ModelView) -> dict[str, Any]:
    """The view as it arrives at the other end of the socket: lists, not tuples."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(model)))
    return found


class FakeDaemon:
    """Serves `routes` ("GET /path") at a socket until it is closed; `seen` holds (method, path, body)."""

    def __init__(self, socket_path: Path) -> None:
        self.seen: list[tuple[str, str, Any]] = []
        self.routes: dict[str, Route] = {
            "GET /v1/control/status": as_json(status_json()),
            "GET /v1/control/models": as_json({"schema": 1, "models": [model_json(m) for m in STATUS.models]}),
            "GET /v1/control/requests": as_json({"schema": 1, "requests": [asdict(REQUEST)]}),
            "DELETE /v1/control/requests/r7": as_json({"schema": 1, "id": "r7", "aborted": True}),
        }
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                path = unquote(urlsplit(self.path).path)
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                fake.seen.append((self.command, self.path, body))
                route = fake.routes.get(f"{self.command} {path}") or fake.unknown(path)
                status, kind, pieces = route(body or {})
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Connection", "close")
                self.end_headers()
                for piece in pieces:
                    self.wfile.write(piece)
                    self.wfile.flush()
                self.close_connection = True

            do_GET = do_POST = do_PATCH = do_DELETE = answer

            def address_string(self) -> str:
                return "local"

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that goes away is what some tests are about

        self._server = Server(str(socket_path), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @staticmethod
    def unknown(path: str) -> Route:
        parts = path.split("/")
        if parts[:4] == ["", "v1", "control", "models"]:
            return as_error(
                UnknownModel(f"there is no model `{parts[4]}` in the manifest", hint="did you mean `chat`?")
            )
        return as_error(InvalidRequest(f"no such path: `{path}`"))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
