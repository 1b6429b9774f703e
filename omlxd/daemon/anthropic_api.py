"""The Anthropic-style API on both doors: `/v1/messages`, streamed or whole, and its count of tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from omlxd.core.errors import OmlxError
from omlxd.daemon.answer_forms import settle
from omlxd.daemon.anthropic_answers import Message, event
from omlxd.daemon.anthropic_bodies import CountBody, MessagesBody
from omlxd.daemon.app import Daemon
from omlxd.daemon.bodies import read_body
from omlxd.daemon.http_errors import MESSAGES_PATH, JsonResponse, error_content, internal_error, outward
from omlxd.daemon.listening import hear_pieces, wait_before_stream
from omlxd.daemon.replies import Piece, Reply
from omlxd.daemon.streams import CLIENT_GONE, SERVER_SENT_EVENTS, Stream, straight, while_connected
from omlxd.daemon.wish import Options

COUNT_PATH = f"{MESSAGES_PATH}/count_tokens"


def routes(daemon: Daemon) -> list[Route]:
    """The routes of both doors."""
    api = _AnthropicApi(daemon)
    return [
        Route(MESSAGES_PATH, api.messages, methods=["POST"]),
        Route(COUNT_PATH, api.count_tokens, methods=["POST"]),
    ]


class _AnthropicApi:
    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    async def messages(self, request: Request) -> Response:
        body = await read_body(request, MessagesBody)
        options: Options = {
            "max_tokens": body.max_tokens,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "top_k": body.top_k or 0,
            "stop": tuple(body.stop_sequences or ()),
            "form": await settle(body.form, "output_config.format.schema", body.tool_fields),
        }
        generation = self._daemon.pool.generate(
            body.model, messages=body.for_template, tools=body.offered_tools, thinking=body.thinks, **options
        )
        form = body.form
        reply = Reply(generation, tools=body.offered_tools, one_call=form.one_call, must_call=form.must_call)
        return await (self._stream(request, reply) if body.stream else self._whole(request, reply))

    async def count_tokens(self, request: Request) -> Response:
        body = await read_body(request, CountBody)
        counting = self._daemon.pool.count_tokens(
            body.model, messages=body.for_template, tools=body.offered_tools, thinking=body.thinks
        )
        counted = await while_connected(request, counting)
        return Response(status_code=CLIENT_GONE) if counted is None else JsonResponse({"input_tokens": counted})

    async def _whole(self, request: Request, reply: Reply) -> Response:
        async with reply.generation:
            pieces = await while_connected(request, self._pieces(reply))
        return Response(status_code=CLIENT_GONE) if pieces is None else JsonResponse(Message(reply).whole(pieces))

    async def _pieces(self, reply: Reply) -> list[Piece]:
        async with aclosing(hear_pieces(self._daemon.pool.engine, [reply])) as heard:
            return [news[1] async for news in heard if news is not None and news[1] is not None]

    async def _stream(self, request: Request, reply: Reply) -> Response:
        """A prompt that is refused gets a real HTTP status; what fails later may have to be an event of the stream."""
        generation = reply.generation
        heard = await while_connected(request, wait_before_stream([generation]))
        failed = generation.error if generation.generated_tokens == 0 else None
        if heard is None or failed is not None:
            await generation.aclose()
            if failed is not None:
                raise failed
            return Response(status_code=CLIENT_GONE)
        return Stream(self._events(request, reply), SERVER_SENT_EVENTS)

    async def _events(self, request: Request, reply: Reply) -> AsyncGenerator[bytes, None]:
        message, engine = Message(reply), self._daemon.pool.engine
        at_once = straight(request.scope, message.more)
        try:
            yield message.start()
            async with reply.generation, aclosing(hear_pieces(engine, [reply], at_once)) as heard:
                async for news in heard:
                    if news is None:
                        yield event("ping")
                    elif news[1] is not None:
                        for each in message.piece(news[1]):
                            yield each
            for each in message.finish():
                yield each
        except OmlxError as error:
            yield _error(outward(error, request.scope))
        except Exception:
            yield _error(internal_error())
            raise  # into the log


def _error(error: OmlxError) -> bytes:
    return event("error", error=error_content(error, MESSAGES_PATH)["error"])
