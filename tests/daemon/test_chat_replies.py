"""Tool calls, reasoning and log probabilities as OpenAI clients see them; the model says what the test wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omlxd.core.reply import ANSWER, REASONING, TOOL_CALL
from tests.daemon.test_openai_api import client, frames
from tests.fakes.daemon import running
from tests.fakes.engine import FakeEngine

MODELS = {"chat": {"mib": 10}}
PATH = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "how is the weather in Bern"}]
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
MARKERS = {
    ANSWER: [("<think>", REASONING), ("<tool_call>", TOOL_CALL)],
    REASONING: [("</think>", ANSWER)],
    TOOL_CALL: [("</tool_call>", ANSWER)],
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'


def saying(*words: str, start: str = ANSWER) -> FakeEngine:
    """A model that knows tools and reasoning, and says these words, one token each."""
    engine = FakeEngine("thread")
    engine.script, engine.transitions, engine.reply_start = words, MARKERS, start
    return engine


def cut(text: str, size: int = 5) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


async def test_the_openai_client_holds_a_conversation_with_a_tool_call(tmp_path: Path) -> None:
    engine = saying("I'll ", "look.", "\n", *cut(CALL), "\n")
    async with running(tmp_path, MODELS, engine=engine) as daemon, client(daemon) as api:
        first = await api.chat.completions.create(model="chat", messages=HELLO, tools=TOOLS)
        (choice,) = first.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I'll look.")
        (call,) = choice.message.tool_calls or ()
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Bern"})
        engine.script = ("It ", "is ", "sunny.")
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        messages = [*HELLO, choice.message.model_dump(exclude_none=True), result]
        second = await api.chat.completions.create(model="chat", messages=messages, tools=TOOLS)
        assert (second.choices[0].finish_reason, second.choices[0].message.content) == ("stop", "It is sunny.")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_that_cannot_reason_refuses_to_be_asked_for_it(tmp_path: Path, stream: bool) -> None:
    body = {"model": "chat", "messages": HELLO, "max_tokens": 2, "stream": stream}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("reasoning_effort", {"reasoning_effort": "low"}),
        ("chat_template_kwargs.enable_thinking", {"chat_template_kwargs": {"enable_thinking": True}}),
    ]
    async with running(tmp_path, MODELS) as daemon:
        for field, more in asked:
            answer = await daemon.ask("POST", PATH, body | more)
            assert (answer.status, answer.json["error"]["param"]) == (400, field)
        assert (await daemon.ask("POST", PATH, body | {"reasoning_effort": "none"})).status == 200
    thinks = tmp_path / "thinks"
    thinks.mkdir()
    async with running(thinks, MODELS, engine=saying("Yes.")) as daemon:
        for _, more in asked:
            assert (await daemon.ask("POST", PATH, body | more)).status == 200


async def test_streamed_calls_come_whole_and_numbered_and_nothing_of_them_is_content(tmp_path: Path) -> None:
    engine = saying("Two: ", *cut(CALL, 3), "\n", *cut(CALL.replace("Bern", "Basel"), 7))
    async with running(tmp_path, MODELS, engine=engine) as daemon, client(daemon) as api:
        stream = await api.chat.completions.create(model="chat", messages=HELLO, tools=TOOLS, stream=True)
        content, calls, reasons = "", [], []
        async for chunk in stream:
            (choice,) = chunk.choices
            content += choice.delta.content or ""
            calls += choice.delta.tool_calls or []
            reasons.append(choice.finish_reason)
        assert (content, reasons[-1]) == ("Two:", "tool_calls")
        assert [call.index for call in calls] == [0, 1]
        assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Bern", "Basel"]
        assert len({call.id for call in calls}) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_of_a_model_that_no_grammar_holds_only_the_first_call_counts_when_one_was_asked_for(
    tmp_path: Path, stream: bool
) -> None:
    engine = saying("First: ", *cut(CALL, 3), " and ", *cut(CALL.replace("Bern", "Basel"), 7), " so.")
    body = {"model": "chat", "messages": HELLO, "tools": TOOLS, "parallel_tool_calls": False, "stream": stream}
    body["max_tokens"] = len(engine.script) - 1  # what it goes on with is cut off, and does not count either
    async with running(tmp_path, MODELS, engine=engine) as daemon:
        answer = await daemon.ask("POST", PATH, body)
        if stream:
            told = [frame["choices"][0] for frame in frames(answer.body)[:-1]]
            content = "".join(choice["delta"].get("content") or "" for choice in told)
            calls = [call for choice in told for call in choice["delta"].get("tool_calls", ())]
            reason = told[-1]["finish_reason"]
        else:
            (choice,) = answer.json["choices"]
            message, reason = choice["message"], choice["finish_reason"]
            content, calls = message["content"], message["tool_calls"]
        assert (content, reason) == ("First:", "tool_calls")
        assert [json.loads(call["function"]["arguments"])["city"] for call in calls] == ["Bern"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_that_cannot_be_held_to_a_form_refuses_with_a_status_and_the_fields_name(
    tmp_path: Path, stream: bool
) -> None:
    body = {"model": "chat", "messages": HELLO, "tools": TOOLS, "tool_choice": "required", "stream": stream}
    async with running(tmp_path, MODELS, engine=saying("no")) as daemon:
        answer = await daemon.ask("POST", PATH, body)
        assert (answer.status, answer.json["error"]["param"]) == (400, "tool_choice")
        claude = {"model": "chat", "max_tokens": 5, "messages": HELLO, "stream": stream}
        claude |= {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any"}}
        answer = await daemon.ask("POST", "/v1/messages", claude)
        assert answer.status == 400
        assert "tool_choice" in answer.json["error"]["message"]


async def test_line_breaks_before_a_call_are_no_content_and_others_are(tmp_path: Path) -> None:
    async with running(tmp_path, MODELS, engine=saying("One.\n", "\nTwo.\n\n", *cut(CALL), "\n")) as daemon:
        for stream in (False, True):
            assert await said(daemon, {"tools": TOOLS, "stream": stream}) == ("One.\n\nTwo.", "tool_calls")


async def test_line_breaks_at_the_end_of_an_answer_are_content(tmp_path: Path) -> None:
    async with running(tmp_path, MODELS, engine=saying("One.\n", "\n")) as daemon:
        for stream in (False, True):
            assert await said(daemon, {"tools": TOOLS, "stream": stream}) == ("One.\n\n", "stop")


async def test_the_openai_stream_helper_puts_the_call_together(tmp_path: Path) -> None:
    async with running(tmp_path, MODELS, engine=saying(*cut(CALL))) as daemon, client(daemon) as api:
        async with api.chat.completions.stream(model="chat", messages=HELLO, tools=TOOLS) as stream:
            final = await stream.get_final_completion()
        (call,) = final.choices[0].message.tool_calls or ()
        assert json.loads(call.function.arguments) == {"city": "Bern"}


@pytest.mark.parametrize("stream", [False, True])
async def test_what_looked_like_a_call_and_is_none_stays_text(tmp_path: Path, stream: bool) -> None:
    text = "<tool_call>well, no</tool_call> sorry"
    async with running(tmp_path, MODELS, engine=saying(*cut(text))) as daemon:
        content, reason = await said(daemon, {"tools": TOOLS, "stream": stream})
        assert (content, reason) == (text, "stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("most", [1, 2, 5, 13])
async def test_of_a_call_that_is_cut_off_by_the_length_nothing_is_told(tmp_path: Path, stream: bool, most: int) -> None:
    async with running(tmp_path, MODELS, engine=saying("Well.\n", *cut(CALL))) as daemon:
        content, reason = await said(daemon, {"tools": TOOLS, "stream": stream, "max_tokens": 1 + most})
        assert (content, reason) == ("Well.", "length")
        claude: Any = {"model": "chat", "messages": HELLO, "stream": stream, "max_tokens": 1 + most}
        claude["tools"] = [{"name": "weather", "input_schema": {"type": "object"}}]
        answer = await daemon.ask("POST", "/v1/messages", claude)
        assert answer.status == 200
        assert b"Well." in answer.body
        assert b"max_tokens" in answer.body
        assert b"<too" not in answer.body
        assert b"weather" not in answer.body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "content"), [('"arguments', "Well."), ("Bern", "Well."), ("ll.", "We")])
async def test_of_a_call_that_is_cut_off_by_a_stop_word_nothing_is_told(
    tmp_path: Path, stream: bool, stop: str, content: str
) -> None:
    async with running(tmp_path, MODELS, engine=saying("Well.", *cut(CALL, 100))) as daemon:
        assert await said(daemon, {"tools": TOOLS, "stream": stream, "stop": stop}) == (content, "stop")


async def test_a_call_of_which_a_stop_word_is_only_the_end_is_told(tmp_path: Path) -> None:
    async with running(tmp_path, MODELS, engine=saying(*cut(CALL, 100))) as daemon:
        body = {"model": "chat", "messages": HELLO, "tools": TOOLS, "stop": "</tool_call>"}
        (choice,) = (await daemon.ask("POST", PATH, body)).json["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bracket_at_which_the_length_ends_an_answer_is_content(tmp_path: Path, stream: bool) -> None:
    async with running(tmp_path, MODELS, engine=saying("1 ", "<", "2")) as daemon:
        assert await said(daemon, {"tools": TOOLS, "stream": stream, "max_tokens": 2}) == ("1 <", "length")


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}])
async def test_without_tools_on_offer_nothing_is_a_call(tmp_path: Path, more: dict[str, Any]) -> None:
    async with running(tmp_path, MODELS, engine=saying(*cut(CALL))) as daemon:
        assert await said(daemon, more) == (CALL, "stop")


async def test_a_model_that_knows_no_tools_refuses_them_by_name(tmp_path: Path) -> None:
    async with running(tmp_path, MODELS) as daemon:
        answer = await daemon.ask("POST", PATH, {"model": "chat", "messages": HELLO, "tools": TOOLS})
        assert (answer.status, answer.json["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize(("start", "text"), [(ANSWER, "<think>hm, so</think>Yes."), (REASONING, "hm, so</think>Yes.")])
async def test_reasoning_is_apart_from_the_answer_whole_and_streamed(tmp_path: Path, start: str, text: str) -> None:
    async with running(tmp_path, MODELS, engine=saying(*cut(text), start=start)) as daemon:
        body = {"model": "chat", "messages": HELLO}
        message = (await daemon.ask("POST", PATH, body)).json["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm, so", "Yes.")
        told = frames((await daemon.ask("POST", PATH, {**body, "stream": True})).body)[:-1]
        deltas = [frame["choices"][0]["delta"] for frame in told]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm, so"
        assert "".join(delta.get("content", "") for delta in deltas) == "Yes."


async def test_a_plain_completion_is_the_text_as_the_model_wrote_it(tmp_path: Path) -> None:
    async with running(tmp_path, MODELS, engine=saying("<think>", "x", CALL)) as daemon:
        answer = await daemon.ask("POST", "/v1/completions", {"model": "chat", "prompt": "go"})
        assert answer.json["choices"][0]["text"] == "<think>x" + CALL


async def test_the_openai_client_gets_log_probabilities_whole_and_streamed(tmp_path: Path) -> None:
    async with running(tmp_path, MODELS) as daemon, client(daemon) as api:
        options: Any = {"model": "chat", "messages": HELLO, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
        whole = (await api.chat.completions.create(**options)).choices[0].logprobs
        assert whole is not None
        found = whole.content or []
        assert [(one.token, one.logprob) for one in found] == [("tok0 ", -0.5), ("tok1 ", -0.5), ("tok2 ", -0.5)]
        assert bytes(found[0].bytes or []) == b"tok0 "
        assert [top.token for top in found[1].top_logprobs] == ["tok1 ", "tok2 "]
        stream = await api.chat.completions.create(**options, stream=True)
        told = [chunk.choices[0].logprobs async for chunk in stream]
        assert [one for logprobs in told if logprobs for one in logprobs.content or []] == found


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_are_those_of_the_text_that_a_stop_word_left(tmp_path: Path, stream: bool) -> None:
    body = {"model": "chat", "messages": HELLO, "logprobs": True, "stop": "!", "stream": stream}
    async with running(tmp_path, MODELS, engine=saying("a", "b", "!c", "d")) as daemon:
        answer = await daemon.ask("POST", PATH, body)
        choices = [frame["choices"][0] for frame in frames(answer.body)[:-1]] if stream else answer.json["choices"]
        told = [one for choice in choices if choice.get("logprobs") for one in choice["logprobs"]["content"]]
        assert len(told) == 2


async def test_log_probabilities_of_an_answer_that_a_stop_word_left_empty_are_none_of_any_token(tmp_path: Path) -> None:
    asked: Any = {"model": "chat", "stop": "!", "max_tokens": 3}
    async with running(tmp_path, MODELS, engine=saying("!a")) as daemon:
        chat = await daemon.ask("POST", PATH, {**asked, "messages": HELLO, "logprobs": True})
        assert chat.json["choices"][0]["logprobs"] == {"content": [], "refusal": None}
        plain = await daemon.ask("POST", "/v1/completions", {**asked, "prompt": "go", "logprobs": 1})
        assert plain.json["choices"][0]["logprobs"]["tokens"] == []
        unasked = await daemon.ask("POST", PATH, {**asked, "messages": HELLO})
        assert unasked.json["choices"][0]["logprobs"] is None


async def test_log_probabilities_of_a_completion_are_four_lists(tmp_path: Path) -> None:
    async with running(tmp_path, MODELS) as daemon, client(daemon) as api:
        options: Any = {"model": "chat", "prompt": "go", "max_tokens": 3, "logprobs": 1}
        whole = (await api.completions.create(**options)).choices[0].logprobs
        assert whole is not None
        assert (whole.tokens, whole.text_offset) == (["tok0 ", "tok1 ", "tok2 "], [0, 5, 10])
        assert (whole.token_logprobs, whole.top_logprobs) == ([-0.5] * 3, [{f"tok{n} ": -0.5} for n in range(3)])
        stream = await api.completions.create(**options, stream=True)
        offsets = [c.choices[0].logprobs.text_offset async for c in stream if c.choices[0].logprobs]
        assert offsets == [[0], [5], [10]]


async def test_sampling_options_reach_the_engine(tmp_path: Path) -> None:
    options = {
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": 2.5},
    }
    async with running(tmp_path, MODELS) as daemon:
        await daemon.ask("POST", PATH, {"model": "chat", "messages": HELLO, **options})
        (order,) = {o.request: o for plan in daemon.engine.plans for o in plan.requests.values()}.values()
        expected = {**options, "logit_bias": ((5, 2.5),)}
        assert {name: getattr(order.sampling, name) for name in options} == expected
        assert order.top_logprobs is None


async def test_a_bias_for_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path, MODELS, engine=FakeEngine("thread", vocab_size=500)) as daemon:
        answer = await daemon.ask("POST", PATH, {"model": "chat", "messages": HELLO, "logit_bias": {"500": 1}})
        assert (answer.status, answer.json["error"]["param"]) == (400, "logit_bias")
        assert "500" in answer.json["error"]["message"]


async def said(daemon: Any, more: dict[str, Any]) -> tuple[str, str]:
    """The content and the finish reason."""
    answer = await daemon.ask("POST", PATH, {"model": "chat", "messages": HELLO, **more})
    assert answer.status == 200, answer.body
    if not more.get("stream"):
        choice = answer.json["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]
    told = frames(answer.body)[:-1]
    content = "".join(frame["choices"][0]["delta"].get("content", "") for frame in told)
    return content, told[-1]["choices"][0]["finish_reason"]
