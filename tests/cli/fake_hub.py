"""As much of the Hugging Face hub as its client needs for a download, on a port of this machine; with its faults."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

COMMIT: Final = "a" * 40


class FakeHub:
    """Serves one repository from a folder until it is closed.

    Attributes:
        refuse: the status, and the hub's name of the error, that every request is answered with.
        break_after: bytes of a file's answer after which the connection breaks; None for whole answers.
        breaks: how often it breaks still.
        ranges: the `Range` of each download of weights, in order.
        downloads: the files that were asked for, without those asked for by HEAD.
    """

    def __init__(self, repo: str, folder: Path) -> None:
        self.refuse: tuple[int, str] | None = None
        self.break_after: int | None = None
        self.breaks = 1_000
        self.ranges: list[str | None] = []
        self.downloads: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def answer(self, *, body: bool) -> None:
                path = unquote(urlsplit(self.path).path)
                if hub.refuse is not None:
                    self.send(hub.refuse[0], b"{}", {"X-Error-Code": hub.refuse[1], "X-Error-Message": "no"}, body)
                elif path.startswith(f"/api/models/{repo}/tree/"):
                    self.send(200, json.dumps([_entry(each) for each in sorted(folder.iterdir())]).encode(), {}, body)
                elif path.startswith(f"/api/models/{repo}"):
                    self.send(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": []}).encode(), {}, body)
                elif match := re.fullmatch(rf"/{re.escape(repo)}/resolve/(?:main|{COMMIT})/(.+)", path):
                    self.file(folder / match[1], body)
                else:
                    self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)

            def file(self, path: Path, body: bool) -> None:
                if not path.is_file():
                    self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, body)
                    return
                content = path.read_bytes()
                headers = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
                headers["X-Linked-Size"] = str(len(content))
                wanted = self.headers.get("Range")
                if body:
                    hub.downloads.append(path.name)
                    if path.suffix == ".safetensors":
                        hub.ranges.append(wanted)
                if wanted and (match := re.fullmatch(r"bytes=(\d+)-(\d*)", wanted)):
                    start = int(match[1])
                    headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
                    self.send(206, content[start:], headers, body)
                else:
                    self.send(200, content, headers, body)

            def send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if not body:
                    return
                if hub.break_after is not None and len(content) > hub.break_after and hub.breaks > 0:
                    hub.breaks -= 1
                    self.wfile.write(content[: hub.break_after])
                    self.wfile.flush()
                    self.close_connection = True
                    self.connection.shutdown(2)
                else:
                    self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that goes away

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """For `HF_ENDPOINT`."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _entry(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    entry: dict[str, Any] = {"type": "file", "path": path.name, "size": len(content), "oid": _digest(content)}
    if path.suffix == ".safetensors":
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
