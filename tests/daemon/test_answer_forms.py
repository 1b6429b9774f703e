"""Forms of answers between the request and the engine: what is refused early, and what outlives a park."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omlxd.core.answer_form import ANY_OBJECT, AnswerForm
from omlxd.core.errors import InvalidRequest
from omlxd.core.states import FinishReason
from omlxd.daemon.answer_forms import settle
from omlxd.daemon.pool import EnginePool

LONG = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 30, "maxItems": 30}


def tool(name: str, parameters: Any, *, strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


@pytest.mark.mlx
async def test_a_parked_answer_goes_on_in_its_form_as_if_nothing_had_been(tiny_model: Callable[..., Path]) -> None:
    async with EnginePool({"m": tiny_model()}) as pool:

        def start() -> Any:
            form = AnswerForm(json.dumps(LONG))
            return pool.generate("m", prompt="hi", max_tokens=4000, temperature=1.0, seed=7, form=form)

        alone = await start().text()
        generation, text = start(), ""
        async for chunk in generation:
            text += chunk.text
            if generation.parks < 3 and generation.generated_tokens >= 20 * (generation.parks + 1):
                await pool.levers.park(generation.id, "a test asks for it")
        assert generation.parks >= 1
        assert (text, generation.finish_reason) == (alone, FinishReason.STOP)
        assert len(json.loads(text)) == 30


@pytest.mark.parametrize(
    "form",
    [
        AnswerForm(),
        AnswerForm(tools=(tool("f", {"type": "objekt"}),)),  # nobody holds its calls to anything
        AnswerForm(must_call=True),
    ],
)
async def test_what_asks_for_nothing_is_free(form: AnswerForm) -> None:
    assert await settle(form, "schema", {}) is None


@pytest.mark.parametrize(
    ("form", "field"),
    [
        (AnswerForm('{"type":"objekt"}'), "schema"),
        (AnswerForm('{"not":{}}'), "schema"),
        (AnswerForm(tools=(tool("f", {"not": {}}, strict=True),)), "tools[3]"),
        (AnswerForm(tools=(tool("f", {"type": "string"}, strict=True),)), "tools[3]"),
        (AnswerForm(ANY_OBJECT, tools=(tool("f", {"not": {}}, strict=True),)), "tools[3]"),
    ],
)
async def test_what_cannot_be_followed_and_has_to_be_is_refused_by_its_field(form: AnswerForm, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await settle(form, "schema", {"f": "tools[3]"})
    assert refused.value.details["param"] == field
    assert refused.value.message.startswith(f"`{field}`: ")
    assert refused.value.hint


async def test_of_parameters_that_are_not_strict_what_is_no_schema_at_all_becomes_any_object() -> None:
    supported, passed_over = {"type": "object", "properties": {}}, {"type": "object", "not": {}}
    wrong = {"type": "object", "properties": {"a": {"type": "objekt"}}}
    tools = (tool("a", supported), tool("b", passed_over), tool("c", wrong), tool("d", None))
    form = await settle(AnswerForm(tools=tools, must_call=True), "schema", {})
    assert form is not None
    found = [each["function"]["parameters"] for each in form.tools]
    assert found == [supported, passed_over, json.loads(ANY_OBJECT), None]
