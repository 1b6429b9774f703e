"""Every error omlxd reports, as one tree; each knows its exit status, HTTP status, code and next step.

OmlxError                    1  500  anything that failed
├── InvalidRequest           2  400  the caller's words are off
│   ├── ContextExceeded      2  400  the prompt is longer than the model's context
│   └── PrefillMemoryExceeded 2 400  the prompt needs more memory than the limits can ever give it
├── DaemonNotRunning         3    -  nobody answers at the socket
├── AlreadyRunning           1    -  another daemon holds the lock
├── UnknownModel             4  404  no such name in the manifest
├── DoesNotFit               5  507  needs more than the limit can ever give
├── LoadFailed               1  500  the model's files do not make a model
├── EngineFailed             1  500  MLX raised inside a step; that model's requests ended
├── Unreachable             69    -  the daemon is there and does not answer
├── Busy                    75  503  not now; try again
│   ├── LoadCancelled       75  503  somebody, or the enforcer, stopped the load
│   ├── RequestAborted      75  503  the request had to give way
│   └── ShuttingDown        75  503  the daemon is draining
├── NotPermitted            77  403  another user's socket, or a file that cannot be read
├── StartFailed              1    -  the daemon could not start (socket path, port, home)
└── ManifestInvalid         78    -  the manifest has problems, all of them listed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar


class OmlxError(Exception):
    """Something failed; `str()` is one sentence without a full stop, `hint` the next step.

    Args:
        message: what happened, model names and paths in backticks.
        hint: what to type or change next; by default the `remedy` of the class, empty where the message says it all.
        details: the numbers behind the message (integer bytes, float seconds), JSON-ready.

    Attributes:
        logged: what the log says instead of the message, where that may quote what the user wrote; else None.
    """

    code: ClassVar[str] = "internal_error"
    exit_status: ClassVar[int] = 1
    http_status: ClassVar[int] = 500
    remedy: ClassVar[str] = "`omlxd logs -n 20` shows what happened, `omlxd doctor` looks for the reason"

    def __init__(self, message: str, *, hint: str | None = None, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = self.remedy if hint is None else hint
        self.details: dict[str, Any] = dict(details or {})
        self.logged: str | None = None

    def to_log(self) -> dict[str, Any]:
        """The error as the log has it: without what the user wrote."""
        return {**self.to_json(), "message": self.logged or self.message}

    def to_json(self) -> dict[str, Any]:
        """The error as it crosses the socket; `from_json` makes the same class of it again."""
        return {"code": self.code, "message": self.message, "hint": self.hint, "details": self.details}


class InvalidRequest(OmlxError):
    """The caller's words are off: a field, a value, an option."""

    code = "invalid_request"
    exit_status = 2
    http_status = 400
    remedy = "`omlxd --help`, or the manual, says what can be written"


class ContextExceeded(InvalidRequest):
    """The prompt (plus what is to be generated) is longer than the model's context."""

    code = "context_length_exceeded"
    remedy = "shorten the prompt, or begin a new conversation"


class PrefillMemoryExceeded(InvalidRequest):
    """The prompt needs more memory than the limits can ever give it; it was refused before anything was allocated."""

    code = "prefill_memory_exceeded"
    remedy = "shorten the prompt, or raise the limit: `omlxd limit`"


class DaemonNotRunning(OmlxError):
    """Nobody answers at the socket."""

    code = "daemon_not_running"
    exit_status = 3
    remedy = "`omlxd start`"


class AlreadyRunning(OmlxError):
    """Another daemon holds this home's lock."""

    code = "already_running"
    remedy = "`omlxd status` shows it, `omlxd restart` starts it anew"


class StartFailed(OmlxError):
    """The daemon could not start: socket path, port, home directory."""

    code = "start_failed"
    remedy = "`omlxd doctor` looks for the reason, `omlxd start --foreground` shows more"


class UnknownModel(OmlxError):
    """The manifest has no model of this name."""

    code = "model_not_found"
    exit_status = 4
    http_status = 404
    remedy = "`omlxd models` lists the models"


class DoesNotFit(OmlxError):
    """It needs more memory than the limit can ever give; nothing was evicted for it."""

    code = "does_not_fit"
    exit_status = 5
    http_status = 507
    remedy = "raise the limit (`omlxd limit`) or choose a smaller model; `omlxd plan` shows what would fit"


class LoadFailed(OmlxError):
    """The model's files do not make a model; `details["kind"]` says which part."""

    code = "load_failed"
    remedy = "`omlxd check` looks at the files of all models"


class EngineFailed(OmlxError):
    """MLX or mlx-lm raised inside a step; the requests of that model ended with this."""

    code = "engine_failed"
    remedy = "try again; `omlxd logs --level error` shows what MLX said"


class Unreachable(OmlxError):
    """The daemon is there and does not answer in time."""

    code = "unreachable"
    exit_status = 69
    remedy = "`omlxd doctor` looks for the reason; `omlxd stop --now` ends it, `omlxd start` starts it"


class Busy(OmlxError):
    """Not now: try again after `details["retry_after_s"]` seconds."""

    code = "busy"
    exit_status = 75
    http_status = 503
    remedy = "try again in a moment; `omlxd status` shows what runs"

    @property
    def retry_after_s(self) -> float:
        """Seconds after which trying again makes sense."""
        return float(self.details.get("retry_after_s", 5.0))


class LoadCancelled(Busy):
    """The load was stopped, by `unload` or by the enforcer; its memory is back."""

    code = "load_cancelled"
    remedy = "`omlxd why` says who stopped it; try again"


class RequestAborted(Busy):
    """The request had to give way; the message says to what."""

    code = "request_aborted"
    remedy = "`omlxd why` says what it gave way to; try again"


class ShuttingDown(Busy):
    """The daemon is draining and takes nothing new."""

    code = "shutting_down"
    remedy = "`omlxd start` starts it again, once it has ended"


class NotPermitted(OmlxError):
    """Another user's socket, or a file that cannot be read."""

    code = "not_permitted"
    exit_status = 77
    http_status = 403
    remedy = "check whose it is; `--home` or `OMLXD_HOME` names another home"


class ManifestInvalid(OmlxError):
    """The manifest has problems; `problems` lists all of them, each as `key.path: what is wrong`."""

    code = "manifest_invalid"
    exit_status = 78
    http_status = 422
    remedy = "correct the file, then `omlxd check`"

    def __init__(
        self,
        message: str,
        *,
        problems: Sequence[str] = (),
        hint: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message, hint=hint, details={**(details or {}), "problems": list(problems)})
        self.problems = tuple(problems)


def _tree(root: type[OmlxError]) -> dict[str, type[OmlxError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


def from_json(body: Mapping[str, Any]) -> OmlxError:
    """The error that `OmlxError.to_json` described; an unknown code becomes a plain `OmlxError`."""
    kind = _tree(OmlxError).get(str(body.get("code")), OmlxError)
    details = body.get("details") or {}
    hint = body.get("hint")
    message = str(body.get("message", "the daemon sent an error without a message"))
    if issubclass(kind, ManifestInvalid):
        return kind(message, problems=details.get("problems", ()), hint=hint, details=details)
    return kind(message, hint=hint, details=details)
