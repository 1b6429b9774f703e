"""The Anthropic-style API, through the `anthropic` package over TCP and by hand, streamed and whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest

from omlxd.core.errors import InvalidRequest
from omlxd.core.reply import REASONING
from omlxd.daemon import listening
from omlxd.daemon.anthropic_bodies import CountBody, MessagesBody
from omlxd.daemon.bodies import parse_body
from omlxd.engine.orders import MIB
from tests.daemon.test_chat_replies import CALL, cut, saying
from tests.fakes.daemon import RunningDaemon, running
from tests.fakes.engine import FakeEngine

MODELS = {"chat": {"mib": 10}}
PATH = "/v1/messages"
HELLO: Any = [{"role": "user", "content": "how is the weather in Bern"}]
TOOLS: Any = [{"name": "weather", "description": "tells it", "input_schema": {"type": "object"}}]
ASKED: Any = {"model": "chat", "max_tokens": 100, "messages": HELLO}


@asynccontextmanager
async def client(daemon: RunningDaemon, key: str = "none") -> AsyncIterator[anthropic.AsyncAnthropic]:
    base = f"http://{daemon.ready.api}"
    async with anthropic.AsyncAnthropic(base_url=base, api_key=key, max_retries=0, timeout=20) as made:
        yield made


def events(body: bytes) -> list[Any]:
    """The data of each event; its `type` is the event's name."""
    found = []
    for block in body.decode().strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def test_the_anthropic_client_lists_the_models(tmp_path: Path) -> None:
    models = {"chat": {"mib": 10, "aliases": ["default"]}, "small": {"mib": 10}}
    async with running(tmp_path, models) as daemon, client(daemon) as api:
        listed = [model async for model in api.models.list()]
        assert [(model.type, model.id, model.display_name) for model in listed] == [
            ("model", name, name) for name in ("chat", "default", "small")
        ]
        assert (await api.models.retrieve("default")).created_at == listed[0].created_at
        page = await api.models.list()
        assert (page.has_more, page.first_id, page.last_id) == (False, "chat", "small")
        assert [model.id async for model in api.models.list(limit=1)] == ["chat", "default", "small"]
        assert [model.id async for model in api.models.list(limit=1, before_id="small")] == ["default", "chat"]
        with pytest.raises(anthropic.BadRequestError, match="`after_id`: is not the id of a model here"):
            await api.models.list(after_id="nobody")
    async with running(tmp_path, {}) as daemon, client(daemon) as api:
        assert [model async for model in api.models.list()] == []


async def test_the_anthropic_client_gets_a_whole_message(tmp_path: Path) -> None:
    async with running(tmp_path, MODELS) as daemon, client(daemon) as api:
        message = await api.messages.create(**ASKED, system="be brief")
        assert (message.type, message.role, message.model, message.id[:4]) == ("message", "assistant", "chat", "msg_")
        (block,) = message.content
        assert block.type == "text"
        assert block.text.split() == [f"tok{number}" for number in range(8)]
        assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
        assert (message.usage.input_tokens, message.usage.output_tokens) == (3 + 7, 8)


async def test_thinking_takes_less_than_the_whole_answer(tmp_path: Path) -> None:
    async with running(tmp_path, MODELS) as daemon, client(daemon) as api:
        asked: Any = ASKED | {"max_tokens": 1024}
        with pytest.raises(anthropic.BadRequestError, match="must be less than `max_tokens`"):
            await api.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 1024})
        # A model that cannot reason answers all the same: agents ask every model for it.
        message = await api.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 1023})
        assert [block.type for block in message.content] == ["text"]


