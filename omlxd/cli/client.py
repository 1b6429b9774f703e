"""The command line's side of the socket: HTTP/1.1 over AF_UNIX, answers as dicts or lines."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from omlxd.cli.holder import holder_of
from omlxd.core.errors import DaemonNotRunning, NotPermitted, OmlxError, Unreachable, from_json
from omlxd.daemon.home import MAX_SOCKET_PATH_BYTES, Home

if TYPE_CHECKING:
    import socket

    from omlxd.cli.http_answer import Answer

ANSWER_TIMEOUT_S: Final = 10.0
_GONE_WITHIN_S: Final = 1.0
EVENT_STREAM: Final = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Client:
    """Talks to the daemon that listens at `socket_path`.

    Every method raises DaemonNotRunning, NotPermitted or Unreachable when there is no answer, and the daemon's own
    error when the answer is one.
    """

    socket_path: Path

    def get(self, path: str, *, timeout_s: float | None = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """The JSON that `path` answers."""
        return self.call("GET", path, timeout_s=timeout_s)

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = ANSWER_TIMEOUT_S,
    ) -> dict[str, Any]:
        """The JSON answer to a request; `timeout_s=None` waits as long as the effect takes."""
        with self._answer(method, path, body, accept="application/json", timeout_s=timeout_s) as answer:
            found = _parsed(answer.read())
            if not isinstance(found, dict):
                raise self._nonsense()
            return found

    def ndjson(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Generator[dict[str, Any], None, None]:
        """One dict for each line of the answer, as it comes; `timeout_s` is the longest silence."""
        with self._answer(method, path, body, accept="application/x-ndjson", timeout_s=timeout_s) as answer:
            for line in answer:
                if line.strip():
                    found = _parsed(line)
                    if not isinstance(found, dict):
                        raise self._nonsense()
                    yield found

    def sse(self, path: str, body: Mapping[str, Any]) -> Generator[str | dict[str, Any], None, None]:
        """Server-sent events of a POST: comments as text, `data:` as dicts, until `[DONE]`.

        Raises the daemon's error when a `data:` frame is one, and Unreachable when the stream breaks off, which says
        whether the daemon is still there.
        """
        try:
            yield from self._events(path, body)
        except Unreachable as error:
            if error.hint != _LOOK_AT_LOGS or not self._has_died():
                raise
            raise Unreachable(
                "the daemon died before the answer was complete",
                hint="`omlxd start` starts it again; `omlxd logs -n 20` shows what it did last",
            ) from error

    def _events(self, path: str, body: Mapping[str, Any]) -> Generator[str | dict[str, Any], None, None]:
        with self._answer("POST", path, body, accept=EVENT_STREAM, timeout_s=None) as answer:
            for raw in answer:
                line = raw.decode("utf-8", "replace").rstrip("\r\n")
                if line.startswith(":"):
                    yield line[1:].strip()
                elif line.startswith("data:"):
                    text = line[5:].strip()
                    if text == "[DONE]":
                        return
                    found = _parsed(text)
                    if not isinstance(found, dict):
                        raise self._nonsense()
                    if "error" in found:
                        raise from_json(found["error"])
                    yield found
            raise Unreachable("the daemon closed the stream before the answer was complete", hint=_LOOK_AT_LOGS)

    def _has_died(self) -> bool:
        """Whether nobody is there any longer; a process that was killed may take a moment to let go of its lock."""
        deadline_s = time.monotonic() + _GONE_WITHIN_S
        while time.monotonic() < deadline_s:
            try:
                self.get("/v1/control/status", timeout_s=_GONE_WITHIN_S)
                return False
            except DaemonNotRunning:
                return True
            except OmlxError:
                time.sleep(0.02)
        return False

    @contextmanager
    def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, accept: str, timeout_s: float | None
    ) -> Iterator[Answer]:
        from omlxd.cli.http_answer import Answer, BrokenAnswer  # 10 ms, which Tab and help need not wait for

        headers = {"Accept": accept} | ({"Omlxd-Progress": "true"} if accept == EVENT_STREAM else {})
        payload = None
        if body is not None:
            payload, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        try:
            with closing(connected(self.socket_path, timeout_s)) as connection:
                answer = Answer(connection, method, path, headers, payload)
                if answer.status >= 400:
                    raise _error_of(answer)
                yield answer
        except TimeoutError as error:
            raise Unreachable(
                f"the daemon did not answer within {timeout_s:g} s",
                hint="`omlxd logs -n 20` shows what it does; `omlxd stop --now` ends it",
            ) from error
        except BrokenPipeError as error:  # must not pass for our own closed stdout
            raise Unreachable("the daemon closed the connection", hint=_LOOK_AT_LOGS) from error
        except (BrokenAnswer, ConnectionError) as error:
            raise Unreachable("the daemon closed the connection without an answer", hint=_LOOK_AT_LOGS) from error

    def _nonsense(self) -> Unreachable:
        return Unreachable(
            f"what listens at `{self.socket_path}` does not answer like omlxd",
            hint="`omlxd restart`; or set `OMLXD_HOME` to another directory",
        )


def model_path(name: str, verb: str) -> str:
    """The control route of a model; the name is user input and may hold anything."""
    from urllib.parse import quote  # 5 ms, as for the client

    return f"/v1/control/models/{quote(name, safe='')}/{verb}"


_LOOK_AT_LOGS: Final = "`omlxd logs -n 20` shows what happened"


def connected(socket_path: Path, timeout_s: float | None) -> socket.socket:
    """A connection to the daemon's socket.

    Raises:
        DaemonNotRunning: there is no socket, or nobody listens, and nobody holds the home's lock.
        NotPermitted: it belongs to somebody else.
        Unreachable: it is there and does not accept, or the lock is held (`details["holder_pid"]`).
    """
    if len(str(socket_path).encode()) > MAX_SOCKET_PATH_BYTES:
        raise DaemonNotRunning(
            f"no daemon can listen at `{socket_path}`: the path is longer than {MAX_SOCKET_PATH_BYTES} bytes",
            hint="set `OMLXD_HOME` to a directory with a shorter path",
        )
    import socket

    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(str(socket_path))
    except BaseException as error:
        connection.close()
        if isinstance(error, FileNotFoundError | ConnectionRefusedError | NotADirectoryError):
            raise _nobody_listens(socket_path) from error
        if isinstance(error, PermissionError):
            raise NotPermitted(
                f"`{socket_path}` may not be opened",
                hint="it belongs to another user; set `OMLXD_HOME` to a directory of your own",
            ) from error
        if isinstance(error, OSError):
            raise Unreachable(
                f"the daemon does not accept connections at `{socket_path}`",
                hint="`omlxd stop --now`, then `omlxd start`",
            ) from error
        raise
    return connection


def _nobody_listens(socket_path: Path) -> OmlxError:
    """Not running; or running and out of reach: it has just begun, it ends, or its socket was removed."""
    holder = holder_of(Home(socket_path.parent).lock)
    if holder is None:
        return DaemonNotRunning("the daemon is not running", hint="`omlxd start`")
    who = f" (pid {holder.pid})" if holder.pid else ""
    return Unreachable(
        f"the daemon{who} holds the lock but does not answer",
        hint="it may be starting or ending; if it stays like this, `omlxd stop` ends it",
        details={"holder_pid": holder.pid},
    )


def _error_of(answer: Answer) -> OmlxError:
    found = _parsed(answer.read())
    if isinstance(found, dict) and isinstance(found.get("error"), dict):
        return from_json(found["error"])
    return OmlxError(f"the daemon answered {answer.status} {answer.reason}", hint=_LOOK_AT_LOGS)


def _parsed(text: bytes | str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
