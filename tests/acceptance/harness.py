"""A real daemon process with real models, driven over its real socket and by the real command line."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from omlxd.cli.holder import is_held
from tests.fakes.wire import Answer, UnixConnection

T = TypeVar("T")
MIB = 1024 * 1024
TIMEOUT_S = 60.0
CHAT = "/v1/chat/completions"
OMLXD = (sys.executable, "-m", "omlxd")

Models = Mapping[str, Path | Mapping[str, Any]]


class Connection(UnixConnection):
    """One connection to the control socket, for whoever needs more than a whole answer."""

    def __init__(self, socket_path: Path) -> None:
        super().__init__(socket_path)
        self.timeout = TIMEOUT_S

    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(self.timeout)

    def send_json(self, method: str, path: str, body: Any = None, **headers: str) -> None:
        """Send a request and do not wait for its answer."""
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        self.request(method, path, content, headers)


class Lines:
    """An answer that comes line by line: NDJSON, or server-sent events; closing it is the client going away."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._response: http.client.HTTPResponse | None = None

    @property
    def response(self) -> http.client.HTTPResponse:
        """Its head has been read."""
        if self._response is None:
            self._response = self._connection.getresponse()
        return self._response

    def __iter__(self) -> Iterator[Any]:
        """Each NDJSON line, or each `data:` frame (comments are left out, `[DONE]` stays a string)."""
        for raw in iter(self.response.readline, b""):
            line = raw.decode().strip()
            if line.startswith("{"):
                yield json.loads(line)
            elif line.startswith("data:"):
                text = line.removeprefix("data:").strip()
                yield text if text == "[DONE]" else json.loads(text)

    def until(self, wanted: Callable[[Any], bool]) -> Any:
        """The next line that is wanted; the test fails when the answer ends before."""
        for line in self:
            if wanted(line):
                return line
        raise AssertionError("the stream ended before what was waited for")

    def close(self) -> None:
        """Hang up."""
        if self._response is not None:
            self._response.close()
        self._connection.close()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Daemon:
    """One home with its manifest, and the daemon that runs there.

    Args:
        models: folders by name, or the keys of the model's table.
        daemon, api: keys of these tables, beside the defaults.
        text: the whole manifest instead.
        module: what runs as the daemon's process.

    Nothing here waits for a poll of the enforcer, or depends on what other programs leave: `poll_interval` is an hour
    and `min_available` 0 unless a test says otherwise.
    """

    def __init__(
        self,
        models: Models | None = None,
        *,
        daemon: Mapping[str, Any] | None = None,
        api: Mapping[str, Any] | None = None,
        text: str | None = None,
        home: Path | None = None,
        module: str = "omlxd.daemon",
    ) -> None:
        self.home = home or Path(tempfile.mkdtemp(prefix="omlxd-", dir="/tmp"))  # a socket path has 103 bytes at most
        self.process: subprocess.Popen[bytes] | None = None
        self.ready: dict[str, Any] = {}
        self._module = module
        self._detached_pid: int | None = None
        if text is None:
            text = manifest(models or {}, daemon=daemon, api=api)
        (self.home / "omlxd.toml").write_text(text)

    # The process

    def spawn(self, *options: str, env: Mapping[str, str] | None = None) -> Daemon:
        """Run the daemon as a child of the test, ready or refused (`ready` tells), so that its exit status is seen.

        What it writes to stdout and stderr is in `test.err` of the home; `env` comes on top of ours.
        """
        reader, writer = os.pipe()
        command = [sys.executable, "-m", self._module, "--home", str(self.home), "--ready-fd", str(writer), *options]
        with (self.home / "test.err").open("ab") as err:
            self.process = subprocess.Popen(
                command,
                pass_fds=[writer],
                stdin=subprocess.DEVNULL,
                stdout=err,
                stderr=err,
                start_new_session=True,
                env={**os.environ, **(env or {})},
            )
        os.close(writer)
        try:
            self.ready = json.loads(_all_of(reader) or b"{}")
        finally:
            os.close(reader)
        return self

    def start(self, *options: str) -> subprocess.CompletedProcess[str]:
        """`omlxd start`: the daemon runs detached."""
        return self._detached("start", *options)

    def restart(self, *options: str) -> subprocess.CompletedProcess[str]:
        """`omlxd restart`."""
        return self._detached("restart", *options)

    def _detached(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        done = self.cli(*arguments)
        with contextlib.suppress(OSError, ValueError):
            self._detached_pid = int((self.home / "omlxd.lock").read_text())
        return done

    @property
    def pid(self) -> int:
        """The daemon's process."""
        pid = self.process.pid if self.process is not None else self._detached_pid
        assert pid is not None, "no daemon was started"
        return pid

    def kill(self) -> None:
        """kill -9."""
        os.kill(self.pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait(TIMEOUT_S)

    def terminate(self) -> int:
        """SIGTERM; the exit status, negative for a signal."""
        assert self.process is not None
        self.process.terminate()
        return self.wait()

    def wait(self) -> int:
        """The exit status, negative for a signal."""
        assert self.process is not None
        return self.process.wait(TIMEOUT_S)

    def __enter__(self) -> Daemon:
        """Run it as a child of the test; at the end it has to end with 0, unless something failed before."""
        try:
            return self.spawn()
        except BaseException:
            self.close(test_failed=True)
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(test_failed=kind is not None)

    def close(self, *, test_failed: bool = False) -> None:
        """End it whatever happened; a daemon that does not end with 0 after a good test is a failure of its own."""
        try:
            if not test_failed and self.process is not None and self.process.poll() is None:
                status = self.terminate()
                assert status == 0, f"the daemon ended with {status}\n{self.report()}"
        finally:
            self._end()
            shutil.rmtree(self.home, ignore_errors=True)

    def _end(self) -> None:
        if self.process is not None:
            if self.process.poll() is None:
                self.kill()
        elif self._detached_pid is not None and is_held(self.home / "omlxd.lock"):
            os.kill(self._detached_pid, signal.SIGKILL)

    def report(self) -> str:
        """The ends of what the daemon wrote, for a test that failed."""
        found = []
        for name, most in (("test.err", 40), ("logs/daemon.err", 40), ("logs/omlxd.jsonl", 60)):
            if (path := self.home / name).exists():
                found += [f"--- {name}", *path.read_text(errors="replace").splitlines()[-most:]]
        return "\n".join(found) + "\n"

    # The command line

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`omlxd ...` to its end."""
        environment = {**os.environ, "OMLXD_HOME": str(self.home), "NO_COLOR": "1", "COLUMNS": "200"}
        return subprocess.run(
            [*OMLXD, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def cli_json(self, *arguments: str) -> Any:
        """The JSON on the stdout of a command that must succeed."""
        done = self.cli(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    # The socket

    def connection(self) -> Connection:
        """A connection of its own."""
        return Connection(self.home / "omlxd.sock")

    def ask(self, method: str, path: str, body: Any = None) -> Answer:
        """One request and its whole answer."""
        with contextlib.closing(self.connection()) as connection:
            connection.send_json(method, path, body)
            response = connection.getresponse()
            headers = {key.lower(): value for key, value in response.getheaders()}
            return Answer(response.status, headers, response.read())

    def control(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of a control call that must succeed."""
        answer = self.ask(method, f"/v1/control/{path}", body)
        assert answer.status == 200, answer.body
        return answer.json

    def stream(self, method: str, path: str, body: Any = None, **headers: str) -> Lines:
        """A request whose answer is read line by line; it has been sent when this returns."""
        connection = self.connection()
        connection.send_json(method, path, body, **headers)
        return Lines(connection)

    def chat(self, model: str, content: str, **fields: Any) -> Answer:
        """One whole chat completion, greedy."""
        return self.ask("POST", CHAT, chat_body(model, content, **fields))

    def chat_stream(self, model: str, content: str, **fields: Any) -> Lines:
        """A chat completion that streams, greedy."""
        return self.stream("POST", CHAT, chat_body(model, content, stream=True, **fields))

    def load_stream(self, model: str) -> Lines:
        """A load that tells its progress."""
        return self.stream("POST", f"/v1/control/models/{model}/load", {}, Accept="application/x-ndjson")

    def events(self, since: int = 0) -> Lines:
        """The events after this number, then each new one."""
        return self.stream("GET", f"/v1/control/events?since={since}&follow=true")

    def until_event(self, name: str, **fields: Any) -> Any:
        """The first event of this name with these fields, from the beginning on; waits for it."""
        with self.events() as events:
            return events.until(lambda event: event["event"] == name and fields.items() <= event.items())

    # What it says

    @property
    def status(self) -> Any:
        return self.control("GET", "status")

    @property
    def memory(self) -> Any:
        return self.status["memory"]

    @property
    def states(self) -> dict[str, str]:
        """Each model's state."""
        return {model["name"]: model["state"] for model in self.control("GET", "models")["models"]}

    @property
    def requests(self) -> list[Any]:
        """The requests in flight."""
        return list(self.control("GET", "requests")["requests"])

    def log(self, *names: str, since: int = 0) -> list[dict[str, Any]]:
        """What the log file holds, of these event names, after this number."""
        lines = [json.loads(line) for line in (self.home / "logs" / "omlxd.jsonl").read_text().splitlines()]
        return [line for line in lines if line.get("seq", since + 1) > since and (not names or line["event"] in names)]

    @property
    def last_seq(self) -> int:
        """The number of the last event: what comes after it is of what is done from now on."""
        return int(self.log()[-1]["seq"])

    def until_idle(self) -> None:
        """Ask until the engine has no request any more, and so no memory of one; each ends with its next step."""
        for _ in range(20_000):
            models = self.control("GET", "models")["models"]
            if not any(model["running"] or model["waiting"] for model in models):
                return
        raise AssertionError(f"requests that do not go away: {self.requests}")


def manifest(models: Models, *, daemon: Mapping[str, Any] | None = None, api: Mapping[str, Any] | None = None) -> str:
    """A manifest in TOML."""
    tables: dict[str, Mapping[str, Any]] = {
        "daemon": {"max_memory": "8G", "min_available": 0, "poll_interval": "1h", **(daemon or {})},
        "api": {"listen": "127.0.0.1:0", **(api or {})},
    }
    for name, source in models.items():
        keys = {"path": source} if isinstance(source, Path) else source
        tables[f"models.{name}"] = {
            key: str(value) if isinstance(value, Path) else value for key, value in keys.items()
        }
    return "".join(
        f"[{table}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()) + "\n"
        for table, keys in tables.items()
    )


def chat_body(model: str, content: str, **fields: Any) -> dict[str, Any]:
    """A greedy chat request."""
    return {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0, **fields}


def text_of(frames: list[Any]) -> str:
    """The text of a stream's frames."""
    choices = [frame["choices"][0] for frame in frames if "choices" in frame]  # in a string: no choices in `[DONE]`
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def errors_in(frames: list[Any]) -> list[Any]:
    """The errors of a stream's frames."""
    return [frame["error"] for frame in frames if frame != "[DONE]" and "error" in frame]


def has_text(frame: Any) -> bool:
    """Whether a frame of a stream carries new text."""
    return bool(text_of([frame]))


def in_thread(work: Callable[[], T]) -> Future[T]:
    """The result of blocking work, from a thread of its own."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def weights_bytes(folder: Path) -> int:
    """What the tensors of a model folder take, within a few kilobytes."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _all_of(reader: int) -> bytes:
    found = b""
    while select.select([reader], [], [], TIMEOUT_S)[0] and (part := os.read(reader, 65_536)):
        found += part
    return found