@pytest.mark.parametrize(
    ("more", "reason", "sequence"),
    [
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["tok5", "tok4"]}, "stop_sequence", "tok4"),
        ({}, "end_turn", None),
    ],
)
async def test_a_message_says_why_it_ended(
    tmp_path: Path, more: dict[str, Any], reason: str, sequence: str | None
) -> None:
    async with running(tmp_path, MODELS) as daemon:
        whole = (await daemon.ask("POST", PATH, {**ASKED, **more})).json
        assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
        told = events((await daemon.ask("POST", PATH, {**ASKED, **more, "stream": True})).body)
        assert told[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


async def test_the_events_of_a_stream_come_in_order(tmp_path: Path) -> None:
    engine = saying("<think>", "hm", "</think>", "I'll ", "look.", "\n", *cut(CALL), "\n", *cut(CALL))
    async with running(tmp_path, MODELS, engine=engine) as daemon:
        answer = await daemon.ask("POST", PATH, {**ASKED, "tools": TOOLS, "stream": True})
        told = [each for each in events(answer.body) if each["type"] != "ping"]
        assert (told[0]["type"], told[-2]["type"], told[-1]["type"]) == (
            "message_start",
            "message_delta",
            "message_stop",
        )
        blocks = [each["content_block"]["type"] for each in told if each["type"] == "content_block_start"]
        assert blocks == ["thinking", "text", "tool_use", "tool_use"]
        opened: list[int] = []
        for each in told[1:-2]:
            kind, index = each["type"].removeprefix("content_block_"), each["index"]
            if kind == "start":
                assert (opened, index) == ([], max((e["index"] for e in told[1 : told.index(each)]), default=-1) + 1)
                opened.append(index)
            else:
                assert opened == [index]
                if kind == "stop":
                    opened.clear()
        assert opened == []
        assert told[-2]["usage"]["output_tokens"] == len(engine.script)


async def test_the_anthropic_client_holds_a_streamed_conversation_with_a_tool_call(tmp_path: Path) -> None:
    engine = saying("I'll ", "look.", "\n", *cut(CALL))
    async with running(tmp_path, MODELS, engine=engine) as daemon, client(daemon) as api:
        async with api.messages.stream(**ASKED, tools=TOOLS) as stream:
            first = await stream.get_final_message()
        text, call = first.content
        assert (text.type, call.type, first.stop_reason) == ("text", "tool_use", "tool_use")
        assert call.type == "tool_use"
        assert (call.name, call.input) == ("weather", {"city": "Bern"})
        engine.script = ("It ", "is ", "sunny.")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny", "is_error": False}
        messages: Any = [
            *HELLO,
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
            {"role": "user", "content": [result]},
        ]
        async with api.messages.stream(model="chat", max_tokens=100, messages=messages, tools=TOOLS) as stream:
            assert "".join([piece async for piece in stream.text_stream]) == "It is sunny."


async def test_reasoning_is_a_thinking_block(tmp_path: Path) -> None:
    async with running(tmp_path, MODELS, engine=saying(*cut("hm</think>Yes."), start=REASONING)) as daemon:
        message = (await daemon.ask("POST", PATH, ASKED)).json
        assert [block["type"] for block in message["content"]] == ["thinking", "text"]
        assert (message["content"][0]["thinking"], message["content"][1]["text"]) == ("hm", "Yes.")


async def test_a_stream_that_waits_for_its_model_is_pinged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HEARTBEAT_S", 0.02)
    engine = FakeEngine("thread", slice_bytes=MIB, step_s=0.05)
    async with running(tmp_path, MODELS, engine=engine) as daemon:
        told = events((await daemon.ask("POST", PATH, {**ASKED, "max_tokens": 2, "stream": True})).body)
        kinds = [each["type"] for each in told]
        assert kinds[0] == "message_start"
        assert "ping" in kinds[1 : kinds.index("content_block_start")]


async def test_tokens_are_counted_as_they_are_charged_and_nothing_is_loaded(tmp_path: Path) -> None:
    engine = saying("ok")
    async with running(tmp_path, MODELS, engine=engine) as daemon, client(daemon) as api:
        counted = await api.messages.count_tokens(model="chat", messages=HELLO, system="be brief", tools=TOOLS)
        assert daemon.engine.loaded == set()
        charged = await api.messages.create(**ASKED, system="be brief", tools=TOOLS)
        assert counted.input_tokens == charged.usage.input_tokens == 3 + 7 + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "status", "kind"),
    [
        ({"model": "chatt"}, 404, "not_found_error"),
        ({"model": "huge"}, 507, "api_error"),
        ({"max_tokens": 0}, 400, "invalid_request_error"),
        ({"tools": TOOLS}, 400, "invalid_request_error"),
    ],
)
async def test_errors_have_anthropics_shape(
    tmp_path: Path, stream: bool, change: dict[str, Any], status: int, kind: str
) -> None:
    async with running(tmp_path, {**MODELS, "huge": {"mib": 101}}) as daemon, client(daemon) as api:
        with pytest.raises(anthropic.APIStatusError) as refused:
            await api.messages.create(**{**ASKED, **change}, stream=stream)
        assert refused.value.status_code == status
        body: Any = refused.value.body
        assert (body["type"], body["error"]["type"]) == ("error", kind)


