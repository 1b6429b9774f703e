"""Messages and tools of a chat as OpenAI writes them, and as chat templates take them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from omlxd.daemon.bodies import MOST_CALLS, Body, problem_of, told_by


class TextPart(Body):
    """One part of a message's content; only text is understood."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, part: Any) -> Any:
        if isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind != "text":
            # One sentence, where the fields of the other kind would be complained of too.
            what = "images are" if kind in _IMAGES else "anything but text is"
            raise problem_of("type", f"can only be `text`: {what} not supported")
        return part


_IMAGES = frozenset({"image_url", "image", "input_image"})
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


MOST_LEVELS = 200
"""Of objects and lists within each other; as many as a body may have, and templates fail not far above."""


def _json_object(text: str) -> str:
    try:
        found = json.loads(text or "{}", parse_constant=_no_number)
        json.dumps(found, ensure_ascii=False).encode()  # not with half of a surrogate pair
        if isinstance(found, dict) and not _is_deep(found):
            return text
    except (ValueError, RecursionError):
        pass
    raise PydanticCustomError(
        "json_object",
        "must be a JSON object, written into a string, of whole characters and at most {levels} levels",
        {"levels": MOST_LEVELS},
    )


def _no_number(word: str) -> float:
    raise ValueError(word)  # `NaN` and its like are not JSON


def _is_deep(found: Any) -> bool:
    levels, level = 0, [found]
    while level := [each for each in level if isinstance(each, dict | list)]:
        levels += 1
        if levels > MOST_LEVELS:
            return True
        level = [value for each in level for value in (each.values() if isinstance(each, dict) else each)]
    return False


class CalledFunction(Body):
    """Which function was called, with what."""

    name: Annotated[str, Field(min_length=1)]
    arguments: Annotated[str, AfterValidator(_json_object)]
    parsed_arguments: Any = None  # a copy that the `openai` package adds to what it was streamed, and sends back


class PastToolCall(Body):
    """A call that the model made earlier in the conversation."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None  # of the stream that it came in

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates take it: with its arguments as an object."""
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments or "{}")}
        return {"id": self.id, "type": "function", "function": function}


class AssistantMessage(Body):
    """What the model said earlier; the last fields are empty in our answers, and clients send answers back whole."""

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[PastToolCall], Field(min_length=1, max_length=MOST_CALLS)] | None = None
    name: str | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    parsed: None = None

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls:
            raise problem_of("content", "must be there unless there are `tool_calls`")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        message: dict[str, Any] = {"role": "assistant", "content": plain(self.content)} | _named(self.name)
        if (reasoning := self.reasoning_content or self.reasoning) is not None:
            message["reasoning_content"] = reasoning
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
