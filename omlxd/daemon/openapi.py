"""`/openapi.json`: what each door answers, from the table of routes below and the bodies that are checked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import omlxd
from omlxd.daemon import pages
from omlxd.daemon.anthropic_api import COUNT_PATH
from omlxd.daemon.anthropic_bodies import CountBody, MessagesBody
from omlxd.daemon.bodies import Body, LimitsBody, LoadBody, NoBody, PinBody, ReloadBody, StopBody, UnloadBody
from omlxd.daemon.http_errors import CONTROL_PREFIX, MESSAGES_PATH, JsonResponse
from omlxd.daemon.metrics import METRICS_PATH
from omlxd.daemon.openai_api import CHAT_PATH, COMPLETIONS_PATH
from omlxd.daemon.openai_bodies import ChatBody, CompletionBody

OPENAPI_PATH = "/openapi.json"
_MODEL = f"{CONTROL_PREFIX}/models/{{name}}"


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path: what it does, its body, and the parameters of its query."""

    method: str
    path: str
    does: str
    body: type[Body] | None = None
    query: tuple[str, ...] = ()


OPERATIONS = (
    Operation("GET", "/health", "Whether the daemon is well"),
    Operation("GET", METRICS_PATH, "State and counters for Prometheus"),
    Operation("GET", OPENAPI_PATH, "This document"),
    Operation("GET", "/v1/models", "The models and their aliases", query=pages.QUERY),
    Operation("GET", "/v1/models/{name}", "One model"),
    Operation("POST", CHAT_PATH, "Answer a conversation", ChatBody),
    Operation("POST", COMPLETIONS_PATH, "Continue a text", CompletionBody),
    Operation("POST", MESSAGES_PATH, "Answer a conversation, in Anthropic's words", MessagesBody),
    Operation("POST", COUNT_PATH, "How long a conversation is as a prompt", CountBody),
    Operation("GET", f"{CONTROL_PREFIX}/status", "What `omlxd status --json` prints"),
    Operation("GET", f"{CONTROL_PREFIX}/models", "The models"),
    Operation("POST", f"{_MODEL}/load", "Load a model", LoadBody),
    Operation("POST", f"{_MODEL}/unload", "Unload a model", UnloadBody),
    Operation("POST", f"{_MODEL}/pin", "Pin a model", PinBody),
    Operation("POST", f"{_MODEL}/unpin", "Unpin a model", NoBody),
    Operation("PATCH", f"{CONTROL_PREFIX}/limits", "Change the soft limit", LimitsBody),
    Operation("GET", f"{CONTROL_PREFIX}/requests", "The requests in flight"),
    Operation("DELETE", f"{CONTROL_PREFIX}/requests/{{id}}", "Abort a request"),
    Operation("GET", f"{CONTROL_PREFIX}/plan", "What would fit"),
    Operation("GET", f"{CONTROL_PREFIX}/history", "Memory used in the last minutes"),
    Operation("GET", f"{CONTROL_PREFIX}/events", "Events as lines of JSON", query=("since", "follow")),
    Operation("POST", f"{CONTROL_PREFIX}/reload", "Read the manifest again", ReloadBody),
    Operation("POST", f"{CONTROL_PREFIX}/stop", "Drain and stop", StopBody),
)


def routes(*, control: bool) -> list[Route]:
    """The route of one door; its document has the control routes or has not."""
    described = [each for each in OPERATIONS if control or not each.path.startswith(CONTROL_PREFIX)]
    made: list[dict[str, Any]] = []

    async def answer(request: Request) -> Response:
        if not made:
            made.append(document(described))
        return JsonResponse(made[0])

    return [Route(OPENAPI_PATH, answer, methods=["GET"])]


def document(operations: Iterable[Operation]) -> dict[str, Any]:
    """The OpenAPI document of these operations."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation)
        if operation.body is not None:
            schema = operation.body.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= schema.pop("$defs", {})
            schemas[operation.body.__name__] = schema
    return {
        "openapi": "3.1.0",
        "info": {"title": "omlxd", "version": omlxd.__version__, "description": "See omlxd-api(7)."},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"bearer": []}, {"key": []}, {}],
    }


def _described(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.does,
        "operationId": f"{operation.method.lower()}{operation.path}".replace("/", "_").strip("_"),
        "responses": {
            "200": {"description": "The answer"},
            "default": {"description": "An error, in the shape of its API"},
        },
    }
    in_path = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    text = {"type": "string"}
    parameters = [{"name": name, "in": "path", "required": True, "schema": text} for name in in_path]
    parameters += [{"name": name, "in": "query", "required": False, "schema": text} for name in operation.query]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        reference = {"$ref": f"#/components/schemas/{operation.body.__name__}"}
        needed = any(field.is_required() for field in operation.body.model_fields.values())
        described["requestBody"] = {"required": needed, "content": {"application/json": {"schema": reference}}}
    return described
