"""Random models held to grammars: alone, in a batch, across a park, up to their length, and when a grammar fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from omlxd.core.answer_form import AnswerForm
from omlxd.core.errors import InvalidRequest
from omlxd.core.states import FinishReason
from omlxd.engine.events import Generated
from omlxd.engine.orders import GenerationOrder, Sampling
from tests.engine.driver import Driver

pytestmark = pytest.mark.mlx

PROMPT = (70, 80, 90, 100)
NUMBER = count()
SCHEMAS: dict[str, Any] = {
    "object": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 9},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "kind": {"enum": ["cat", "dog", None]},
            "score": {"type": "number", "minimum": 0, "maximum": 1},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 5},
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}, "n": {"const": 7}},
                "required": ["n"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "text": {"type": "string", "pattern": "^[a-c]{3,6}$"},
}


@pytest.fixture(scope="module")
def engine(tiny_model: Callable[..., Path]) -> Iterator[Driver]:
    made = Driver()
    made.load("m", tiny_model())
    yield made
    assert made.engine.close()


def order(engine: Driver, schema: Any, max_tokens: int = 600, **more: Any) -> GenerationOrder:
    codec = engine.engine.codec("m")
    assert codec is not None
    constraint = None if schema is None else codec.constrain(AnswerForm(json.dumps(schema)), PROMPT, is_chat=True)
    sampling = Sampling(**{"temperature": 1.0, **more.pop("sampling", {})})
    return GenerationOrder(f"r{next(NUMBER)}", "m", PROMPT, max_tokens, sampling, constraint=constraint, **more)


def renamed(asked: GenerationOrder, **change: Any) -> GenerationOrder:
    return replace(asked, request=f"r{next(NUMBER)}", **change)


def tokens(engine: Driver, asked: GenerationOrder) -> tuple[int, ...]:
    told = [event for event in engine.seen if isinstance(event, Generated) and event.request == asked.request]
    return tuple(token for event in told for token in event.token_ids)


def follows(value: Any, schema: str) -> bool:
    match schema:
        case "object":
            assert set(value) <= {"name", "age", "kind", "score"}
            assert len(value["name"]) <= 9
            assert 0 <= value.get("score", 0) <= 1
            return value["age"] in range(151) and value["kind"] in ("cat", "dog", None)
        case "array":
            return 3 <= len(value) <= 5 and all(each in (True, False) for each in value)
        case "tree":
            return value["n"] == 7 and (value.get("left") is None or follows(value["left"], schema))
    return 3 <= len(value) <= 6 and set(value) <= set("abc")


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"temperature": 2.0}, {"top_k": 5, "repetition_penalty": 1.3}])
def test_what_random_models_say_follows_their_schemas_together_in_one_batch(
    engine: Driver, sampling: dict[str, float]
) -> None:
    orders = {
        (name, seed): order(engine, schema, sampling={**sampling, "seed": seed})
        for name, schema in SCHEMAS.items()
        for seed in range(3)
    }
    ends = engine.run(*orders.values())
    for (name, _), each in orders.items():
        text, reason = ends[each.request]
        assert reason is FinishReason.STOP
        assert follows(json.loads(text), name), text


@pytest.mark.parametrize("bound", [{"top_logprobs": 2}, {}])
def test_an_answer_is_the_same_alone_in_company_and_behind_any_park(engine: Driver, bound: dict[str, int]) -> None:
    asked = order(engine, SCHEMAS["object"], sampling={"seed": 11}, **bound)
    alone, _ = engine.run(asked)[asked.request]
    whole = tokens(engine, asked)
    neighbours = [order(engine, None, 40, sampling={"seed": 3}), order(engine, SCHEMAS["tree"], sampling={"seed": 5})]
    again = renamed(asked)
    lone = [engine.run(renamed(each)) for each in neighbours]
    together = engine.run(again, *neighbours)
    assert together[again.request][0] == alone
    assert [together[each.request] for each in neighbours] == [next(iter(each.values())) for each in lone]
    for at in range(1, len(whole), 13):
        parked = renamed(asked, generated=whole[:at])
        ((_, reason),) = engine.run(parked).values()
        assert (tokens(engine, parked), reason) == (whole[at:], FinishReason.STOP)


def test_a_request_that_changes_from_its_own_lane_to_the_batch_keeps_its_place(engine: Driver) -> None:
    asked = order(engine, SCHEMAS["object"], sampling={"seed": 11})
    alone, _ = engine.run(asked)[asked.request]
    first = renamed(asked)
    engine.start(first)
    engine.until(Generated, lambda event: event.request == first.request)
    later = order(engine, SCHEMAS["object"], sampling={"seed": 12})
    engine.start(later)
    ends = engine.collect({first.request, later.request})
    told = [event.text for event in engine.seen if isinstance(event, Generated) and event.request == first.request]
    assert "".join(told) == alone
    assert follows(json.loads(ends[later.request][0]), "object")


def test_an_answer_that_is_cut_by_its_length_says_so(engine: Driver) -> None:
    asked = order(engine, SCHEMAS["object"], 5)
    text, reason = engine.run(asked)[asked.request]
    assert reason is FinishReason.LENGTH
    with pytest.raises(ValueError, match=r"."):
        json.loads(text)


def test_a_stop_word_ends_it_first(engine: Driver) -> None:
    asked = order(engine, SCHEMAS["object"], stop=('"age',))
    text, reason = engine.run(asked)[asked.request]
    assert reason is FinishReason.STOP
    assert '"name"' in text
    assert "age" not in text


def test_a_grammar_that_grows_too_large_on_the_way_fails_its_request_alone(engine: Driver) -> None:
    branches = [
        {"type": "object", "properties": {f"p{n}": {"type": "string", "pattern": ".*x.*"} for n in range(width)}}
        for width in range(60)
    ]
    bad = order(engine, {"anyOf": branches}, sampling={"seed": 1})
    good = order(engine, SCHEMAS["array"])
    ends = engine.run(bad, good)
    assert ends[good.request][1] is FinishReason.STOP
    failure = ends[bad.request][1]
    assert isinstance(failure, InvalidRequest)
    assert "could not be held to the form" in failure.message
    after = renamed(good)
    assert engine.run(after)[after.request] == ends[good.request]