async def test_an_error_in_the_stream_is_its_last_event(tmp_path: Path) -> None:
    endless = FakeEngine("thread", answer_tokens=None, context_length=10**9, step_s=0.002)
    async with running(tmp_path, MODELS, engine=endless) as daemon, client(daemon) as api:
        stream = await api.messages.create(**{**ASKED, "max_tokens": 10**6}, stream=True)

        async def read_and_unload() -> None:
            async for each in stream:
                if each.type == "content_block_delta":
                    await daemon.control("POST", "models/chat/unload", {"now": True})

        with pytest.raises(anthropic.APIStatusError, match="aborted"):
            await read_and_unload()


async def test_the_key_is_taken_as_anthropics_clients_send_it(tmp_path: Path) -> None:
    async with running(tmp_path, MODELS, api={"api_key": "sesame-open-now"}) as daemon:
        async with client(daemon, "wrong") as api:
            with pytest.raises(anthropic.AuthenticationError):
                await api.messages.create(**ASKED)
        async with client(daemon, "sesame-open-now") as api:
            assert (await api.messages.create(**ASKED)).content


async def test_a_client_that_goes_away_ends_its_request(tmp_path: Path) -> None:
    endless = FakeEngine("thread", answer_tokens=None, context_length=10**9, step_s=0.002)
    async with running(tmp_path, MODELS, engine=endless) as daemon, client(daemon) as api:
        async with api.messages.stream(**{**ASKED, "max_tokens": 10**6}) as stream:
            async for _ in stream.text_stream:
                break
        async with asyncio.timeout(20):
            while (await daemon.control("GET", "requests"))["requests"]:
                pass


def body(**change: Any) -> MessagesBody:
    return parse_body(json.dumps({**ASKED, **change}).encode(), MessagesBody)


TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("change", "allowed", "must_call", "one_call", "param"),
    [
        ({}, ["f", "g"], False, False, "tools"),
        ({"tool_choice": {"type": "none"}}, [], False, False, "output_config"),
        ({"tool_choice": {"type": "any"}}, ["f", "g"], True, False, "tool_choice"),
        ({"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}, ["f", "g"], True, True, "tool_choice"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, ["f", "g"], False, True, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "g"}}, ["g"], True, True, "tool_choice"),
    ],
)
def test_a_choice_says_which_tools_are_used(
    change: dict[str, Any], allowed: list[str], must_call: bool, one_call: bool, param: str
) -> None:
    form = body(tools=[TOOL, {**TOOL, "name": "g", "strict": True}], **change).form
    assert [tool["function"]["name"] for tool in form.tools] == allowed
    assert (form.must_call, form.one_call, form.param) == (must_call, one_call, param)
    assert form.strict_tools is ("g" in allowed)


def turn(role: str, **block: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}]}


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"max_tokens": None}, "max_tokens", "integer"),
        ({"messages": []}, "messages", "must not be empty"),
        ({"messages": HELLO * 16_385}, "messages", "at most 16384"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role", "`user`, `assistant`"),
        (turn("user", type="image", source={}), "messages[0].content[0].type", "`text`, `tool_result`"),
        (
            turn("assistant", type="tool_use", id="1", name="x", input="SECRET"),
            "messages[0].content[0].input",
            "an object",
        ),
        ({"system": 5}, "system", "`system`"),
        ({"temperature": 1.5}, "temperature", "less than or equal to 1"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences", "at most 16"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema", "is missing"),
        ({"tools": [{"type": "bash_20250124", "name": "bash", "input_schema": {}}]}, "tools[0].type", "`custom`"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "needs `tools`"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice.name", "which needs it"),
        ({"tool_choice": {"type": "auto", "name": "f"}, "tools": [TOOL]}, "tool_choice.name", "belongs to"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "tool_choice.name", "not one of"),
        ({"tools": [{**TOOL, "input_schema": {"const": float("nan")}}]}, "tools[0].input_schema", "must be JSON"),
        ({"tool_choice": {"type": "must"}}, "tool_choice.type", "must be one of `auto`, `any`, "),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "is missing"),
        ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format.type", "json_schema"),
        ({"top_logprobs": 3}, "top_logprobs", "is not a field"),
        ({"container": "x"}, "container", "is not a field"),
    ],
)
def test_a_wrong_field_of_a_message_is_named(change: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        body(**change)
    assert refused.value.details["param"] == param
    assert words in refused.value.message
    assert "SECRET" not in refused.value.message


def test_turns_become_messages_in_order() -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "no"}], "is_error": True}
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}
    asked = body(
        system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, use]},
            {"role": "user", "content": [result, {"type": "text", "text": "so"}, {"type": "text", "text": "what"}]},
        ],
    )
    function = {"name": "f", "arguments": {"a": 1}}
    assert asked.for_template == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "Error: no", "tool_call_id": "1"},
        {"role": "user", "content": "so\nwhat"},
    ]


@pytest.mark.parametrize(("kind", "thinks"), [("enabled", True), ("disabled", False), ("adaptive", None)])
def test_thinking_is_asked_for_or_left_to_the_template(kind: str, thinks: bool | None) -> None:
    counted = parse_body(json.dumps({"model": "m", "messages": HELLO, "thinking": {"type": kind}}).encode(), CountBody)
    assert counted.thinks is thinks


CLAUDE_CODE: Any = {
    "model": "chat",
    "max_tokens": 100,
    "stream": True,
    "temperature": 1,
    "metadata": {"user_id": "user_0_account__session_1"},
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "system": [
        {"type": "text", "text": "You are a coding agent."},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}},
    ],
    "tools": [{**TOOLS[0], "eager_input_streaming": True, "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>It is Monday.</system-reminder>"},
                {"type": "text", "text": "What is the weather?", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "opaque"},
                {"type": "thinking", "thinking": "hm", "signature": "sig"},
                {"type": "text", "text": "Let me look.", "citations": None},
                {"type": "tool_use", "id": "toolu_01", "name": "weather", "input": {"city": "Bern"}, "caller": None},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_01", "content": "sunny"}]},
    ],
}
"""What a coding agent of Anthropic's make sends, with all that it adds by itself."""


async def test_a_coding_agent_is_answered_and_its_prompt_counted(tmp_path: Path) -> None:
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
        "x-app": "cli",
    }
    async with running(tmp_path, MODELS, engine=saying("It ", "is ", "sunny.")) as daemon:
        answer = await daemon.ask("POST", f"{PATH}?beta=true", CLAUDE_CODE, headers)
        assert answer.status == 200, answer.body
        told = events(answer.body)
        assert (
            "".join(each["delta"]["text"] for each in told if each["type"] == "content_block_delta") == "It is sunny."
        )
        counts = {key: CLAUDE_CODE[key] for key in ("model", "messages", "system", "tools", "thinking")}
        counted = await daemon.ask("POST", f"{PATH}/count_tokens?beta=true", counts, headers)
        usage = told[-2]["usage"]
        assert counted.json["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"] > 0


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"speed": "fast"}, "speed"),
    ],
)
def test_what_a_coding_agent_may_ask_and_cannot_get_is_named(change: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        body(**{**CLAUDE_CODE, **change})
    assert str(refused.value.details["param"]).startswith(param)
