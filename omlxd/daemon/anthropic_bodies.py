"""Bodies of the Anthropic-style routes: the fields that are understood, and what chat templates make of them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_validator

from omlxd.core.answer_form import AnswerForm
from omlxd.daemon.bodies import MOST_CALLS, MOST_MESSAGES, MOST_TOOLS, Body, JsonObject, StopText, problem_of, told_by
from omlxd.daemon.wish import MAX_STOPS


class CacheControl(Body):
    """Where a client would like a prompt to be cached; omlxd caches what prompts begin with by itself."""

    type: Literal["ephemeral"]
    ttl: str | None = None
    scope: str | None = None


class TextBlock(Body):
    """Text of a message, of the system prompt or of a tool's result."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: None = None


Texts = str | Annotated[list[TextBlock], Field(min_length=1)]


def plain(content: Texts | None) -> str:
    """The content as one text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content)


class ToolResultBlock(Body):
    """What a tool answered; chat templates know no failed results, so the text says it."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None

    def for_template(self) -> dict[str, Any]:
        """The result as chat templates take it."""
        text = ("Error: " if self.is_error else "") + plain(self.content)
        return {"role": "tool", "content": text, "tool_call_id": self.tool_use_id}


class ToolUseBlock(Body):
    """A call that the model made earlier."""

    type: Literal["tool_use"]
    id: str
    name: Annotated[str, Field(min_length=1)]
    input: JsonObject
    cache_control: CacheControl | None = None
    caller: None = None  # as in the answers of the `anthropic` package, which people send back whole
    toolset_name: None = None


class ThinkingBlock(Body):
    """What the model reasoned earlier; its signature says nothing to omlxd."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Body):
    """What another model reasoned in secret earlier in the conversation; nobody here can read it."""

    type: Literal["redacted_thinking"]
    data: str


UserBlock = Annotated[
    Annotated[TextBlock, Tag("as text")] | Annotated[ToolResultBlock, Tag("as tool_result")],
    told_by("type", ("text", "tool_result")),
]
AssistantBlock = Annotated[
    Annotated[TextBlock, Tag("as text")]
    | Annotated[ToolUseBlock, Tag("as tool_use")]
    | Annotated[ThinkingBlock, Tag("as thinking")]
    | Annotated[RedactedThinkingBlock, Tag("as redacted_thinking")],
    told_by("type", ("text", "tool_use", "thinking", "redacted_thinking")),
]


class UserTurn(Body):
    """What the user says, and what tools answered."""

    role: Literal["user"]
    content: str | Annotated[list[UserBlock], Field(min_length=1)]

    def for_template(self) -> list[dict[str, Any]]:
        """The turn as chat templates take it: each result is a message of its own, in order."""
        if isinstance(self.content, str):
            return [{"role": "user", "content": self.content}]
        messages: list[dict[str, Any]] = []
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                messages.append(block.for_template())
            elif messages and messages[-1]["role"] == "user":
                messages[-1]["content"] += "\n" + block.text
            else:
                messages.append({"role": "user", "content": block.text})
        return messages


class AssistantTurn(Body):
    """What the model said earlier."""

    role: Literal["assistant"]
    content: str | Annotated[list[AssistantBlock], Field(min_length=1)]

    def for_template(self) -> list[dict[str, Any]]:
        """The turn as chat templates take it."""
        if isinstance(self.content, str):
            return [{"role": "assistant", "content": self.content}]
        texts = [block.text for block in self.content if isinstance(block, TextBlock)]
        message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
        if thoughts := [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls := [block for block in self.content if isinstance(block, ToolUseBlock)]:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
                for call in calls
            ]
        return [message]


Turn = Annotated[
    Annotated[UserTurn, Tag("as user")] | Annotated[AssistantTurn, Tag("as assistant")],
    told_by("role", ("user", "assistant")),
]


class ToolOffer(Body):
    """A tool that the model may call."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # a call comes whole anyway
    defer_loading: Literal[False] | None = None
    cache_control: CacheControl | None = None

    def for_form(self) -> dict[str, Any]:
        """The tool as forms of answers take it."""
        offered = self.for_template()
        return {**offered, "function": {**offered["function"], "strict": bool(self.strict)}}

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.input_schema}}


