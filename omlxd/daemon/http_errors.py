"""Errors as HTTP answers, in the shape that whoever asks expects; never a traceback."""

from __future__ import annotations

import json
import math
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from omlxd.core.errors import Busy, InvalidRequest, LoadFailed, NotPermitted, OmlxError, UnknownModel
from omlxd.core.wording import shown

CONTROL_PREFIX = "/v1/control"
MESSAGES_PATH = "/v1/messages"


class NoSuchPath(InvalidRequest):
    """Nothing answers at this path of this door."""

    code = "no_such_path"
    http_status = 404


class NoSuchRequest(InvalidRequest):
    """No generation of this id is in flight."""

    code = "request_not_found"
    http_status = 404


class WrongMethod(InvalidRequest):
    """The path is there and takes other methods."""

    code = "method_not_allowed"
    http_status = 405


class TooLate(InvalidRequest):
    """The rest of the request did not come in time."""

    code = "request_timeout"
    http_status = 408


class BodyTooLarge(InvalidRequest):
    """The body is longer than the daemon reads."""

    code = "body_too_large"
    http_status = 413


class CodedBody(InvalidRequest):
    """The body has a `Content-Encoding`, which is not undone."""

    code = "unsupported_encoding"
    http_status = 415


class HeaderTooLarge(InvalidRequest):
    """The request line and the headers are longer than the daemon reads."""

    code = "header_too_large"
    http_status = 431


class KeyRefused(NotPermitted):
    """The TCP door wants the key of the manifest."""

    code = "invalid_api_key"
    http_status = 401


class JsonResponse(Response):
    """JSON without spaces; text stays UTF-8."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body's bytes."""
        return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


class ViewsResponse(JsonResponse):
    """JSON of views as they are, of which there may be thousands; dicts and lists may hold them."""

    def render(self, content: Any) -> bytes:
        """The body's bytes."""
        return orjson.dumps(content)


def error_response(error: OmlxError, path: str, *, over_tcp: bool) -> JsonResponse:
    """The answer to a request for `path` at this door that ended in this error."""
    headers: dict[str, str] = {}
    if error.http_status == 503:
        retry_after_s = error.retry_after_s if isinstance(error, Busy) else 5.0
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    if isinstance(error, KeyRefused):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, BodyTooLarge):
        headers["connection"] = "close"  # the rest of the body is not read
    if isinstance(error, WrongMethod) and error.details.get("allow"):
        headers["allow"] = str(error.details["allow"])
    return JsonResponse(error_content(error, path, over_tcp=over_tcp), status_code=error.http_status, headers=headers)


def error_content(error: OmlxError, path: str, *, over_tcp: bool = False) -> dict[str, Any]:
    """The error in the shape that clients of this path at this door expect: over TCP OpenAI's or Anthropic's."""
    if is_anthropic_path(path):
        kind = _ANTHROPIC_TYPES.get(error.http_status, "api_error")
        content = {"type": kind, "message": error.message, "code": error.code, "hint": _hint(error)}
        return {"type": "error", "error": content | ({"details": error.details} if error.details else {})}
    return {"error": _openai_error(error) if over_tcp or is_openai_path(path) else error.to_json()}


_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    431: "invalid_request_error",
    503: "overloaded_error",
}


def _openai_error(error: OmlxError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.http_status < 500 and error.http_status != 503 else "server_error"
    body = {
        "message": error.message,
        "type": kind,
        "param": "model" if isinstance(error, UnknownModel) else error.details.get("param"),
        "code": error.code,
        "hint": _hint(error),
    }
    return body | ({"details": error.details} if error.details else {})


def _hint(error: OmlxError) -> str:
    """What helps a program's author, where the error itself speaks to who types commands."""
    return _API_MANUAL if error.hint == InvalidRequest.remedy else error.hint


_API_MANUAL = "omlxd-api(7) and `/openapi.json` say what can be sent"


def is_anthropic_path(path: str) -> bool:
    """Whether clients of this path expect Anthropic's error shape."""
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


def is_openai_path(path: str) -> bool:
    """Whether clients of this path expect OpenAI's error shape at both doors."""
    return path.startswith("/v1/") and path != CONTROL_PREFIX and not path.startswith(CONTROL_PREFIX + "/")


def internal_error() -> OmlxError:
    """What a client hears of a bug of ours; the log has the frames."""
    return OmlxError(
        "something went wrong inside omlxd; this request failed, others go on",
        hint="`omlxd logs` shows an `api_error` line with the place",
    )


async def answer_omlx_error(request: Request, error: Exception) -> Response:
    """Starlette's handler of our own errors."""
    assert isinstance(error, OmlxError)
    return _answer(outward(error, request.scope), request)


def is_over_tcp(scope: Scope) -> bool:
    """Whether the request came through the TCP door, and not through the private socket."""
    return scope["server"] is not None and scope["server"][1] is not None


def outward(error: OmlxError, scope: Scope) -> OmlxError:
    """The error for who asks from there: over TCP without the places of a model's files, which the log has."""
    of_files = isinstance(error, LoadFailed | NotPermitted) and error.details.keys() & _OF_FILES
    if not of_files or not is_over_tcp(scope):
        return error
    model, kind = error.details.get("model"), str(error.details.get("kind", "")).replace("_", " ")
    name = f"`{model}`" if model else "the model"
    return type(error)(
        f"{name} cannot be loaded{f' ({kind})' if kind else ''}",
        hint="where omlxd runs, `omlxd check` and `omlxd logs` say what is wrong",
        details={key: error.details[key] for key in ("kind", "model") if key in error.details},
    )


_OF_FILES = frozenset({"kind", "model", "path", "file"})


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's handler of its own errors: no route, wrong method."""
    assert isinstance(error, HTTPException)
    path = shown(request.scope["path"])
    if error.status_code == 404:
        missing = NoSuchPath(f"nothing answers at `{path}`", hint=_other_path(request.scope["path"]))
        return _answer(missing, request)
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        hint = f"it takes {allow}" if allow else None
        problem = WrongMethod(f"`{path}` does not take {request.method}", hint=hint, details={"allow": allow})
        return _answer(problem, request)
    return _answer(InvalidRequest(f"the request was refused ({error.detail})"), request)


_CHATS = ("/v1/responses", "/api/chat", "/api/generate")
_SERVED = ("/chat/completions", "/completions", "/models", "/messages")


def _other_path(path: str) -> str:
    """Where a client that came here was going, by the customs of others."""
    if path in _CHATS:
        return "use `/v1/chat/completions`, or `/v1/messages`"
    if path.startswith("/v1/v1/"):
        return "leave `/v1` out of the base address that the client was given"
    if path in _SERVED:
        return "end the base address that the client was given in `/v1`"
    return "`GET /openapi.json` lists the paths"


async def answer_unexpected(request: Request, _error: Exception) -> Response:
    """Starlette's handler of everything else; the front door writes the log line."""
    return _answer(internal_error(), request)


def _answer(error: OmlxError, request: Request) -> Response:
    return error_response(error, request.scope["path"], over_tcp=is_over_tcp(request.scope))
