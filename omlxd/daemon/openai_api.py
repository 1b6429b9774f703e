"""The OpenAI-style API on both doors: `/v1/models` and `/v1/chat/completions`, streamed or whole."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from omlxd.core.errors import EngineFailed, OmlxError
from omlxd.core.states import EntryState, RequestState
from omlxd.daemon.app import Daemon
from omlxd.daemon.bodies import ChatBody, read_body
from omlxd.daemon.http_errors import JsonResponse, error_body, internal_error
from omlxd.daemon.request import Generation
from omlxd.daemon.streams import SERVER_SENT_EVENTS, Stream, while_connected

CHAT_PATH = "/v1/chat/completions"
_HEARTBEAT_S = 1.0
_CLIENT_GONE = 499  # nobody reads it


def routes(daemon: Daemon) -> list[Route]:
    """The routes of both doors."""
    api = _OpenAiApi(daemon)
    return [
        Route("/v1/models", api.models, methods=["GET"]),
        Route("/v1/models/{name}", api.model, methods=["GET"]),
        Route(CHAT_PATH, api.chat, methods=["POST"]),
    ]


class _OpenAiApi:
    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    async def models(self, request: Request) -> Response:
        listed = []
        for name, entry in self._daemon.pool.entries.items():
            listed.append(self._model(name))
            listed += [self._model(alias) | {"root": name} for alias in entry.settings.aliases]
        return JsonResponse({"object": "list", "data": listed})

    async def model(self, request: Request) -> Response:
        asked = request.path_params["name"]
        name = self._daemon.pool.resolve(asked).name
        return JsonResponse(self._model(asked) | ({} if asked == name else {"root": name}))

    async def chat(self, request: Request) -> Response:
        body = await read_body(request, ChatBody)
        generation = self._daemon.pool.generate(
            body.model,
            messages=[message.for_template() for message in body.messages],
            max_tokens=body.max_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            seed=None if body.seed is None else body.seed % 2**63,
            stop=body.stops,
        )
        return await (self._stream(request, generation) if body.stream else self._whole(request, generation))

    async def _whole(self, request: Request, generation: Generation) -> Response:
        async with generation:
            text = await while_connected(request, generation.text())
        if text is None:
            return Response(status_code=_CLIENT_GONE)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "logprobs": None,
            "finish_reason": _finish_reason(generation),
        }
        usage = {
            "prompt_tokens": generation.prompt_tokens,
            "completion_tokens": generation.generated_tokens,
            "total_tokens": generation.prompt_tokens + generation.generated_tokens,
        }
        return JsonResponse(self._head(generation, "chat.completion") | {"choices": [choice], "usage": usage})

    async def _stream(self, request: Request, generation: Generation) -> Response:
        """What fails within the first second is a real HTTP status; later it has to be a frame of the stream."""
        heard = await while_connected(request, generation.wait(_HEARTBEAT_S))
        failed = generation.error if generation.generated_tokens == 0 else None
        if heard is None or failed is not None:
            await generation.aclose()
            if failed is not None:
                raise failed
            return Response(status_code=_CLIENT_GONE)
        return Stream(self._frames(generation), SERVER_SENT_EVENTS)

    async def _frames(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        head = self._head(generation, "chat.completion.chunk")
        before, after = _around_text(head)
        try:
            async with generation:
                if not generation.ended and generation.generated_tokens == 0:
                    yield self._comment(generation)
                yield _frame(head | _choice({"role": "assistant", "content": ""}))
                while True:
                    if not await generation.wait(_HEARTBEAT_S):
                        yield self._comment(generation)
                        continue
                    try:
                        chunk = await anext(generation)
                    except StopAsyncIteration:
                        break
                    if chunk.text:
                        yield before + _json(chunk.text) + after
            yield _frame(head | _choice({}, _finish_reason(generation)) | {"omlxd": _figures(generation)})
        except OmlxError as error:
            yield _frame({"error": error_body(error, CHAT_PATH)})
        except Exception:
            yield _frame({"error": error_body(internal_error(), CHAT_PATH)})
            raise  # into the log
        finally:
            await generation.aclose()
        yield b"data: [DONE]\n\n"

    def _comment(self, generation: Generation) -> bytes:
        """What it waits for; clients skip it, `omlxd run` shows it, and it keeps the connection alive."""
        view = self._daemon.monitor.model(generation.model)
        if view.state is EntryState.LOADING:
            return f": loading {view.name} {100 * (view.load_progress or 0):.0f}%\n\n".encode()
        if generation.state is RequestState.PREFILL:
            return f": prompt {generation.prefilled_tokens}/{generation.prompt_tokens}\n\n".encode()
        if generation.state is RequestState.PARKED:
            return b": parked, waits for memory\n\n"
        if generation.state is RequestState.DECODE:
            return b": working\n\n"
        return f": waiting for {view.name}\n\n".encode()

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": int(self._daemon.started_at), "owned_by": "omlxd"}

    def _head(self, generation: Generation, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{generation.id}",
            "object": kind,
            "created": int(time.time()),
            "model": generation.model,
        }


def _finish_reason(generation: Generation) -> str:
    if generation.finish_reason is None:
        raise EngineFailed(f"the request to `{generation.model}` ended without a reason")
    return generation.finish_reason.value


def _choice(delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}]}


def _figures(generation: Generation) -> dict[str, Any]:
    return {
        "prompt_tokens": generation.prompt_tokens,
        "generated_tokens": generation.generated_tokens,
        "first_token_s": generation.first_token_s,
        "tokens_per_s": generation.tokens_per_s,
    }


def _frame(content: dict[str, Any]) -> bytes:
    return b"data: " + _json(content) + b"\n\n"


def _around_text(head: dict[str, Any]) -> tuple[bytes, bytes]:
    """The same frame for every token of a stream, in two parts with the text between them."""
    mark = "\0"  # JSON never holds it as it is, so it stands once
    before, after = _frame(head | _choice({"content": mark})).split(_json(mark))
    return before, after


def _json(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
