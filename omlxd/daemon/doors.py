"""What is behind the two doors: the control API on the Unix socket, the model APIs, health and metrics on both."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from omlxd.core.errors import OmlxError
from omlxd.core.states import DaemonState, Level
from omlxd.daemon import anthropic_api, control_api, metrics, openai_api, openapi
from omlxd.daemon.app import Daemon
from omlxd.daemon.front_door import FrontDoor, TcpRules
from omlxd.daemon.http_errors import JsonResponse, answer_http_exception, answer_omlx_error, answer_unexpected


def front_door(daemon: Daemon, rules: TcpRules | None) -> FrontDoor:
    """The application for both doors."""
    health_route = Route("/health", _health_route(daemon), methods=["GET"])
    model_apis = [*openai_api.routes(daemon), *anthropic_api.routes(daemon)]
    shared: list[BaseRoute] = [*model_apis, health_route, *metrics.routes(daemon)]
    return FrontDoor(
        unix=_application([*control_api.routes(daemon), *shared, *openapi.routes(control=True)]),
        tcp=_application([*shared, *openapi.routes(control=False)]),
        rules=rules,
        emit=daemon.bus.emit,
    )


def health(daemon: Daemon) -> tuple[str, int]:
    """The one word of `/health` and its HTTP status."""
    if daemon.state is not DaemonState.READY:
        return daemon.state.value, 503
    if daemon.monitor.stalled_s() > daemon.manifest.daemon.stall_timeout_s:
        return "stalled", 503
    return ("exhausted" if daemon.enforcer.level is Level.EXHAUSTED else "ok"), 200


def _health_route(daemon: Daemon) -> Any:
    async def answer(request: Request) -> Response:
        word, status = health(daemon)
        body = {
            "status": word,
            "level": daemon.enforcer.level.value,
            "stalled_s": daemon.monitor.stalled_s() or None,
            "unaccounted_bytes": daemon.monitor.memory().unaccounted,
        }
        return JsonResponse(body, status_code=status, headers={"retry-after": "1"} if status == 503 else None)

    return answer


def _application(routes: list[BaseRoute]) -> Starlette:
    return Starlette(
        routes=routes,
        exception_handlers={
            OmlxError: answer_omlx_error,
            HTTPException: answer_http_exception,
            Exception: answer_unexpected,
        },
    )