class ToolChoice(Body):
    """Whether the model may call tools or has to, and which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_a_tool(self) -> ToolChoice:
        if (self.type == "tool") is not (self.name is not None):
            raise problem_of("name", "belongs to the type `tool`, which needs it")
        return self

    @property
    def must_call(self) -> bool:
        """Whether the answer is nothing but calls."""
        return self.type in ("any", "tool")


class JsonFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[JsonObject, Field(alias="schema")]


class OutputConfig(Body):
    """How the answer is written, and how much effort to spend on it, of which there is no such thing here."""

    format: JsonFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Thinking(Body):
    """Whether the model is to reason first, where its chat template knows how; there is no budget but `max_tokens`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized"] | None = None  # reasoning is told in full


class ClearThinking(Body):
    """The one edit of a context that changes nothing."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Body):
    """What to cut out of a long conversation; omlxd cuts out nothing."""

    edits: list[ClearThinking] | None = None


class Metadata(Body):
    """A note for whoever keeps records; omlxd keeps none."""

    user_id: str | None = None


class CountBody(Body):
    """POST /v1/messages/count_tokens."""

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MOST_MESSAGES)]
    system: Texts | None = None
    tools: Annotated[list[ToolOffer], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    output_config: OutputConfig | None = None

    @model_validator(mode="after")
    def _calls_that_can_be_read(self) -> CountBody:
        blocks = [block for turn in self.messages if isinstance(turn.content, list) for block in turn.content]
        if (calls := sum(isinstance(block, ToolUseBlock) for block in blocks)) > MOST_CALLS:
            raise problem_of("messages", f"must have at most {MOST_CALLS} uses of tools, and have {calls}")
        return self

    @model_validator(mode="after")
    def _tool_to_call(self) -> CountBody:
        choice, names = self.tool_choice, [tool.name for tool in self.tools or ()]
        if choice is not None and choice.must_call and not names:
            raise problem_of("tool_choice", "needs `tools`")
        if choice is not None and choice.name not in (None, *names):
            raise problem_of("tool_choice.name", "is not one of `tools`")
        return self

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """The conversation as chat templates take it."""
        system = [] if self.system is None else [{"role": "system", "content": plain(self.system)}]
        return [*system, *(message for turn in self.messages for message in turn.for_template())]

    @property
    def offered_tools(self) -> tuple[dict[str, Any], ...]:
        """The tools that the model may call, as chat templates take them."""
        if self.tool_choice is not None and self.tool_choice.type == "none":
            return ()
        return tuple(tool.for_template() for tool in self.tools or ())

    @property
    def thinks(self) -> bool | None:
        """Whether the model is to reason first; None for its template's way."""
        if self.thinking is None or self.thinking.type == "adaptive":
            return None
        return self.thinking.type == "enabled"


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31)]
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31)] | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    @model_validator(mode="after")
    def _answers_behind_its_thinking(self) -> MessagesBody:
        budget = self.thinking.budget_tokens if self.thinking is not None else None
        if budget is not None and budget >= self.max_tokens:
            raise problem_of("thinking.budget_tokens", "must be less than `max_tokens`, which counts the thinking too")
        return self

    @property
    def form(self) -> AnswerForm:
        """What the answer is held to."""
        choice, tools = self.tool_choice or ToolChoice(type="auto"), self.tools or ()
        named = [tool for tool in tools if choice.type != "none" and choice.name in (None, tool.name)]
        written = self.output_config.format if self.output_config is not None else None
        param = "tool_choice" if choice.must_call or choice.disable_parallel_tool_use else "tools"
        return AnswerForm(
            schema=None if written is None else json.dumps(written.schema_),
            tools=tuple(tool.for_form() for tool in named),
            must_call=choice.must_call,
            one_call=bool(choice.disable_parallel_tool_use) or choice.type == "tool",
            param=param if named else "output_config",
        )

    @property
    def tool_fields(self) -> dict[str, str]:
        """By a tool's name: the field that its schema is in."""
        return {tool.name: f"tools[{at}].input_schema" for at, tool in enumerate(self.tools or ())}
