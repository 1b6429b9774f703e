"""Answers held to a form, by the real clients against a real daemon with random models, which say nothing by design."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from omlxd.engine.model_folders import write_json
from tests.acceptance.harness import Daemon
from tests.engine.test_chat_templates import TEMPLATE

pytestmark = pytest.mark.mlx

HELLO: Any = [{"role": "user", "content": "How is the weather?"}]
RANDOM: Any = {"temperature": 1, "max_tokens": 800}


class Pet(BaseModel):
    """What the answer is parsed into."""

    model_config = ConfigDict(extra="forbid")  # else a random model adds properties without end
    name: str = Field(max_length=8)
    kind: Literal["cat", "dog"]
    ages: list[int] = Field(max_length=3)


class Weather(BaseModel):
    """Ask for the weather."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Bern", "Basel"]
    days: int


NOTHING: Any = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: list[Any] = [
    openai.pydantic_function_tool(Weather, name="weather"),
    {"type": "function", "function": {"name": "now", "parameters": {**NOTHING, "not": {"type": "null"}}}},
]


@pytest.fixture(scope="module")
def daemon(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all tests here: `chat` knows tools, `plain` does not; it has to end with 0."""
    plain = tiny_model("llama", 1_000_000, seed=4)
    chat = tmp_path_factory.mktemp("forms") / "chat"
    shutil.copytree(plain, chat)
    config = json.loads((chat / "tokenizer_config.json").read_text())
    write_json(chat / "tokenizer_config.json", {**config, "chat_template": TEMPLATE})
    with Daemon({"chat": {"path": chat, "ttl": "1h"}, "plain": {"path": plain}, "unused": {"path": plain}}) as made:
        yield made


def test_the_openai_client_parses_what_a_random_model_says(openai_client: openai.OpenAI) -> None:
    answer = openai_client.chat.completions.parse(
        model="plain", messages=HELLO, response_format=Pet, n=2, seed=1, **RANDOM
    )
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 2
    assert all(isinstance(choice.message.parsed, Pet) for choice in answer.choices)
    assert len({choice.message.content for choice in answer.choices}) > 1


def test_a_streamed_answer_follows_its_schema_too(openai_client: openai.OpenAI) -> None:
    with openai_client.chat.completions.stream(
        model="plain", messages=HELLO, response_format=Pet, seed=2, **RANDOM
    ) as stream:
        deltas = sum(event.type == "content.delta" for event in stream)
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Pet)
    assert deltas > 5


def test_any_json_object_and_json_of_a_plain_completion(openai_client: openai.OpenAI) -> None:
    properties = {"n": {"type": "integer", "minimum": 0, "maximum": 99}}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    text = openai_client.completions.create(
        model="plain", prompt="Once", seed=3, extra_body={"response_format": form}, **RANDOM
    ).choices[0]
    assert text.finish_reason == "stop"
    assert isinstance(json.loads(text.text), dict)
    options: Any = {"model": "plain", "messages": HELLO, "response_format": {"type": "json_object"}, "seed": 5}
    (whole,) = openai_client.chat.completions.create(**options, **RANDOM).choices
    assert isinstance(json.loads(str(whole.message.content)), dict)
    (cut,) = openai_client.chat.completions.create(**options, temperature=1, max_tokens=1).choices
    assert (cut.finish_reason, str(cut.message.content)) == ("length", "{")


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "now"}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]},
            },
            {"now"},
        ),
    ],
)
def test_a_random_model_calls_the_tools_that_it_has_to(
    openai_client: openai.OpenAI, choice: Any, names: set[str]
) -> None:
    options: Any = {"model": "chat", "messages": HELLO, "tools": TOOLS, "tool_choice": choice, "seed": 4, **RANDOM}
    answer = openai_client.chat.completions.create(parallel_tool_calls=False, **options)
    stream = openai_client.chat.completions.create(parallel_tool_calls=False, stream=True, **options)
    streamed = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
    assert len(streamed) == 1
    for given in answer.choices:
        assert (given.finish_reason, given.message.content) == ("tool_calls", None)
        (call,) = given.message.tool_calls or ()
        assert call.type == "function"
        assert call.function.name in names
        arguments = json.loads(call.function.arguments)
        assert isinstance(arguments, dict)
        if call.function.name == "weather":
            Weather.model_validate(arguments)


def test_the_openai_client_parses_a_strict_tool(openai_client: openai.OpenAI) -> None:
    answer = openai_client.chat.completions.parse(
        model="chat", messages=HELLO, tools=TOOLS[:1], tool_choice="required", parallel_tool_calls=False, **RANDOM
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Weather)


def test_the_anthropic_client_has_a_tool_called_and_json_written(anthropic_client: anthropic.Anthropic) -> None:
    schemas = {"weather": Weather.model_json_schema(), "now": NOTHING}
    tools: Any = [{"name": name, "input_schema": schema} for name, schema in schemas.items()]
    options: Any = {"model": "chat", "messages": HELLO, "max_tokens": 800, "tools": tools}
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}):
        whole = anthropic_client.messages.create(tool_choice=choice, **options)
        assert whole.stop_reason == "tool_use"
        (block,) = whole.content
        assert block.type == "tool_use"
        if block.name == "weather":
            Weather.model_validate(block.input)
    with anthropic_client.messages.stream(tool_choice={"type": "tool", "name": "weather"}, **options) as stream:
        (block,) = stream.get_final_message().content
    assert block.type == "tool_use"
    Weather.model_validate(block.input)
    written: Any = {"format": {"type": "json_schema", "schema": Pet.model_json_schema()}}
    (text,) = anthropic_client.messages.create(
        model="plain", messages=HELLO, max_tokens=800, output_config=written
    ).content
    assert text.type == "text"
    Pet.model_validate_json(text.text)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}},
            "response_format.json_schema.schema",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}],
            },
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_a_form_that_nobody_can_be_held_to_is_refused_before_a_model_is_loaded(
    daemon: Daemon, openai_client: openai.OpenAI, more: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            openai_client.chat.completions.create(model="unused", messages=HELLO, stream=stream, **more)
        assert refused.value.param == param
    assert daemon.states["unused"] == "unloaded"


def test_a_model_whose_calls_cannot_be_forced_says_so_by_the_fields_name(
    openai_client: openai.OpenAI, anthropic_client: anthropic.Anthropic
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        openai_client.chat.completions.create(
            model="plain", messages=HELLO, tools=TOOLS, tool_choice="required", stream=True
        )
    assert refused.value.param in ("tools", "tool_choice")
    with pytest.raises(anthropic.BadRequestError, match="tool"):
        anthropic_client.messages.create(
            model="plain",
            messages=HELLO,
            max_tokens=5,
            tools=[{"name": "f", "input_schema": {"type": "object"}}],
            tool_choice={"type": "any"},
        )


def test_a_request_has_its_model_unloaded_at_once_or_kept_no_longer_than_its_ttl(
    daemon: Daemon, openai_client: openai.OpenAI
) -> None:
    def left_s(keep_alive: Any) -> float:
        openai_client.chat.completions.create(
            model="chat", messages=HELLO, max_tokens=1, extra_body={"keep_alive": keep_alive}
        )
        daemon.until_idle()
        (model,) = [each for each in daemon.control("GET", "models")["models"] if each["name"] == "chat"]
        return float(model["ttl_left_s"])

    assert 3590 < left_s(-1) <= 3600
    assert 290 < left_s("5m") <= 300
    openai_client.chat.completions.create(model="plain", messages=HELLO, max_tokens=1, extra_body={"ttl": 0})
    daemon.until_event("unloaded", model="plain")
    assert daemon.states["chat"] == "loaded"
