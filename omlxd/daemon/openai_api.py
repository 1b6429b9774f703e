"""The OpenAI-style API on both doors: `/v1/models`, `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from omlxd.core.errors import OmlxError
from omlxd.core.states import ModelView
from omlxd.daemon.answer_forms import settle
from omlxd.daemon.app import Daemon
from omlxd.daemon.bodies import read_body
from omlxd.daemon.http_errors import JsonResponse, error_content, internal_error, outward
from omlxd.daemon.keep_alive import granted_s
from omlxd.daemon.listening import close_all, hear_pieces, wait_before_stream, waiting_for
from omlxd.daemon.measured import Measured
from omlxd.daemon.openai_answers import DONE, Answer, ChatShape, CompletionShape, frame
from omlxd.daemon.openai_bodies import AnswerBody, ChatBody, CompletionBody
from omlxd.daemon.openai_forms import SCHEMA_FIELD
from omlxd.daemon.pages import Page
from omlxd.daemon.replies import Piece, Reply
from omlxd.daemon.request import Generation
from omlxd.daemon.streams import CLIENT_GONE, SERVER_SENT_EVENTS, Stream, straight, while_connected
from omlxd.daemon.turnstile import Turnstile
from omlxd.daemon.wish import Options
from omlxd.engine.codec import TextCodec

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
PROGRESS_HEADER = "omlxd-progress"
"""Sent by who would rather have comments about a wait at once than an HTTP status for a prompt that is refused."""

STARTED_AT_ONCE = 16
"""Answers in one turn of the loop: one request may have 64 prompts."""


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
        self._turnstile = Turnstile(STARTED_AT_ONCE)

    async def models(self, request: Request) -> Response:
        page, listed = Page.asked(request.query_params), []
        for view in self._daemon.monitor.models():
            names = () if view.removed else (view.name, *view.aliases)
            listed += [self._model(name, view) for name in names]
        return JsonResponse({"object": "list", **page.of(listed)})

    async def model(self, request: Request) -> Response:
        asked = request.path_params["name"]
        entry = self._daemon.pool.resolve(asked)
        return JsonResponse(self._model(asked, self._daemon.monitor.model(entry.name)))

    async def chat(self, request: Request) -> Response:
        body = await read_body(request, ChatBody)
        messages = [message.for_template() for message in body.messages]
        prompt = {"messages": messages, "tools": body.offered_tools, "thinking": body.thinking}
        own: Options = {} if body.reasoning_field is None else {"reasoning_field": body.reasoning_field}
        generations = await self._start(body, [prompt], body.length, own)
        told: Any = {"tools": body.offered_tools, "one_call": body.form.one_call, "must_call": body.form.must_call}
        replies = [Reply(generation, **told) for generation in generations]
        has_logprobs = body.told_logprobs is not None
        answer = Answer(ChatShape(), replies, body.includes_usage, has_logprobs=has_logprobs)
        return await self._answer(request, body, answer)

    async def completions(self, request: Request) -> Response:
        body = await read_body(request, CompletionBody)
        prompts = [{"prompt": each} if isinstance(each, str) else {"tokens": each} for each in body.prompts]
        own: Options = {"ignore_eos": bool(body.ignore_eos), "cache_prompt": body.cache_prompt is not False}
        generations = await self._start(body, prompts, body.max_tokens, own, is_measured=bool(body.timings))
        replies = [Reply(generation, is_chat=False) for generation in generations]
        has_logprobs = body.told_logprobs is not None
        answer = Answer(CompletionShape(), replies, body.includes_usage, len(prompts), has_logprobs)
        return await self._answer(request, body, answer)

    async def _start(
        self,
        body: AnswerBody,
        prompts: Sequence[Mapping[str, Any]],
        max_tokens: int | None,
        own: Options,
        *,
        is_measured: bool = False,
    ) -> list[Generation]:
        """A generation for each choice of each prompt; all or none."""
        form = await settle(body.form, SCHEMA_FIELD, body.tool_fields)
        started: list[Generation] = []
        try:
            for prompt in prompts:
                for choice in range(body.choices):
                    options = sampling_options(body, choice) | own
                    options |= {"max_tokens": max_tokens, "form": form, "keep_alive_s": self._keep_alive_s(body)}
                    await self._turnstile.through()
                    started.append(self._daemon.pool.generate(body.model, **prompt, **options))
                    if is_measured:
                        started[-1].measured = Measured()
        except (OmlxError, asyncio.CancelledError):
            await close_all(started)
            raise
        return started

    def _keep_alive_s(self, body: AnswerBody) -> float | None:
        pool, api = self._daemon.pool, self._daemon.manifest.api
        return granted_s(body.idle_s, pool.resolve(body.model).settings.ttl_s, api.max_keep_alive_s)

    async def _answer(self, request: Request, body: AnswerBody, answer: Answer) -> Response:
        return await (self._stream(request, answer) if body.stream else self._whole(request, answer))

    async def _whole(self, request: Request, answer: Answer) -> Response:
        generations = [reply.generation for reply in answer.replies]
        try:
            told = await while_connected(request, self._told(answer.replies))
        finally:
            await close_all(generations)
        if told is None:
            return Response(status_code=CLIENT_GONE)
        return JsonResponse(answer.whole(told, self._codec(answer)))

    async def _told(self, replies: Sequence[Reply]) -> list[list[Piece]]:
        """All that each one says; raises as soon as one has failed."""
        pieces: list[list[Piece]] = [[] for _ in replies]
        async with aclosing(hear_pieces(self._daemon.pool.engine, replies)) as heard:
            async for news in heard:
                if news is not None and news[1] is not None:
                    pieces[news[0]].append(news[1])
        return pieces

    async def _stream(self, request: Request, answer: Answer) -> Response:
        """A prompt that is refused gets a real HTTP status; what fails later may have to be a frame of the stream."""
        generations = [reply.generation for reply in answer.replies]
        heard = await while_connected(
            request, wait_before_stream(generations, wants_progress=PROGRESS_HEADER in request.headers)
        )
        failed = next((each.error for each in generations if each.error and not each.generated_tokens), None)
        if heard is None or failed is not None:
            await close_all(generations)
            if failed is not None:
                raise failed
            return Response(status_code=CLIENT_GONE)
        return Stream(self._frames(request, answer), SERVER_SENT_EVENTS)

    async def _frames(self, request: Request, answer: Answer) -> AsyncGenerator[bytes, None]:
        generations, path = [reply.generation for reply in answer.replies], request.scope["path"]
        try:
            if not any(each.ended or each.generated_tokens for each in generations):
                yield self._comment(generations)
            for opening in answer.opening():
                yield opening
            codec, at_once = None, straight(request.scope, answer.more)
            async with aclosing(hear_pieces(self._daemon.pool.engine, answer.replies, at_once)) as heard:
                async for news in heard:
                    codec = codec or self._codec(answer)
                    if news is None:
                        yield self._comment(generations)
                        continue
                    index, piece = news
                    yield answer.closing(index) if piece is None else answer.piece(index, piece, codec)
            for counts in answer.counts():
                yield counts
        except OmlxError as error:
            yield frame(error_content(outward(error, request.scope), path))
        except Exception:
            yield frame(error_content(internal_error(), path))
            raise  # into the log
        finally:
            await close_all(generations)
        yield DONE

    def _comment(self, generations: Sequence[Generation]) -> bytes:
        """What it waits for; clients skip it, `omlxd run` shows it, and it keeps the connection alive."""
        return f": {waiting_for(self._daemon, generations)}\n\n".encode()

    def _codec(self, answer: Answer) -> TextCodec | None:
        return self._daemon.pool.engine.codec(answer.replies[0].generation.model)

    def _model(self, name: str, view: ModelView) -> dict[str, Any]:
        """One model in the words of both OpenAI's clients and Anthropic's, whose fields have no name in common."""
        created = int(self._daemon.started_at)
        model = {"id": name, "object": "model", "created": created, "owned_by": "omlxd"}
        created_at = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
        model |= {"type": "model", "display_name": name, "created_at": created_at, "lifecycle": "active"}
        if name != view.name:
            model["root"] = view.name
        figures = {
            "state": view.state.value,
            "weights_bytes": view.weights_bytes,
            "context_length": view.context_length,
        }
        return {**model, "omlxd": figures}


def sampling_options(body: AnswerBody, choice: int) -> Options:
    """The options of `generate` that say how tokens are chosen; each choice has random numbers of its own."""
    options: Options = {
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "seed": None if body.seed is None else (body.seed + choice) % 2**63,
        "stop": body.stops,
        "top_logprobs": body.told_logprobs,
        "logit_bias": {int(token): value for token, value in (body.logit_bias or {}).items()},
    }
    for name in _AS_THEY_ARE:
        if (value := getattr(body, name)) is not None:
            options[name] = value
    return options


_AS_THEY_ARE: tuple[
    Literal["top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"], ...
] = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
