"""Bodies of the OpenAI-style routes: the fields that are understood, and no others."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from omlxd.daemon.bodies import Body, problem_of, told_by
from omlxd.daemon.request import MAX_STOPS

MOST_ANSWERS = 64
"""Prompts times `n` of one request."""
MOST_CHOICES = 16


class TextPart(Body):
    """One part of a message's content; only text is understood."""

    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(min_length=1)]


def plain(content: Content | None) -> str:
    """The content as one text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


class SystemMessage(Body):
    """What the model is told to be; `developer` is the newer word for it, which chat templates do not know."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        return {"role": "system", "content": plain(self.content)} | _named(self.name)


class UserMessage(Body):
    """What the user says."""

    role: Literal["user"]
    content: Content
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        return {"role": "user", "content": plain(self.content)} | _named(self.name)


def _json_object(text: str) -> str:
    try:
        if isinstance(json.loads(text or "{}"), dict):
            return text
    except (ValueError, RecursionError):
        pass
    raise PydanticCustomError("json_object", "must be a JSON object, written into a string")


class CalledFunction(Body):
    """Which function was called, with what."""

    name: Annotated[str, Field(min_length=1)]
    arguments: Annotated[str, AfterValidator(_json_object)]


class PastToolCall(Body):
    """A call that the model made earlier in the conversation."""

    id: str
    type: Literal["function"]
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates take it: with its arguments as an object."""
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments or "{}")}
        return {"id": self.id, "type": "function", "function": function}


class AssistantMessage(Body):
    """What the model said earlier."""

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[PastToolCall], Field(min_length=1)] | None = None
    name: str | None = None
    refusal: None = None

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls:
            raise problem_of("content", "must be there unless there are `tool_calls`")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        message: dict[str, Any] = {"role": "assistant", "content": plain(self.content)} | _named(self.name)
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


class ToolMessage(Body):
    """What a tool answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        message = {"role": "tool", "content": plain(self.content), "tool_call_id": self.tool_call_id}
        return message | _named(self.name)


ChatMessage = Annotated[
    Annotated[SystemMessage, Tag("as system")]
    | Annotated[SystemMessage, Tag("as developer")]
    | Annotated[UserMessage, Tag("as user")]
    | Annotated[AssistantMessage, Tag("as assistant")]
    | Annotated[ToolMessage, Tag("as tool")],
    told_by("role", ("system", "developer", "user", "assistant", "tool")),
]


def _named(name: str | None) -> dict[str, Any]:
    return {} if name is None else {"name": name}


class StreamOptions(Body):
    """How a stream is written."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


StopText = Annotated[str, Field(min_length=1)]


class AnswerBody(Body):
    """What both kinds of completion understand."""

    model: Annotated[str, Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
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
    def choices(self) -> int:
        """How many answers to each prompt."""
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        """Whether the stream ends with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatBody(AnswerBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @model_validator(mode="after")
    def _one_length(self) -> ChatBody:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise problem_of("max_completion_tokens", "differs from `max_tokens`; send one of them")
        return self

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
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None

    @model_validator(mode="after")
    def _bounded(self) -> CompletionBody:
        if len(self.prompts) * self.choices > MOST_ANSWERS:
            raise problem_of("n", f"times the number of prompts must be at most {MOST_ANSWERS}")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)
