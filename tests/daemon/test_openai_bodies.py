"""What is wrong with a body of the OpenAI-style API, one row each: the field is named, and what was sent not quoted."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from omlxd.core.errors import InvalidRequest
from omlxd.daemon.bodies import MOST_CALLS, MOST_NAMES, MOST_TOOLS, parse_body
from omlxd.daemon.openai_bodies import ChatBody, CompletionBody

HELLO: Any = [{"role": "user", "content": "hello there"}]
NAMED = {"type": "function", "function": {"name": "x"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def schema_format(**schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def tool_with(number: float) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"const": number}}}


def chat(**change: Any) -> ChatBody:
    return parse_body(json.dumps({"model": "chat", "messages": HELLO, **change}).encode(), ChatBody)


def completion(**change: Any) -> CompletionBody:
    return parse_body(json.dumps({"model": "chat", "prompt": "Once", **change}).encode(), CompletionBody)


def calling(**change: Any) -> dict[str, Any]:
    return {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{**CALL, **change}]}]}


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 17}, "n", "less than or equal to 16"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs `stream`"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "is not a field"),
        ({"max_token": 3}, "max_token", "is not a field"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": "5"}, "max_tokens", "integer"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "send one of them"),
        ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"seed": 0.5}, "seed", "integer"),
        ({"seed": 2**70}, "seed", "`seed`"),
        ({"stop": [""]}, "stop", "1 to 4096 characters"),
        ({"stop": "x" * 4097}, "stop", "1 to 4096 characters"),
        ({"store": True}, "store", "can only be `false`"),
        ({"stop": ["x"] * 10_000}, "stop", "up to 16"),
        ({"stop": 4}, "stop", "a string"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"model": ""}, "model", "`model`"),
        ({"model": None}, "model", "`model`"),
        ({"store": True}, "store", "`store`"),
        ({"service_tier": "flex"}, "service_tier", "must be one of `auto`, `default`"),
        ({"modalities": ["audio"]}, "modalities[0]", "can only be `text`"),
        ({"top_k": -1}, "top_k", "greater than or equal to 0"),
        ({"min_p": 1.5}, "min_p", "less than or equal to 1"),
        ({"presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "greater than or equal to -2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
        ({"logit_bias": {"hello": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "between -100 and 100"),
        ({"logit_bias": {"1" * 10: 1}}, "logit_bias", "token ids"),
        ({"logprobs": 1}, "logprobs", "boolean"),
        ({"top_logprobs": 2}, "top_logprobs", "needs `logprobs`"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "can only be `function`"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "is missing"),
        ({"tool_choice": "required"}, "tool_choice", "needs `tools`"),
        ({"tool_choice": NAMED}, "tool_choice", "needs `tools`"),
        ({"tool_choice": NAMED, "tools": [{"type": "function", "function": {"name": "y"}}]}, "tool_choice", "not in"),
        ({"tool_choice": "always"}, "tool_choice", "must be `none`, `auto`, `required`, or an object"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice", "must be `none`, `auto`"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "is missing"),
        ({"tool_choice": allowed()}, "tool_choice.allowed_tools.tools", "must not be empty"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "`text`, `json_object`, `json_schema`"),
        ({"response_format": "json"}, "response_format.type", "`text`, `json_object`, `json_schema`"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
        (schema_format(name="a b", schema={}), "response_format.json_schema.name", "pattern"),
        (schema_format(name="a", schema=["SECRET"]), "response_format.json_schema.schema", "object"),
        ({"tools": [tool_with(float("nan"))]}, "tools[0].function.parameters", "must be JSON"),
        (schema_format(name="a", schema={"const": float("inf")}), "response_format.json_schema.schema", "must be JSON"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "must be one of `none`, `minimal`, "),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "reasoning_effort",
            "contradicts",
        ),
        ({"verbosity": "low"}, "verbosity", "can only be `medium`"),
        ({"keep_alive": "soon"}, "keep_alive", "a number of seconds, or a duration such as `5m`"),
        ({"keep_alive": True}, "keep_alive", "a number of seconds"),
        ({"keep_alive": "--5m"}, "keep_alive", "a number of seconds"),
        ({"ttl": {}}, "ttl", "a number of seconds"),
        ({"keep_alive": 5, "ttl": "6s"}, "ttl", "send one of them"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize", "is not a field"),
        ({"functions": []}, "functions", "is not a field"),
        ({"audio": {}}, "audio", "is not a field"),
        ({"messages": []}, "messages", "`messages`"),
        ({"messages": HELLO * 16_385}, "messages", "at most 16384"),
        ({"messages": "hi"}, "messages", "`messages`"),
        ({"messages": ["hi"]}, "messages[0].role", "must be one of"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "`system`, `developer`, `user`, `assistant`, `tool`"),
        ({"messages": [{"role": "SECRET", "content": "x"}]}, "messages[0].role", "must be one of"),
        ({"messages": [{"role": 4, "content": "x"}]}, "messages[0].role", "must be one of"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "is missing"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "must be a string"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "must be a string"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "be `text`",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
            "messages[0].tool_calls",
            "not a field",
        ),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content", "unless there are `tool_calls`"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].tool_calls", "must not be empty"),
        (calling(type="custom"), "messages[1].tool_calls[0].type", "can only be `function`"),
        (calling(function={"name": "f"}), "messages[1].tool_calls[0].function.arguments", "is missing"),
        (
            calling(function={"name": "f", "arguments": "[SECRET"}),
            "messages[1].tool_calls[0].function.arguments",
            "must be a JSON object",
        ),
        (
            calling(function={"name": "f", "arguments": "[" * 100_000}),
            "messages[1].tool_calls[0].function.arguments",
            "must be a JSON object",
        ),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(change: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(**change)
    assert refused.value.details["param"] == param
    assert words in refused.value.message
    assert "SECRET" not in refused.value.message


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"prompt": ""}, "prompt", "none of them empty"),
        ({"prompt": []}, "prompt", "a list of up to 64 strings"),
        ({"prompt": ["x", ""]}, "prompt", "none of them empty"),
        ({"prompt": ["x", 4]}, "prompt", "token ids"),
        ({"prompt": [[]]}, "prompt", "none of them empty"),
        ({"prompt": [1.5]}, "prompt", "token ids"),
        ({"prompt": ["x"] * 65}, "prompt", "up to 64"),
        ({"prompt": ["x"] * 5, "n": 16}, "n", "at most 64"),
        ({"echo": True}, "echo", "can only be `false`"),
        ({"best_of": 3}, "best_of", "`best_of`"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"suffix": "end"}, "suffix", "is not supported; leave it out"),
        ({"max_completion_tokens": 3}, "max_completion_tokens", "is not a field"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(change: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        completion(**change)
    assert refused.value.details["param"] == param
    assert words in refused.value.message


@pytest.mark.parametrize(
    ("kind", "words"),
    [("image_url", "images are not supported"), ("input_audio", "anything but text is not supported")],
)
def test_a_part_that_is_not_text_is_one_problem(kind: str, words: str) -> None:
    part = {"type": kind, kind: {"url": "data:,SECRET"}}
    with pytest.raises(InvalidRequest) as refused:
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}, part]}])
    assert refused.value.message == f"`messages[0].content[1].type`: can only be `text`: {words}"


def test_fields_that_clients_send_for_the_record_are_taken() -> None:
    record = {"user": "me", "metadata": {"run": "7"}, "safety_identifier": "x", "prompt_cache_key": "y"}
    assert chat(**record, store=False, service_tier="auto", response_format={"type": "text"}).user == "me"


def test_fields_that_are_null_count_as_left_out() -> None:
    body = chat(max_tokens=None, n=None, stream=None, stream_options=None, stop=None, seed=None, user=None)
    assert (body.length, body.choices, body.stops, body.includes_usage) == (None, 1, (), False)


def test_the_arguments_of_an_earlier_call_reach_the_template_as_an_object() -> None:
    body = chat(**calling(function={"name": "f", "arguments": '{"city": "Bern"}'}))
    (call,) = body.messages[1].for_template()["tool_calls"]
    assert call["function"]["arguments"] == {"city": "Bern"}


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_a_prompt_is_a_text_or_ids_or_several_of_either(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


TOOLS = [
    {"type": "function", "function": {"name": "a", "strict": True, "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "b"}},
]


@pytest.mark.parametrize(
    ("change", "told", "allowed", "must_call", "one_call", "param"),
    [
        ({}, "ab", "ab", False, False, "tools"),
        ({"tool_choice": "none"}, "", "", False, False, "response_format"),
        ({"tool_choice": "required"}, "ab", "ab", True, False, "tool_choice"),
        ({"tool_choice": "required", "parallel_tool_calls": False}, "ab", "ab", True, True, "tool_choice"),
        ({"parallel_tool_calls": False}, "ab", "ab", False, True, "parallel_tool_calls"),
        ({"tool_choice": {"type": "function", "function": {"name": "b"}}}, "ab", "b", True, True, "tool_choice"),
        ({"tool_choice": allowed("b", mode="required")}, "b", "b", True, False, "tool_choice"),
        ({"tool_choice": allowed("b")}, "b", "b", False, False, "tool_choice"),
    ],
)
def test_a_choice_says_which_tools_the_model_is_told_of_and_which_it_may_call(
    change: dict[str, Any], told: str, allowed: str, must_call: bool, one_call: bool, param: str
) -> None:
    body = chat(tools=TOOLS, **change)
    form = body.form
    assert "".join(tool["function"]["name"] for tool in body.offered_tools) == told
    assert "".join(tool["function"]["name"] for tool in form.tools) == allowed
    assert (form.must_call, form.one_call, form.param, form.schema) == (must_call, one_call, param, None)
    assert not any("strict" in tool["function"] for tool in body.offered_tools)


@pytest.mark.parametrize(
    ("sent", "seconds"),
    [(0, 0), ("0", 0), (90, 90), ("5m", 300), ("1h30m", 5400), (1.5, 1.5), (-1, math.inf), ("-1m", math.inf)],
)
def test_a_time_to_keep_the_model_is_read_as_ollama_reads_it(sent: Any, seconds: float) -> None:
    assert chat(keep_alive=sent).idle_s == completion(ttl=sent).idle_s == seconds


def called(count: int, arguments: str = "{}") -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call] * count}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * (MOST_TOOLS + 1)}, "tools"),
        ({"messages": [called(MOST_CALLS + 1)]}, "messages[0].tool_calls"),
        ({"messages": [called(MOST_CALLS // 2 + 1)] * 2}, "messages"),
    ],
)
def test_more_than_any_model_reads_is_refused(change: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match="must have at most") as refused:
        chat(**change)
    assert refused.value.details["param"] == param


@pytest.mark.parametrize(
    "arguments",
    ['{"a":' * 201 + "1" + "}" * 201, '{"a":' * 5000, '{"x": NaN}', '{"x": -Infinity}', '{"x": "\\ud800"}', "[]"],
)
def test_arguments_that_no_template_can_write_are_refused(arguments: str) -> None:
    with pytest.raises(InvalidRequest, match="must be a JSON object, written into a string") as refused:
        chat(messages=[called(1, arguments)])
    assert refused.value.details["param"] == "messages[0].tool_calls[0].function.arguments"


def test_arguments_may_have_as_many_levels_as_a_body() -> None:
    deep = '{"a":' * 199 + "[1]" + "}" * 199
    (message,) = chat(messages=[called(1, deep)]).messages
    assert message.for_template()["tool_calls"][0]["function"]["arguments"] == json.loads(deep)


def test_a_body_of_very_many_names_is_refused_before_they_are_looked_at() -> None:
    names = ",".join(f'"k{number}":1' for number in range(MOST_NAMES + 1)).encode()
    with pytest.raises(InvalidRequest, match=f"more than {MOST_NAMES} names"):
        parse_body(b"{" + names + b"}", CompletionBody)
    text = json.dumps({"model": "m", "prompt": "{" + names.decode() + "}"}).encode()
    assert len(parse_body(text, CompletionBody).prompts[0]) == len(names) + 2


def test_a_refusal_holds_nothing_of_what_was_sent() -> None:
    for problems in (3, 20_000):
        names = ",".join(f'"k{number}":1' for number in range(problems)).encode()
        with pytest.raises(InvalidRequest) as refused:
            parse_body(b"{" + names + b"}", CompletionBody)
        assert refused.value.__context__ is None


@pytest.mark.parametrize("text", [b"\\ud800", b"\\udc00 and more", b"\\ud800\\u0041"])
def test_half_of_a_surrogate_pair_is_called_that(text: bytes) -> None:
    with pytest.raises(InvalidRequest, match="half of a surrogate pair"):
        parse_body(b'{"model": "m", "prompt": "' + text + b'"}', CompletionBody)


def test_a_model_reasons_as_the_effort_says() -> None:
    assert (chat(reasoning_effort="none").thinking, chat(reasoning_effort="low").thinking) == (False, True)
    assert chat(reasoning_effort="high", chat_template_kwargs={"enable_thinking": True}).thinking is True
    assert chat().thinking is None
    asked = {"enable_thinking": True}
    assert chat(reasoning_effort="low").reasoning_field == "reasoning_effort"
    assert chat(chat_template_kwargs=asked).reasoning_field == "chat_template_kwargs.enable_thinking"
    assert chat(reasoning_effort="none").reasoning_field is chat().reasoning_field is None


def test_an_answer_can_be_sent_back_as_clients_keep_it() -> None:
    """The `openai` package adds nulls of its own, and copies of parsed arguments when it has streamed."""
    extra = {
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "parsed": None,
        "reasoning": "hm",
    }
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {}}
    said = {"role": "assistant", "content": None, **extra, "tool_calls": [{**CALL, "function": function, "index": 0}]}
    message = chat(messages=[*HELLO, said]).messages[1].for_template()
    called = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {}}}
    assert message == {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [called]}


def test_a_body_that_is_wrong_thousands_of_times_is_not_gone_through() -> None:
    with pytest.raises(InvalidRequest, match="20000 problems") as refused:
        chat(**{f"field{number}": 1 for number in range(20_000)})
    assert "`/openapi.json`" in str(refused.value.hint)
    assert len(json.dumps(refused.value.to_json())) < 300
