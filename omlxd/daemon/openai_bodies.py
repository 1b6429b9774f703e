"""Bodies of the OpenAI-style routes: the fields that are understood, and no others."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from omlxd.daemon.bodies import MOST_MESSAGES, Body, problem_of
from omlxd.daemon.openai_messages import ChatMessage, Tool
from omlxd.daemon.wish import MAX_STOPS, MAX_TOP_LOGPROBS

MOST_ANSWERS = 64
"""Prompts times `n` of one request."""
MOST_CHOICES = 16


class StreamOptions(Body):
    """How a stream is written."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


StopText = Annotated[str, Field(min_length=1)]
TokenId = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]


class AnswerBody(Body):
    """What both kinds of completion understand."""

    model: Annotated[str, Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> AnswerBody:
        if self.stream_options is not None and not self.stream:
            raise problem_of("stream_options", "needs `stream` to be true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop sequences as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def told_logprobs(self) -> int | None:
        """How many likeliest tokens to tell beside each token; None to tell nothing."""
        raise NotImplementedError

    @property
    def choices(self) -> int:
        """How many answers to each prompt."""
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        """Whether the stream ends with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class TemplateOptions(Body):
    """What chat templates can be told beside the messages."""

    enable_thinking: bool | None = None


class ResponseFormat(Body):
    """What the answer is written in; omlxd cannot hold a model to JSON."""

    type: Literal["text"]


class ChatBody(AnswerBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: TemplateOptions | None = None

    @model_validator(mode="after")
    def _likeliest_of_what(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise problem_of("top_logprobs", "needs `logprobs` to be true")
        return self

    @model_validator(mode="after")
    def _one_length(self) -> ChatBody:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise problem_of("max_completion_tokens", "differs from `max_tokens`; send one of them")
        return self

    @property
    def told_logprobs(self) -> int | None:
        """How many likeliest tokens to tell beside each token; None to tell nothing."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered_tools(self) -> tuple[dict[str, Any], ...]:
        """The tools that the model may call, as chat templates take them."""
        if self.tool_choice == "none":
            return ()
        return tuple(tool.model_dump(exclude_none=True) for tool in self.tools or ())

    @property
    def thinking(self) -> bool | None:
        """Whether the model is to reason first; None for its template's way."""
        return self.chat_template_kwargs.enable_thinking if self.chat_template_kwargs is not None else None

    @property
    def length(self) -> int | None:
        """The longest answer, in tokens."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens


Ids = Annotated[list[int], Field(min_length=1)]


class CompletionBody(AnswerBody):
    """POST /v1/completions."""

    prompt: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MOST_ANSWERS)]
        | Ids
        | Annotated[list[Ids], Field(min_length=1, max_length=MOST_ANSWERS)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None

    @model_validator(mode="after")
    def _bounded(self) -> CompletionBody:
        if len(self.prompts) * self.choices > MOST_ANSWERS:
            raise problem_of("n", f"times the number of prompts must be at most {MOST_ANSWERS}")
        return self

    @property
    def told_logprobs(self) -> int | None:
        """How many likeliest tokens to tell beside each token; None to tell nothing."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)
