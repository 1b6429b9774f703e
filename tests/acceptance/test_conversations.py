"""Real clients hold a streamed conversation of three turns with a tool call, each against a real daemon and model.

The model's weights are a script (`tests.fakes.scripted_model`), so that it is certain what it has to say.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.acceptance.harness import CHAT, TIMEOUT_S, Daemon
from tests.fakes.scripted_model import make_scripted

pytestmark = pytest.mark.mlx

KEY = "sesame-open-now"
MESSAGES = "/v1/messages"
QUESTION, THANKS, WEATHER = "How is the weather in Bern?", "Thank you.", "sunny, 21 degrees"
SAID = ("Let me look.", "It is sunny in Bern today.", "You are welcome!")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": CITY}}
ANTHROPIC_TOOL: Any = {"name": "weather", "description": "Tells it.", "input_schema": CITY}
TOO_LONG = b"x" * (8 * 2**20 + 1)
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl on this machine")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Iterator[Daemon]:
    """One daemon for all tests here; it has to end with 0."""
    scripted = make_scripted(tmp_path_factory.mktemp("scripted") / "model")
    models = {"chat": {"path": scripted, "aliases": ["default"]}, "endless": tiny_model()}
    with Daemon(models, api={"api_key": KEY}) as made:
        yield made


def test_the_openai_client(daemon: Daemon) -> None:
    base = f"http://{daemon.ready['api']}/v1"
    with openai.OpenAI(base_url=base, api_key=KEY, max_retries=0, timeout=TIMEOUT_S) as client:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]

        def turn() -> Any:
            options: Any = {"stream_options": {"include_usage": True}, "tools": [TOOL]}
            with client.chat.completions.stream(model="chat", messages=messages, **options) as stream:
                deltas = [event.delta for event in stream if event.type == "content.delta"]
                final = stream.get_final_completion()
            (choice,) = final.choices
            assert "".join(deltas) == choice.message.content
            assert len(deltas) > 1, "it came all at once"
            assert final.usage is not None
            assert final.usage.completion_tokens > 0
            messages.append(choice.message)  # as people do it
            return choice

        first = turn()
        (call,) = first.message.tool_calls
        assert (first.message.content, first.finish_reason) == (SAID[0], "tool_calls")
        assert first.message.model_extra["reasoning_content"] == "A tool knows."
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Bern"})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": WEATHER})
        second = turn()
        assert (second.message.content, second.finish_reason) == (SAID[1], "stop")
        messages.append({"role": "user", "content": THANKS})
        assert turn().message.content == SAID[2]


def test_the_anthropic_client(daemon: Daemon) -> None:
    base = f"http://{daemon.ready['api']}"
    with anthropic.Anthropic(base_url=base, api_key=KEY, max_retries=0, timeout=TIMEOUT_S) as client:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]

        def turn() -> anthropic.types.Message:
            asked: Any = {"model": "chat", "max_tokens": 200, "messages": messages, "tools": [ANTHROPIC_TOOL]}
            with client.messages.stream(**asked) as stream:
                texts = list(stream.text_stream)
                final = stream.get_final_message()
            assert len(texts) > 1, "it came all at once"
            assert "".join(texts) == "".join(block.text for block in final.content if block.type == "text")
            messages.append({"role": "assistant", "content": final.content})
            return final

        first = turn()
        thinking, text, call = first.content
        assert (thinking.type, text.type, call.type, first.stop_reason) == ("thinking", "text", "tool_use", "tool_use")
        assert call.type == "tool_use"
        assert (call.name, call.input) == ("weather", {"city": "Bern"})
        messages.append(
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": WEATHER}]}
        )
        second = turn()
        (block,) = second.content
        assert block.type == "text"
        assert (block.text, second.stop_reason) == (SAID[1], "end_turn")
        messages.append({"role": "user", "content": THANKS})
        assert turn().content[0].text == SAID[2]  # type: ignore[union-attr]


@needs_curl
@pytest.mark.parametrize("door", ["socket", "TCP"])
def test_curl_in_openais_words(daemon: Daemon, door: str) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]

    def turn() -> tuple[str, list[Any], str]:
        body = {"model": "chat", "messages": messages, "tools": [TOOL], "stream": True, "max_tokens": 200}
        events = events_of(curl(daemon, door, CHAT, body))
        *frames, done = [each["data"] for each in events]
        assert done == "[DONE]"
        choices = [json.loads(frame)["choices"][0] for frame in frames]
        said = "".join(choice["delta"].get("content") or "" for choice in choices)
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
        messages.append({"role": "assistant", "content": said, **({"tool_calls": calls} if calls else {})})
        return said, calls, choices[-1]["finish_reason"]

    said, (call,), reason = turn()
    assert (said, reason, json.loads(call["function"]["arguments"])) == (SAID[0], "tool_calls", {"city": "Bern"})
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": WEATHER})
    assert turn() == (SAID[1], [], "stop")
    messages.append({"role": "user", "content": THANKS})
    assert turn() == (SAID[2], [], "stop")


@needs_curl
@pytest.mark.parametrize("door", ["socket", "TCP"])
def test_curl_in_anthropics_words(daemon: Daemon, door: str) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]

    def turn() -> tuple[list[Any], str]:
        body = {"model": "chat", "max_tokens": 200, "messages": messages, "tools": [ANTHROPIC_TOOL], "stream": True}
        events = events_of(curl(daemon, door, MESSAGES, body, "-H", "anthropic-version: 2023-06-01"))
        told = [json.loads(each["data"]) for each in events]
        assert [each["event"] for each in events] == [each["type"] for each in told]
        blocks: list[Any] = []
        for each in told:
            if each["type"] == "content_block_start":
                blocks.append(each["content_block"])
            elif each["type"] == "content_block_delta":
                for key, piece in each["delta"].items():
                    blocks[-1][key] = blocks[-1].get(key, "") + piece if key != "type" else blocks[-1]["type"]
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = json.loads(block.pop("partial_json"))
        messages.append({"role": "assistant", "content": blocks})
        return blocks, told[-2]["delta"]["stop_reason"]

    blocks, reason = turn()
    assert ([block["type"] for block in blocks], reason) == (["thinking", "text", "tool_use"], "tool_use")
    assert blocks[2]["input"] == {"city": "Bern"}
    result = {"type": "tool_result", "tool_use_id": blocks[2]["id"], "content": WEATHER}
    messages.append({"role": "user", "content": [result]})
    assert turn() == ([{"type": "text", "text": SAID[1]}], "end_turn")
    messages.append({"role": "user", "content": THANKS})
    assert turn() == ([{"type": "text", "text": SAID[2]}], "end_turn")


@needs_curl
@pytest.mark.parametrize("door", ["socket", "TCP"])
def test_curl_shows_each_piece_as_it_comes_and_ends_its_request_when_it_is_stopped(daemon: Daemon, door: str) -> None:
    body = {"model": "endless", "messages": [{"role": "user", "content": "Go on."}], "stream": True}
    command = curl_command(daemon, door, CHAT, {**body, "max_tokens": 20_000})
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        pieces = 0
        for line in client.stdout:
            pieces += b'"content":"' in line
            if pieces == 3:
                break
        assert len(daemon.requests) == 1
        client.kill()
    daemon.until_idle()
    assert daemon.requests == []


def refusals() -> dict[str, tuple[int, tuple[str, ...], str]]:
    """What curl is told: the status, its options, and words of the answer."""
    asks = ("-H", f"Authorization: Bearer {KEY}", "-H", "Content-Type: application/json", "-d")
    hello = '"messages": [{"role": "user", "content": "Hi"}]'
    return {
        "broken JSON": (400, (*asks, '{"model": "chat", "messages": [', CHAT), "not JSON"),
        "a wrong type": (400, (*asks, f'{{"model": "chat", {hello}, "max_tokens": "4"}}', CHAT), "`max_tokens`"),
        "a prompt beyond the context": (
            400,
            (*asks, json.dumps({"model": "chat", "messages": [{"role": "user", "content": "x" * 5000}]}), CHAT),
            "4096",
        ),
        "an unknown model": (404, (*asks, f'{{"model": "chatt", {hello}}}', CHAT), "did you mean `chat`?"),
        "an unknown path": (404, (*asks, "{}", "/v1/embeddings"), "nothing answers"),
        "a wrong method": (405, (*asks[:2], CHAT), "does not take GET"),
        "too long a body": (413, (*asks, "@-", CHAT), "8388608 bytes"),
    }


@needs_curl
@pytest.mark.parametrize("case", refusals())
@pytest.mark.parametrize("door", ["socket", "TCP"])
def test_curl_is_told_by_the_status_what_is_wrong(daemon: Daemon, door: str, case: str) -> None:
    status, (*options, path), words = refusals()[case]
    done = run_curl(daemon, door, path, *options, "--fail-with-body", content=TOO_LONG if "@-" in options else b"")
    body, _, code = done.stdout.rpartition("\n")
    assert (int(code), done.returncode) == (status, 22), done.stderr
    assert words in json.dumps(json.loads(body)["error"])


@needs_curl
def test_curl_finds_control_routes_and_no_key_at_the_socket_alone(daemon: Daemon) -> None:
    key = ("-H", f"Authorization: Bearer {KEY}")
    statuses = {
        ("socket", "/v1/control/status"): "200",
        ("socket", "/v1/models"): "200",
        ("TCP", "/v1/control/status", *key): "404",
        ("TCP", "/v1/models"): "401",
        ("TCP", "/v1/models", "-H", "Authorization: Bearer sesame-open-noW"): "401",
        ("TCP", "/v1/models", *key): "200",
        ("TCP", "/v1/models", *key, "-H", "Host: evil.example"): "403",
        ("TCP", "/v1/models", *key, "-H", "Origin: https://evil.example"): "403",
    }
    found = {asked: run_curl(daemon, *asked).stdout.rpartition("\n")[2] for asked in statuses}
    assert found == statuses


def test_the_llm_command(daemon: Daemon, tmp_path: Path) -> None:
    model = {"model_id": "omlxd", "model_name": "chat", "api_base": f"http://{daemon.ready['api']}/v1"}
    table = [{**model, "supports_tools": True, "api_key_name": "omlxd"}]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(table))  # which is YAML too
    functions = f"def weather(city: str) -> str:\n    return {{'Bern': {WEATHER!r}}}[city]"

    def llm(*arguments: str) -> str:
        command = [sys.executable, "-W", "ignore", "-m", "llm", *arguments, "--key", KEY, "--functions", functions]
        environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    told = llm("-m", "omlxd", QUESTION)
    assert told.index(SAID[0]) < told.index(SAID[1])
    assert llm("-c", THANKS).strip() == SAID[2]


def curl_command(daemon: Daemon, door: str, path: str, body: Mapping[str, Any], *options: str) -> list[str]:
    content = ("-H", "Content-Type: application/json", "-H", f"Authorization: Bearer {KEY}", "-d", json.dumps(body))
    return ["curl", "-sS", "-N", *options, *content, *_address(daemon, door, path)]


def curl(daemon: Daemon, door: str, path: str, body: Mapping[str, Any], *options: str) -> str:
    """The body of an answer that must be a stream of server-sent events."""
    command = curl_command(daemon, door, path, body, "-w", "\n%{http_code} %{content_type}", *options)
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    told, _, end = done.stdout.rpartition("\n")
    assert end.startswith("200 text/event-stream"), done.stdout
    return told


def run_curl(
    daemon: Daemon, door: str, path: str, *options: str, content: bytes = b""
) -> subprocess.CompletedProcess[str]:
    """What it printed, the status in the last line."""
    command = ["curl", "-sS", "-w", "\n%{http_code}", *options, *_address(daemon, door, path)]
    done = subprocess.run(command, input=content, capture_output=True, timeout=TIMEOUT_S, check=False)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


def _address(daemon: Daemon, door: str, path: str) -> list[str]:
    if door == "socket":
        return ["--unix-socket", str(daemon.home / "omlxd.sock"), f"http://omlxd{path}"]
    return [f"http://{daemon.ready['api']}{path}"]


def events_of(text: str) -> list[dict[str, str]]:
    """Each event's fields, as the standard says; comments are left out, and pings have nothing to say."""
    events = []
    for block in filter(None, text.split("\n\n")):
        lines = [line for line in block.splitlines() if line and not line.startswith(":")]
        event = dict(line.split(": ", 1) for line in lines)
        if event and event.get("event") != "ping":
            events.append(event)
    return events
