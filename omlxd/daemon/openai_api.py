"""The OpenAI-style API on both doors: `/v1/models`, `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from omlxd.core.errors import OmlxError
from omlxd.daemon.app import Daemon
from omlxd.daemon.bodies import read_body
from omlxd.daemon.http_errors import JsonResponse, error_body, internal_error
from omlxd.daemon.listening import HEARTBEAT_S, close_all, listen, wait_for_first, waiting_for
from omlxd.daemon.openai_answers import DONE, Answer, ChatShape, CompletionShape, frame
from omlxd.daemon.openai_bodies import AnswerBody, ChatBody, CompletionBody
from omlxd.daemon.request import Generation
from omlxd.daemon.streams import SERVER_SENT_EVENTS, Stream, while_connected

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
_CLIENT_GONE = 499  # nobody reads it


def routes(daemon: Daemon) -> list[Route]:
    """The routes of both doors."""
    api = _OpenAiApi(daemon)
    return [
        Route("/v1/models", api.models, methods=["GET"]),
        Route("/v1/models/{name}", api.model, methods=["GET"]),
        Route(CHAT_PATH, api.chat, methods=["POST"]),
        Route(COMPLETIONS_PATH, api.completions, methods=["POST"]),
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
        messages = [message.for_template() for message in body.messages]
        generations = await self._start(body, [{"messages": messages}], body.length)
        return await self._answer(request, body, Answer(ChatShape(), generations, body.includes_usage))

    async def completions(self, request: Request) -> Response:
        body = await read_body(request, CompletionBody)
        prompts = [{"prompt": each} if isinstance(each, str) else {"tokens": each} for each in body.prompts]
        generations = await self._start(body, prompts, body.max_tokens)
        return await self._answer(
            request, body, Answer(CompletionShape(), generations, body.includes_usage, len(prompts))
        )

    async def _start(
        self, body: AnswerBody, prompts: Sequence[Mapping[str, Any]], max_tokens: int | None
    ) -> list[Generation]:
        """A generation for each choice of each prompt; all or none."""
        started: list[Generation] = []
        try:
            for prompt in prompts:
                for choice in range(body.choices):
                    options = {"max_tokens": max_tokens, **sampling_options(body, choice)}
                    started.append(self._daemon.pool.generate(body.model, **prompt, **options))
        except OmlxError:
            await close_all(started)
            raise
        return started

    async def _answer(self, request: Request, body: AnswerBody, answer: Answer) -> Response:
        return await (self._stream(request, answer) if body.stream else self._whole(request, answer))

    async def _whole(self, request: Request, answer: Answer) -> Response:
        try:
            texts = await while_connected(request, _texts(answer.generations))
        finally:
            await close_all(answer.generations)
        return Response(status_code=_CLIENT_GONE) if texts is None else JsonResponse(answer.whole(texts))

    async def _stream(self, request: Request, answer: Answer) -> Response:
        """What fails within the first second is a real HTTP status; later it has to be a frame of the stream."""
        heard = await while_connected(request, wait_for_first(answer.generations, HEARTBEAT_S))
        failed = next((each.error for each in answer.generations if each.error and not each.generated_tokens), None)
        if heard is None or failed is not None:
            await close_all(answer.generations)
            if failed is not None:
                raise failed
            return Response(status_code=_CLIENT_GONE)
        return Stream(self._frames(answer, request.url.path), SERVER_SENT_EVENTS)

    async def _frames(self, answer: Answer, path: str) -> AsyncGenerator[bytes, None]:
        generations = answer.generations
        try:
            if not any(each.ended or each.generated_tokens for each in generations):
                yield self._comment(generations)
            for piece in answer.opening():
                yield piece
            async with aclosing(listen(generations)) as heard:
                async for news in heard:
                    if news is None:
                        yield self._comment(generations)
                    elif news.chunk is None:
                        yield answer.closing(news.index)
                    elif news.chunk.text:
                        yield answer.text(news.index, news.chunk.text)
            for piece in answer.counts():
                yield piece
        except OmlxError as error:
            yield frame({"error": error_body(error, path)})
        except Exception:
            yield frame({"error": error_body(internal_error(), path)})
            raise  # into the log
        finally:
            await close_all(generations)
        yield DONE

    def _comment(self, generations: Sequence[Generation]) -> bytes:
        """What it waits for; clients skip it, `omlxd run` shows it, and it keeps the connection alive."""
        return f": {waiting_for(self._daemon, generations)}\n\n".encode()

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": int(self._daemon.started_at), "owned_by": "omlxd"}


def sampling_options(body: AnswerBody, choice: int) -> dict[str, Any]:
    """The options of `generate` that say how tokens are chosen; each choice has random numbers of its own."""
    return {
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "seed": None if body.seed is None else (body.seed + choice) % 2**63,
        "stop": body.stops,
    }


async def _texts(generations: Sequence[Generation]) -> list[str]:
    """Each one's whole text; raises as soon as one has failed."""
    pieces: list[list[str]] = [[] for _ in generations]
    async with aclosing(listen(generations)) as heard:
        async for news in heard:
            if news is not None and news.chunk is not None:
                pieces[news.index].append(news.chunk.text)
    return ["".join(each) for each in pieces]
