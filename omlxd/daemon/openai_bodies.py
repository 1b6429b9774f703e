"""Bodies of the OpenAI-style routes: the fields that are understood, and no others."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from omlxd.core.answer_form import AnswerForm
from omlxd.daemon.bodies import MOST_CALLS, MOST_MESSAGES, MOST_TOOLS, Body, StopText, problem_of
from omlxd.daemon.keep_alive import KeepAlive
from omlxd.daemon.openai_forms import (
    AllowedToolsChoice,
    ResponseFormat,
    Tool,
    ToolChoice,
    answer_form,
    chosen_names,
    must_call,
)
from omlxd.daemon.openai_messages import AssistantMessage, ChatMessage
from omlxd.daemon.wish import MAX_STOPS, MAX_TOP_LOGPROBS

MOST_ANSWERS = 64
"""Prompts times `n` of one request."""
MOST_CHOICES = 16


class StreamOptions(Body):
    """How a stream is written."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


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
    response_format: ResponseFormat | None = None
    keep_alive: KeepAlive | None = None
    ttl: KeepAlive | None = None

    @model_validator(mode="after")
    def _one_idle_time(self) -> AnswerBody:
        if self.keep_alive is not None and self.ttl not in (None, self.keep_alive):
            raise problem_of("ttl", "differs from `keep_alive`; send one of them")
        return self

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
    def idle_s(self) -> float | None:
        """Seconds that the model is to be kept after this request, infinite for no end; None for its own `ttl`."""
        return self.ttl if self.keep_alive is None else self.keep_alive

    @property
    def form(self) -> AnswerForm:
        """What the answers are held to."""
        return answer_form(self.response_format, (), None, None)

    @property
    def tool_fields(self) -> dict[str, str]:
        """By a tool's name: the field that its parameters are in."""
        return {}

    @property
    def includes_usage(self) -> bool:
        """Whether the stream ends with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class TemplateOptions(Body):
    """What chat templates can be told beside the messages."""

    enable_thinking: bool | None = None


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
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    verbosity: Literal["medium"] | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    chat_template_kwargs: TemplateOptions | None = None

    @model_validator(mode="after")
    def _likeliest_of_what(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise problem_of("top_logprobs", "needs `logprobs` to be true")
        return self

    @model_validator(mode="after")
    def _calls_that_can_be_read(self) -> ChatBody:
        calls = sum(len(each.tool_calls or ()) for each in self.messages if isinstance(each, AssistantMessage))
        if calls > MOST_CALLS:
            raise problem_of("messages", f"must have at most {MOST_CALLS} calls of tools, and have {calls}")
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

    @model_validator(mode="after")
    def _one_way_to_think(self) -> ChatBody:
        thinking = self.chat_template_kwargs and self.chat_template_kwargs.enable_thinking
        if None not in (thinking, self.reasoning_effort) and thinking is (self.reasoning_effort == "none"):
            raise problem_of("reasoning_effort", "contradicts `chat_template_kwargs.enable_thinking`")
        return self

    @model_validator(mode="after")
    def _tool_to_call(self) -> ChatBody:
        if must_call(self.tool_choice) and not self.tools:
            raise problem_of("tool_choice", "needs `tools`")
        names = [tool.function.name for tool in self.tools or ()]
        if not set(chosen_names(self.tool_choice)) <= set(names):
            raise problem_of("tool_choice", "names a function that is not in `tools`")
        return self

    @property
    def offered_tools(self) -> tuple[dict[str, Any], ...]:
        """The tools that the model is told of, as chat templates take them."""
        if self.tool_choice == "none":
            return ()
        allowed = chosen_names(self.tool_choice) if isinstance(self.tool_choice, AllowedToolsChoice) else None
        tools = self.tools or ()
        return tuple(tool.for_template() for tool in tools if allowed is None or tool.function.name in allowed)

    @property
    def tool_fields(self) -> dict[str, str]:
        """By a tool's name: the field that its parameters are in."""
        return {tool.function.name: f"tools[{at}].function.parameters" for at, tool in enumerate(self.tools or ())}

    @property
    def form(self) -> AnswerForm:
        """What the answers are held to."""
        return answer_form(self.response_format, self.tools or (), self.tool_choice, self.parallel_tool_calls)

    @property
    def thinking(self) -> bool | None:
        """Whether the model is to reason first; None for its template's way."""
        if self.reasoning_effort is not None:
            return self.reasoning_effort != "none"
        return self.chat_template_kwargs.enable_thinking if self.chat_template_kwargs is not None else None

    @property
    def reasoning_field(self) -> str | None:
        """The field that asks the model to reason first, if one does."""
        if not self.thinking:
            return None
        return "chat_template_kwargs.enable_thinking" if self.reasoning_effort is None else "reasoning_effort"

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
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: None = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    timings: bool | None = None

    @model_validator(mode="after")
    def _all_answers(self) -> CompletionBody:
        if self.best_of not in (None, self.choices):
            raise problem_of("best_of", "must be `n`: no answers are thrown away")
        return self

    @model_validator(mode="after")
    def _timings_of_a_stream(self) -> CompletionBody:
        if self.timings and not self.stream:
            raise problem_of("timings", "needs `stream` to be true")
        return self

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
