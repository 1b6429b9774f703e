"""The OpenAI-style API, through the `openai` package over TCP and by hand, streamed and whole."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from omlxd.core.errors import LoadFailed
from omlxd.engine.orders import MIB
from tests.fakes.daemon import RunningDaemon, running
from tests.fakes.engine import FakeEngine
from tests.fakes.wire import connect

TWO = {"chat": {"mib": 40, "aliases": ["default"]}, "small": {"mib": 30}}
HELLO: Any = [{"role": "user", "content": "hello there"}]
PATH = "/v1/chat/completions"


def endless(**options: Any) -> FakeEngine:
    """Answers that go on until somebody stops them."""
    return FakeEngine("thread", answer_tokens=None, context_length=10**9, step_s=0.002, **options)


@asynccontextmanager
async def client(daemon: RunningDaemon, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    base = f"http://{daemon.ready.api}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key=key, max_retries=0, timeout=20) as made:
        yield made


def frames(body: bytes) -> list[Any]:
    """The JSON of each frame of a stream, comments left out; the last is `[DONE]`."""
    found = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in found]


async def test_the_openai_client_gets_a_whole_answer(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon, client(daemon) as api:
        answer = await api.chat.completions.create(model="chat", messages=HELLO, temperature=0, seed=7)
        assert answer.object == "chat.completion"
        assert answer.id.startswith("chatcmpl-")
        assert answer.model == "chat"
        (choice,) = answer.choices
        assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
        assert str(choice.message.content).split() == [f"tok{number}" for number in range(8)]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens > 0
        assert answer.usage.completion_tokens == 8
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


async def test_usage_counts_the_tokens_that_an_earlier_chat_left_in_the_prefix_cache(tmp_path: Path) -> None:
    question: Any = [{"role": "user", "content": "why " * 50}]
    settings = {"policy": "graceful", "min_available": 0}
    async with running(tmp_path, TWO, daemon=settings) as daemon, client(daemon) as api:
        usages = [
            (await api.chat.completions.create(model="chat", messages=question, max_tokens=2)).usage for _ in range(2)
        ]
        details = [usage and usage.prompt_tokens_details for usage in usages]
        assert [each and each.cached_tokens for each in details] == [0, 50]
        assert usages[0] is not None
        assert usages[0].prompt_tokens == 51
        status = await daemon.control("GET", "status")
        assert status["memory"]["prefix_cache"] == status["models"][0]["prefix_cache_bytes"] > 0


async def test_the_openai_client_streams_the_same_text(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon, client(daemon) as api:
        whole = await api.chat.completions.create(model="default", messages=HELLO, max_tokens=5)
        stream = await api.chat.completions.create(model="default", messages=HELLO, max_tokens=5, stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert len({chunk.id for chunk in chunks}) == 1


async def test_the_last_chunk_has_the_figures_that_omlxd_run_shows(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        answer = await daemon.ask("POST", PATH, {"model": "chat", "messages": HELLO, "stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        *_, last, done = frames(answer.body)
        assert done == "[DONE]"
        assert set(last["omlxd"]) == {"prompt_tokens", "generated_tokens", "first_token_s", "tokens_per_s"}
        assert last["omlxd"]["generated_tokens"] == 8


async def test_who_wants_progress_is_told_how_far_the_load_is(tmp_path: Path) -> None:
    engine = FakeEngine("thread", slice_bytes=MIB, step_s=0.05)
    async with running(tmp_path, TWO, engine=engine) as daemon:
        body = {"model": "chat", "messages": HELLO, "max_tokens": 2, "stream": True}
        answer = await daemon.ask("POST", PATH, body, {"omlxd-progress": "true"})
        comments = [line for line in answer.body.decode().split("\n\n") if line.startswith(":")]
        assert re.fullmatch(r": loading chat \d+% of 40\.0 MiB, .* left", comments[0])
        *_, last, done = frames(answer.body)
        assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")


async def test_models_are_listed_with_their_aliases(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon, client(daemon) as api:
        listed = (await api.models.list()).data
        assert [model.id for model in listed] == ["chat", "default", "small"]
        alias: Any = listed[1].model_extra
        assert alias["root"] == "chat"
        assert (alias["omlxd"]["state"], alias["omlxd"]["weights_bytes"]) == ("unloaded", 40 * MIB)
        await daemon.control("POST", "models/chat/load")
        loaded: Any = (await api.models.retrieve("chat")).model_extra
        assert (loaded["omlxd"]["state"], loaded["omlxd"]["context_length"]) == ("loaded", 4096)
        assert (await api.models.retrieve("default")).id == "default"
        with pytest.raises(openai.NotFoundError):
            await api.models.retrieve("other")


async def test_text_parts_are_joined_and_counted_like_one_text(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}]
        whole = await daemon.ask("POST", PATH, {"model": "chat", "messages": HELLO})
        split = await daemon.ask("POST", PATH, {"model": "chat", "messages": [{"role": "user", "content": parts}]})
        assert split.json["usage"] == whole.json["usage"]


async def test_both_doors_answer_alike(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon, client(daemon) as api:
        over_tcp = await api.chat.completions.create(model="chat", messages=HELLO, temperature=0)
        over_unix = await daemon.ask("POST", PATH, {"model": "chat", "messages": HELLO, "temperature": 0})
        assert over_unix.json["choices"][0]["message"]["content"] == over_tcp.choices[0].message.content


async def test_a_field_that_is_not_understood_is_named_and_costs_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        answer = await daemon.ask("POST", PATH, {"model": "chat", "messages": HELLO, "max_token": 3})
        error = answer.json["error"]
        assert (answer.status, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_request")
        assert (error["param"], "`max_token`" in error["message"]) == ("max_token", True)
        answer = await daemon.ask("POST", PATH, {"model": "chat", "messages": []})
        assert answer.json["error"]["hint"] == "omlxd-api(7) and `/openapi.json` say what can be sent"
        assert daemon.engine.loaded == set()


async def test_a_field_that_was_nearly_right_gets_a_suggestion(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        body = {"model": "chat", "messages": HELLO, "temprature": 1}
        assert "`temperature`" in (await daemon.ask("POST", PATH, body)).json["error"]["hint"]


async def test_the_openai_client_gets_the_token_counts_of_a_stream(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon, client(daemon) as api:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        stream = await api.chat.completions.create(model="chat", messages=HELLO, max_completion_tokens=3, **options)
        *chunks, last = [chunk async for chunk in stream]
        assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
        assert (last.choices, last.usage and last.usage.completion_tokens) == ([], 3)


async def test_several_choices_come_with_their_indexes_whole_and_streamed(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon, client(daemon) as api:
        whole = await api.chat.completions.create(model="chat", messages=HELLO, n=3, max_tokens=4)
        assert [choice.index for choice in whole.choices] == [0, 1, 2]
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 12)
        texts = {0: "", 1: "", 2: ""}
        ends = []
        stream = await api.chat.completions.create(model="chat", messages=HELLO, n=3, max_tokens=4, stream=True)
        async for chunk in stream:
            (choice,) = chunk.choices
            texts[choice.index] += choice.delta.content or ""
            ends += [choice.index] if choice.finish_reason else []
        assert list(texts.values()) == [choice.message.content for choice in whole.choices]
        assert sorted(ends) == [0, 1, 2]


async def test_each_choice_has_a_seed_of_its_own(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon:
        await daemon.ask("POST", PATH, {"model": "chat", "messages": HELLO, "n": 2, "seed": 7})
        orders = {order.request: order for plan in daemon.engine.plans for order in plan.requests.values()}
        assert sorted(order.sampling.seed for order in orders.values()) == [7, 8]


async def test_the_roles_of_a_conversation_with_tools_reach_the_template(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "what time is it", "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "noon"}], "tool_call_id": "c1"},
    ]
    async with running(tmp_path, TWO) as daemon:
        answer = await daemon.ask("POST", PATH, {"model": "chat", "messages": messages})
        assert (answer.status, answer.json["usage"]["prompt_tokens"]) == (200, 4 + 2 + 4 + 1)


@pytest.mark.parametrize("prompt", ["one two", ["one two"], [3, 3], [[3, 3]]])
async def test_the_openai_client_completes_texts_and_tokens(tmp_path: Path, prompt: Any) -> None:
    async with running(tmp_path, TWO) as daemon, client(daemon) as api:
        whole = await api.completions.create(model="chat", prompt=prompt, max_tokens=3)
        assert (whole.object, whole.id[:5]) == ("text_completion", "cmpl-")
        assert (whole.choices[0].text.split(), whole.choices[0].finish_reason) == (["tok0", "tok1", "tok2"], "length")
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == 2
        stream = await api.completions.create(model="chat", prompt=prompt, max_tokens=3, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == whole.choices[0].text


async def test_each_of_several_prompts_is_answered_n_times_and_counted_once(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon, client(daemon) as api:
        whole = await api.completions.create(model="chat", prompt=["one", "one two"], n=2, max_tokens=2)
        assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (1 + 2, 4 * 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_when_one_of_several_prompts_is_refused_none_is_answered(tmp_path: Path, stream: bool) -> None:
    async with running(tmp_path, TWO, engine=endless()) as daemon:
        await daemon.control("POST", "models/chat/load")
        body = {"model": "chat", "prompt": [[1], [10**6]], "stream": stream, "max_tokens": 10**6}
        answer = await daemon.ask("POST", "/v1/completions", body)
        assert "1000000" in answer.body.decode()
        async with asyncio.timeout(20):
            while (await daemon.control("GET", "requests"))["requests"]:
                pass


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("model", "kind", "status", "code"),
    [
        ("nobody", openai.NotFoundError, 404, "model_not_found"),
        ("huge", openai.InternalServerError, 507, "does_not_fit"),
        ("gone", openai.InternalServerError, 500, "load_failed"),
    ],
)
async def test_what_is_known_before_the_first_byte_is_a_real_http_status(
    tmp_path: Path, stream: bool, model: str, kind: type[openai.APIStatusError], status: int, code: str
) -> None:
    async with running(tmp_path, {**TWO, "huge": {"mib": 101}, "gone": {}}) as daemon, client(daemon) as api:
        (tmp_path / "gone" / "config.json").unlink()
        with pytest.raises(kind) as refused:
            await api.chat.completions.create(model=model, messages=HELLO, stream=stream)
        assert refused.value.status_code == status
        assert refused.value.code == code
        assert refused.value.param == ("model" if code == "model_not_found" else None)


@pytest.mark.parametrize("stream", [False, True])
async def test_where_a_models_files_are_is_told_on_the_private_socket_only(tmp_path: Path, stream: bool) -> None:
    async with running(tmp_path, {**TWO, "gone": {}}) as daemon, client(daemon) as api:
        shutil.rmtree(tmp_path / "gone")
        inside = await daemon.ask("POST", PATH, {"model": "gone", "messages": HELLO, "stream": stream})
        assert str(tmp_path) in inside.json["error"]["message"]
        assert str(tmp_path) in inside.json["error"]["details"]["path"]
        with pytest.raises(openai.InternalServerError) as refused:
            await api.chat.completions.create(model="gone", messages=HELLO, stream=stream)
        assert str(tmp_path) not in refused.value.response.text
        assert "`gone` cannot be loaded (missing folder)" in refused.value.message
        assert "`omlxd check`" in refused.value.response.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(tmp_path: Path, stream: bool) -> None:
    long: Any = [{"role": "user", "content": "word " * 50}]
    async with running(tmp_path, TWO, engine=FakeEngine("thread", context_length=20)) as daemon:
        answer = await daemon.ask("POST", PATH, {"model": "chat", "messages": long, "stream": stream})
        error = answer.json["error"]
        assert (answer.status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
        assert "20" in error["message"]
        answer = await daemon.ask("POST", "/v1/completions", {"model": "chat", "prompt": "word " * 50})
        assert answer.json["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=x", "limit"),
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=%C2%B2", "limit"),
        ("before_id=nobody", "before_id"),
        ("after_id=chat&before_id=chat", "before_id"),
    ],
)
async def test_a_page_of_models_that_cannot_be_is_refused(tmp_path: Path, query: str, param: str) -> None:
    async with running(tmp_path, TWO) as daemon:
        answer = await daemon.ask("GET", f"/v1/models?{query}")
        assert (answer.status, answer.json["error"]["param"]) == (400, param)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_refused_with_a_status_while_its_model_is_still_being_loaded(
    tmp_path: Path, stream: bool
) -> None:
    engine = FakeEngine("thread", context_length=20, slice_bytes=1024, step_s=0.002)  # a minute and more
    long: Any = [{"role": "user", "content": "word " * 50}]
    async with running(tmp_path, TWO, engine=engine) as daemon:
        answer = await daemon.ask("POST", PATH, {"model": "chat", "messages": long, "stream": stream})
        assert (answer.status, answer.json["error"]["code"]) == (400, "context_length_exceeded")
        assert (await daemon.states())["chat"] == "loading"


async def test_a_request_that_is_aborted_in_its_stream_ends_with_one_error_frame(tmp_path: Path) -> None:
    async with running(tmp_path, TWO, engine=endless()) as daemon:
        body = {"model": "chat", "messages": HELLO, "stream": True, "max_tokens": 10**6}
        asked = asyncio.create_task(daemon.ask("POST", PATH, body))
        async with asyncio.timeout(20):
            while not (requests := (await daemon.control("GET", "requests"))["requests"]):
                pass
            while (await daemon.control("GET", "requests"))["requests"][0]["state"] != "decode":
                pass
        await daemon.control("DELETE", f"requests/{requests[0]['id']}")
        *told, error, done = frames((await asked).body)
        assert done == "[DONE]"
        assert error["error"]["code"] == "request_aborted"
        assert error["error"]["type"] == "server_error"
        assert not any("error" in frame for frame in told)
        assert daemon.engine.loaded == {"chat"}


async def test_the_openai_client_sees_an_abort_in_its_stream_as_an_error(tmp_path: Path) -> None:
    async with running(tmp_path, TWO, engine=endless()) as daemon, client(daemon) as api:
        stream = await api.chat.completions.create(model="chat", messages=HELLO, stream=True, max_tokens=10**6)

        async def read_and_unload() -> None:
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    await daemon.control("POST", "models/chat/unload", {"now": True})

        with pytest.raises(openai.APIError, match="aborted"):
            await read_and_unload()


async def test_an_engine_that_fails_ends_the_request_with_its_reason(tmp_path: Path) -> None:
    engine = FakeEngine("thread")
    async with running(tmp_path, TWO, engine=engine) as daemon:
        await daemon.control("POST", "models/chat/load")
        engine.step_errors["chat"] = RuntimeError("boom")
        answer = await daemon.ask("POST", PATH, {"model": "chat", "messages": HELLO})
        assert (answer.status, answer.json["error"]["code"]) == (500, "engine_failed")
        assert (await daemon.ask("POST", PATH, {"model": "chat", "messages": HELLO})).status == 200


async def test_a_load_that_fails_after_the_stream_began_is_told_in_the_stream(tmp_path: Path) -> None:
    engine = FakeEngine("thread", slice_bytes=MIB, step_s=0.05)  # 40 slices: longer than the second before headers
    async with running(tmp_path, TWO, engine=engine) as daemon:
        asked = asyncio.create_task(daemon.ask("POST", PATH, {"model": "chat", "messages": HELLO, "stream": True}))
        async with asyncio.timeout(20):
            while (await daemon.control("GET", "models"))["models"][0]["load_progress"] is None:
                pass
            while (await daemon.control("GET", "models"))["models"][0]["load_progress"] < 0.6:
                pass
        engine.load_errors["chat"] = LoadFailed("the second shard is cut off", hint="fetch it again")
        answer = await asked
        assert answer.status == 200
        assert b": loading chat " in answer.body
        *_, error, done = frames(answer.body)
        assert (error["error"]["code"], done) == ("load_failed", "[DONE]")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_its_request(tmp_path: Path, stream: bool) -> None:
    async with running(tmp_path, TWO, engine=endless()) as daemon:
        body = json.dumps({"model": "chat", "messages": HELLO, "stream": stream, "max_tokens": 10**6}).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        peer = await asyncio.to_thread(connect, daemon.home.socket)
        peer.sendall(head + body)
        async with asyncio.timeout(20):
            while not (seen := (await daemon.control("GET", "requests"))["requests"]) or seen[0]["state"] != "decode":
                pass
            peer.close()
            while (await daemon.control("GET", "requests"))["requests"]:
                pass
            while (await daemon.control("GET", "models"))["models"][0]["kv_bytes"]:  # until the engine's next step
                pass


async def test_a_reader_that_stands_still_does_not_hold_up_another_request(tmp_path: Path) -> None:
    async with running(tmp_path, TWO, engine=endless()) as daemon:
        body = json.dumps({"model": "chat", "messages": HELLO, "stream": True, "max_tokens": 10**6}).encode()
        peer = await asyncio.to_thread(connect, daemon.home.socket)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.sendall(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await daemon.ask("POST", PATH, {"model": "chat", "messages": HELLO, "max_tokens": 50})
        assert answer.json["usage"]["completion_tokens"] == 50
        peer.close()


async def test_many_clients_of_two_models_all_get_whole_answers(tmp_path: Path) -> None:
    async with running(tmp_path, TWO) as daemon, client(daemon) as api:
        asked = [
            api.chat.completions.create(model=model, messages=HELLO) for _ in range(10) for model in ("chat", "small")
        ]
        answers = await asyncio.gather(*asked)
        assert {answer.choices[0].finish_reason for answer in answers} == {"stop"}
        assert {answer.usage.completion_tokens for answer in answers if answer.usage} == {8}


async def test_the_key_of_the_manifest_is_asked_for_over_tcp(tmp_path: Path) -> None:
    async with running(tmp_path, TWO, api={"api_key": "sesame-open-now"}) as daemon:
        async with client(daemon, "wrong") as api:
            with pytest.raises(openai.AuthenticationError):
                await api.models.list()
        async with client(daemon, "sesame-open-now") as api:
            assert (await api.models.list()).data


async def test_prompts_and_answers_are_in_no_log(tmp_path: Path) -> None:
    async with running(tmp_path, TWO, engine=FakeEngine("thread", answer_tokens=3)) as daemon:
        for content in ("a secret prompt", {"bad": "a secret prompt"}):
            await daemon.ask("POST", PATH, {"model": "chat", "messages": [{"role": "user", "content": content}]})
        text = daemon.home.log.read_text()
        assert "request_finished" in text
        assert "secret" not in text
        assert "tok0" not in text


async def test_one_request_too_many_in_the_queue_is_told_when_to_come_back(tmp_path: Path) -> None:
    engine = FakeEngine("thread", slice_bytes=MIB, step_s=0.05)  # the load takes 40 steps: the first request waits
    async with running(tmp_path, TWO, engine=engine, daemon={"max_waiting": 1}) as daemon:
        first = asyncio.create_task(daemon.ask("POST", PATH, {"model": "chat", "messages": HELLO}))
        async with asyncio.timeout(20):
            while not (await daemon.control("GET", "models"))["models"][0]["waiting"]:
                pass
        refused = await daemon.ask("POST", PATH, {"model": "chat", "messages": HELLO})
        assert (refused.status, refused.json["error"]["code"]) == (503, "busy")
        assert int(refused.headers["retry-after"]) >= 1
        engine.step_s = 0.0
        assert (await first).status == 200
