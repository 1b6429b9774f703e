"""`response_format`, `tools` and `tool_choice` as OpenAI writes them, and the form of an answer that they ask for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from omlxd.core.answer_form import ANY_OBJECT, AnswerForm
from omlxd.daemon.bodies import Body, JsonObject, told_by

SCHEMA_FIELD = "response_format.json_schema.schema"


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Body):
    """A JSON Schema; answers are held to it whether or not it is `strict`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonSchemaFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("as text")]
    | Annotated[JsonObjectFormat, Tag("as json_object")]
    | Annotated[JsonSchemaFormat, Tag("as json_schema")],
    told_by("type", ("text", "json_object", "json_schema")),
]


def schema_of(response_format: ResponseFormat | None) -> str | None:
    """The schema that an answer in this format follows, as JSON; None for any text."""
    if isinstance(response_format, JsonSchemaFormat) and response_format.json_schema.schema_ is not None:
        return json.dumps(response_format.json_schema.schema_)
    return None if response_format is None or isinstance(response_format, TextFormat) else ANY_OBJECT


class OfferedFunction(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: OfferedFunction

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class FunctionName(Body):
    """Which function."""

    name: str


class NamedTool(Body):
    """One of `tools`."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    """Some of `tools`, and whether one of them has to be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedToolsChoice(Body):
    """Only some of `tools`."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _kind_of_choice(choice: Any) -> str | None:
    kind = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", None)
    if isinstance(choice, str):
        return "as word" if choice in ("none", "auto", "required") else None
    return f"as {kind}" if isinstance(kind, str) else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("as word")]
    | Annotated[NamedTool, Tag("as function")]
    | Annotated[AllowedToolsChoice, Tag("as allowed_tools")],
    Discriminator(
        _kind_of_choice,
        custom_error_type="tool_choice",
        custom_error_message="must be `none`, `auto`, `required`, or an object that names a function of `tools`",
    ),
]


def chosen_names(choice: ToolChoice | None) -> tuple[str, ...]:
    """The functions that the choice names."""
    match choice:
        case NamedTool():
            return (choice.function.name,)
        case AllowedToolsChoice():
            return tuple(tool.function.name for tool in choice.allowed_tools.tools)
    return ()


def must_call(choice: ToolChoice | None) -> bool:
    """Whether the answer is nothing but calls."""
    if isinstance(choice, AllowedToolsChoice):
        return choice.allowed_tools.mode == "required"
    return isinstance(choice, NamedTool) or choice == "required"


def answer_form(
    response_format: ResponseFormat | None,
    tools: Sequence[Tool],
    choice: ToolChoice | None,
    parallel: bool | None,
) -> AnswerForm:
    """What the answer is held to."""
    names = chosen_names(choice)
    allowed = [] if choice == "none" else [tool for tool in tools if not names or tool.function.name in names]
    if must_call(choice) or names:
        param = "tool_choice"
    elif allowed:
        param = "parallel_tool_calls" if parallel is False else "tools"
    else:
        param = "response_format"
    return AnswerForm(
        schema=schema_of(response_format),
        tools=tuple(tool.model_dump(exclude_none=True) for tool in allowed),
        must_call=must_call(choice),
        one_call=isinstance(choice, NamedTool) or parallel is False,
        param=param,
    )
