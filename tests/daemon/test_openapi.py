"""The OpenAPI document, and requests made up from it: whatever comes, no 500, no traceback, and one clear shape."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omlxd.daemon.http_errors import CONTROL_PREFIX
from omlxd.daemon.openapi import OPERATIONS, Operation, document
from tests.fakes.daemon import RunningDaemon, running
from tests.fakes.engine import FakeEngine
from tests.fakes.schemas import anything, following
from tests.fakes.wire import ask, fetch

DOCUMENT = document(OPERATIONS)
SCHEMAS = DOCUMENT["components"]["schemas"]
WITH_BODY = [each for each in OPERATIONS if each.body is not None and not each.path.endswith("/stop")]
MODELS = {"chat": {"mib": 10}}
FEW = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """One daemon for all examples, on a loop and a thread of its own."""
    loop, made = asyncio.new_event_loop(), threading.Event()
    found: list[RunningDaemon] = []

    async def run() -> None:
        engine = FakeEngine("thread", answer_tokens=3)
        async with running(tmp_path_factory.mktemp("api"), MODELS, engine=engine) as daemon:
            found.append(daemon)
            made.set()
            await daemon.stop.wanted.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    assert made.wait(30)
    yield found[0]
    loop.call_soon_threadsafe(found[0].stop.ask)
    thread.join(30)
    loop.close()


@pytest.fixture(autouse=True)
def _limit_as_before(daemon: RunningDaemon) -> Iterator[None]:
    yield
    back = json.dumps({"max_memory": "100M", "force": True}).encode()
    assert ask(daemon.home.socket, "PATCH", f"{CONTROL_PREFIX}/limits", back).status == 200


def bodies(operation: Operation) -> Any:
    """Bodies that follow the document, with the model's real name."""
    assert operation.body is not None
    schema = deepcopy(SCHEMAS[operation.body.__name__])
    if "model" in schema.get("properties", ()):
        schema["properties"]["model"] = {"const": "chat"}
    return following(schema, SCHEMAS)


def check(daemon: RunningDaemon, operation: Operation, content: bytes, statuses: set[int]) -> None:
    path = operation.path.replace("{name}", "chat")
    answer = ask(daemon.home.socket, operation.method, path, content, {"content-type": "application/json"})
    assert answer.status in statuses, (answer.status, content, answer.body)
    assert b"Traceback" not in answer.body
    if answer.status != 200:
        error = answer.json["error"]
        assert error["message"]
        assert error["code"]


@pytest.mark.parametrize("operation", WITH_BODY, ids=lambda each: each.path)
def test_bodies_that_follow_the_schema_are_answered_or_refused_by_name(
    daemon: RunningDaemon, operation: Operation
) -> None:
    @FEW
    @given(bodies(operation))
    def send(body: Any) -> None:
        # What the schema cannot say (a context, a vocabulary, a size in words) is refused with 400.
        check(daemon, operation, json.dumps(body).encode(), {200, 400, 507})

    send()


@pytest.mark.parametrize("operation", WITH_BODY, ids=lambda each: each.path)
def test_bodies_with_one_wrong_field_are_no_500(daemon: RunningDaemon, operation: Operation) -> None:
    assert operation.body is not None
    fields = [*operation.body.model_fields, "surprise"]

    @FEW
    @given(bodies(operation), st.sampled_from(fields), anything)
    def send(body: Any, field: str, value: Any) -> None:
        check(daemon, operation, json.dumps({**body, field: value}).encode(), {200, 400, 404, 507})

    send()


@pytest.mark.parametrize("operation", WITH_BODY, ids=lambda each: each.path)
@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b"null", b"\xff\xfe", b'"text"', b"{}" * 50, b"[" * 100_000, b'{"a":' * 50_000, b'{"model":1e999}'],
)
def test_what_is_no_body_is_a_400(daemon: RunningDaemon, operation: Operation, content: bytes) -> None:
    check(daemon, operation, content, {400})


@FEW
@given(path=st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="#"), max_size=20))
def test_any_path_is_answered(daemon: RunningDaemon, path: str) -> None:
    for prefix in ("/", "/v1/models/", f"{CONTROL_PREFIX}/models/", f"{CONTROL_PREFIX}/events?since="):
        answer = ask(daemon.home.socket, "GET", prefix + path)
        assert answer.status in {200, 307, 400, 404, 405}, (prefix + path, answer.status)


def test_nothing_of_it_was_a_bug(daemon: RunningDaemon) -> None:
    bugs = [line for line in daemon.log() if line["event"] == "api_error" and "traceback" in line]
    assert bugs == []


async def test_each_door_describes_what_it_answers(tmp_path: Path) -> None:
    async with running(tmp_path, MODELS) as own:
        over_unix = (await own.ask("GET", "/openapi.json")).json
        over_tcp = (await fetch(own.tcp, "GET", "/openapi.json")).json
    assert over_unix == DOCUMENT
    assert set(over_tcp["paths"]) == {path for path in over_unix["paths"] if not path.startswith(CONTROL_PREFIX)}


def test_every_reference_of_the_document_is_there() -> None:
    text = json.dumps(DOCUMENT)
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= set(DOCUMENT["components"]["schemas"])
