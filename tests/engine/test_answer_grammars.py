"""What grammars let a model say: JSON, calls in each family's format, reasoning first; mlx-lm's parsers read it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from omlxd.core.answer_form import AnswerForm
from omlxd.core.errors import InvalidRequest
from omlxd.core.reply import ANSWER, TOOL_CALL, ReplySplitter
from omlxd.engine.grammars import Guide, check_schema
from omlxd.engine.text import ChatCodec
from tests.engine.test_chat_templates import TEMPLATE, codec_of

PET = '{"type":"object","properties":{"kind":{"enum":["cat","dog"]},"age":{"type":"integer"}},"required":["kind"]}'
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CASES = {  # by parser: a template it is known by, one call as such a model writes it, and two
    "json_tools": (
        TEMPLATE,
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 2}}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "mistral": (
        "[TOOL_CALLS][ARGS]",
        '[TOOL_CALLS]weather[ARGS]{"city": "Bern", "days": 2}',
        "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}",
    ),
    "old mistral": (
        "[TOOL_CALLS]",
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Bern", "days": 2}}]',
        '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]',
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Bern", "days": 2}<|tool_call_end|><|tool_calls_section_end|>',
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=",
        "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    "minimax_m2": (
        "<minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Bern</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
        '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    ),
    "pythonic": (
        "<|tool_call_start|>",
        '<|tool_call_start|>[weather(city="Bern", days=2)]<|tool_call_end|>',
        "<|tool_call_start|>[now(), now()]<|tool_call_end|>",
    ),
    "glm47": (
        "<arg_key>",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>",
        "<tool_call>now\n</tool_call>\n<tool_call>now\n</tool_call>",
    ),
}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ChatCodec]:
    """A codec for this template, made once."""
    root = tmp_path_factory.mktemp("codecs")

    @cache
    def made(template: str = TEMPLATE, thinks: bool = False) -> ChatCodec:
        return codec_of(root / f"m{len(list(root.iterdir()))}", template, thinks=thinks)

    return made


def guide(codec: ChatCodec, form: AnswerForm, prompt: str = "hi", *, is_chat: bool = True) -> Guide:
    constraint = codec.constrain(form, codec.encode_text(prompt), is_chat=is_chat)
    assert constraint is not None
    return constraint.begin(())


def takes(codec: ChatCodec, walk: Guide, text: str) -> str:
    """The part of the text that the grammar lets the model say."""
    said: list[int] = []
    for token in codec.encode_text(text):
        allowed = walk.allowed(codec.vocab_size)
        if allowed is None or not allowed[token]:
            break
        walk.take(len(said), token)
        said.append(token)
    assert walk.problem is None
    return "".join(codec.token_text(token) for token in said)


def may_end(codec: ChatCodec, walk: Guide) -> bool:
    allowed = walk.allowed(codec.vocab_size)
    return walk.is_complete or (allowed is not None and any(allowed[end] for end in codec.end_ids))


def calls_in(codec: ChatCodec, text: str, tools: Any) -> list[tuple[str, Any]]:
    splitter = ReplySplitter(codec.reply_format([0], with_tools=True))
    parts = [*splitter.add(text), *splitter.finish()]
    assert not [part for part in parts if part.state == ANSWER and part.text.strip()]
    found = [call for part in parts if part.state == TOOL_CALL for call in codec.parse_tool_calls(part.text, tools)]
    return [(call.name, json.loads(call.arguments)) for call in found]


@pytest.mark.parametrize("parser", CASES)
def test_a_forced_call_is_one_that_the_family_writes_and_its_parser_reads(
    make: Callable[..., ChatCodec], parser: str
) -> None:
    template, one, two = CASES[parser]
    codec, tools = make(template), (WEATHER, NOW)
    for text, expected in (
        (one, [("weather", {"city": "Bern", "days": 2})]),
        (two, [("now", {}), ("now", {})]),
    ):
        walk = guide(codec, AnswerForm(tools=tools, must_call=True))
        assert takes(codec, walk, text) == text
        assert may_end(codec, walk)
        assert calls_in(codec, text, tools) == expected
    assert takes(codec, guide(codec, AnswerForm(tools=tools, must_call=True)), "I think so") == ""
    assert not may_end(codec, guide(codec, AnswerForm(tools=tools, must_call=True)))


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "string"},
        {"anyOf": [{"type": "string"}, {"type": "object"}]},
        {"$ref": "#/$defs/x", "$defs": {"x": {}}},
    ],
)
def test_arguments_are_an_object_whatever_their_schema_says(make: Callable[..., ChatCodec], schema: Any) -> None:
    codec, before = make(), '<tool_call>\n{"name": "f", "arguments": '
    form = AnswerForm(tools=({"type": "function", "function": {"name": "f", "parameters": schema}},), must_call=True)
    assert takes(codec, guide(codec, form), before + '"x"') == before
    assert takes(codec, guide(codec, form), before + "{}}\n</tool_call>") == before + "{}}\n</tool_call>"


@pytest.mark.parametrize("parser", CASES)
def test_of_one_call_only_there_is_no_second(make: Callable[..., ChatCodec], parser: str) -> None:
    template, one, two = CASES[parser]
    codec = make(template)
    walk = guide(codec, AnswerForm(tools=(WEATHER,), must_call=True, one_call=True))
    assert takes(codec, walk, one) == one
    assert may_end(codec, walk)
    walk = guide(codec, AnswerForm(tools=(NOW,), must_call=True, one_call=True))
    assert len(takes(codec, walk, two)) < len(two) * 0.7
    assert takes(codec, guide(codec, AnswerForm(tools=(NOW,), must_call=True, one_call=True)), one) != one


@pytest.mark.parametrize("required", [["n"], []])
@pytest.mark.parametrize("parser", CASES)
def test_whatever_a_model_likes_best_its_forced_call_can_be_read(
    make: Callable[..., ChatCodec], parser: str, required: list[str]
) -> None:
    codec = make(CASES[parser][0])
    properties = {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "unit": {"enum": ["C", "F"]}}
    properties |= {"on": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "NUMBER_dial", "parameters": schema}}]
    constraint = codec.constrain(AnswerForm(tools=tuple(tools), must_call=True, one_call=True), [0], is_chat=True)
    assert constraint is not None
    for seed in range(8):
        walk, chance, said = constraint.begin(()), random.Random(seed), ""
        for position in range(2000):
            if walk.is_complete:
                break
            allowed = walk.allowed(codec.vocab_size)
            assert allowed is not None
            token = chance.choice(allowed.nonzero()[0].tolist())
            walk.take(position, token)
            said += codec.token_text(token)
        assert walk.is_complete
        ((name, arguments),) = calls_in(codec, said, tools)
        assert name == "NUMBER_dial"
        assert arguments.get("n", 0 if not required else None) in range(10)
        assert arguments.get("unit", "C") in ("C", "F")
        assert arguments.get("on", True) in (True, False)


def test_calls_that_are_not_forced_are_free_text_until_their_marker(make: Callable[..., ChatCodec]) -> None:
    codec, one = make(), CASES["json_tools"][1]
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    for form in (AnswerForm(tools=(WEATHER,), one_call=True), AnswerForm(tools=(strict,))):
        for text in ("Well, <tool or {} not.", f"I look.\n{one}"):
            walk = guide(codec, form)
            assert takes(codec, walk, text) == text
            assert may_end(codec, walk)
        wrong = one.replace("Bern", "Bern").replace('"days"', '"hours"')
        assert takes(codec, guide(codec, form), wrong) == wrong[: wrong.index("hours")]
    assert takes(codec, guide(codec, AnswerForm(tools=(strict,))), f"{one}{one} Done.") == f"{one}{one} Done."
    assert takes(codec, guide(codec, AnswerForm(tools=(WEATHER,), one_call=True)), f"{one} Done.") == one


def test_an_answer_with_a_schema_is_json_or_a_call(make: Callable[..., ChatCodec]) -> None:
    codec, pet, one = make(), '{"kind": "cat", "age": 3}', CASES["json_tools"][1]
    for text in (pet, one):
        assert takes(codec, guide(codec, AnswerForm(PET, (WEATHER,))), text) == text
    assert takes(codec, guide(codec, AnswerForm(PET)), one) == ""
    assert takes(codec, guide(codec, AnswerForm(PET)), '{"kind": "cow"}') == '{"kind": "c'


def test_json_is_complete_with_its_last_brace_and_has_no_room_for_endless_blanks(
    make: Callable[..., ChatCodec],
) -> None:
    codec = make()
    walk = guide(codec, AnswerForm(PET))
    assert takes(codec, walk, '{\n    "kind": "dog"\n}') == '{\n    "kind": "dog"\n}'
    assert walk.is_complete
    assert walk.allowed(codec.vocab_size) is None
    assert takes(codec, guide(codec, AnswerForm(PET)), "{" + " " * 9) == "{ "


@pytest.mark.parametrize(
    ("prompt", "text", "said"),
    [
        ("<think>", "hm { so</think>\n\n{}", "hm { so</think>\n\n{}"),
        ("<think>", "{}", "{}"),  # still a thought: see below
        ("hi", "<think>hm</think>{}", "<think>hm</think>{}"),
        ("hi", "{}", "{}"),
        ("hi", "hm", ""),
        ("<think>\n\n</think>\n\n", "<think>", ""),
        ("<think>\n\n</think>\n\n", "{}", "{}"),
    ],
)
def test_a_model_reasons_before_its_json_where_its_prompt_lets_it(
    make: Callable[..., ChatCodec], prompt: str, text: str, said: str
) -> None:
    codec, any_object = make(thinks=True), AnswerForm('{"type":"object"}')
    walk = guide(codec, any_object, prompt)
    assert takes(codec, walk, text) == said
    assert may_end(codec, walk) == (said.endswith("{}") and (prompt, text) != ("<think>", "{}"))
    assert takes(codec, guide(codec, any_object, prompt, is_chat=False), "<think>") == ""


@pytest.mark.parametrize(
    ("template", "form", "words"),
    [
        ("<start_function_call>", AnswerForm(tools=(NOW,), must_call=True), "cannot be forced"),
        ("{{ messages }}", AnswerForm(tools=(NOW,), must_call=True), "cannot be forced"),
        (
            CASES["mistral"][0],
            AnswerForm(tools=({"function": {"name": "a b"}},), must_call=True),
            "cannot write",
        ),
        (
            CASES["glm47"][0],
            AnswerForm(tools=({"function": {"name": "f", "strict": True}},), must_call=True),
            "no `strict`",
        ),
        (
            CASES["qwen3_coder"][0],
            AnswerForm(tools=({"function": {"name": "f", "parameters": {"type": "array"}}},), must_call=True),
            "one by one by their names",
        ),
        (TEMPLATE, AnswerForm('{"type":"objekt"}', param="response_format"), "no grammar"),
        (TEMPLATE, AnswerForm('{"$ref":"#"}', param="response_format"), "nothing but itself"),
    ],
)
def test_a_form_that_the_model_cannot_be_held_to_is_refused_by_the_fields_name(
    make: Callable[..., ChatCodec], template: str, form: AnswerForm, words: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        make(template).constrain(form, [0], is_chat=True)
    assert words in refused.value.message
    assert refused.value.details["param"] == form.param
    assert refused.value.hint


def test_one_call_of_a_model_that_no_grammar_can_hold_is_left_to_who_hears_it(make: Callable[..., ChatCodec]) -> None:
    form = AnswerForm(tools=(NOW,), one_call=True)
    assert make("<start_function_call>").constrain(form, [0], is_chat=True) is None


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({}, None),
        ({"type": "object", "title": "x", "default": {}}, None),
        ({"type": "array", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"type": "null"}}}, None),
        ({"anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}]}, None),
        ({"type": "objekt"}, "`type` cannot be objekt"),
        ({"type": "array", "uniqueItems": True}, "`uniqueItems` is not supported"),
        ({"not": {}}, "`not` is not supported"),
        ({"type": "string", "format": "int32"}, "`format` cannot be int32"),
        ({"enum": []}, "nothing can follow it"),
        ({"type": "array", "minItems": 2, "maxItems": 1}, "nothing can follow it: minItems (2) is greater"),
        ({"oneOf": [{"type": "string"}, {"enum": ["a"]}]}, "anyOf"),
        ({"$ref": "#/$defs/x"}, "does not exist"),
        ({"$ref": "https://example.com/x.json"}, "example.com"),
        ({"type": "string", "pattern": "(?=a)"}, "no regular expression"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
    ],
)
def test_a_schema_is_judged_without_a_model(schema: Any, problem: str | None) -> None:
    found = check_schema(json.dumps(schema))
    assert (found is None) if problem is None else (found is not None and problem in found)
    unsupported = problem is not None and (
        "not supported" in problem or problem in ("`format` cannot be int32", "anyOf")
    )
    assert (check_schema(json.dumps(schema), lenient=True) is None) == (problem is None or unsupported)


@pytest.mark.parametrize(
    ("blank", "is_allowed"),
    [
        *((blank, True) for blank in (" ", "\t", "\n", "\n    ", "\n\t\t")),
        *((blank, False) for blank in ("  ", "\n\n", " \n", "\n\t ", "\n \t", "\n" + 33 * " ", "\n" + 9 * "\t")),
    ],
)
def test_between_any_two_tokens_of_json_is_one_blank_or_a_line_break_with_its_indentation(
    make: Callable[..., ChatCodec], blank: str, is_allowed: bool
) -> None:
    codec = make()
    tokens = ("{", '"a"', ":", "[", "1", ",", "2", "]", ",", '"b"', ":", "true", "}")
    for at in range(1, len(tokens)):
        text = "".join(tokens[:at]) + blank + tokens[at]
        walk = guide(codec, AnswerForm('{"type":"object"}'))
        assert (takes(codec, walk, text) == text) is is_allowed


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"maxLenght": 2}, "`maxLenght` is no keyword of JSON Schema; did you mean `maxLength`?"),
        ({"properties": {"a": {"propertis": {}}}}, "`propertis` in `properties.a`"),
        ({"items": {"anyOf": [{}, {"requird": []}]}}, "`requird` in `items.anyOf.1`"),
        ({"$defs": {"a": {"minimun": 1}}}, "`minimun` in `$defs.a`"),
        (
            {"components": {"schemas": {"a": {"type": "string", "patern": "a"}}}, "$ref": "#/components/schemas/a"},
            "patern",
        ),
        ({"components": {}}, "components"),
    ],
)
def test_a_word_that_is_no_keyword_is_refused_where_the_schema_has_to_be_followed(schema: Any, problem: str) -> None:
    assert problem in (check_schema(json.dumps(schema)) or "")
    assert check_schema(json.dumps(schema), lenient=True) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"maxLenght": {"type": "string"}}, "required": ["maxLenght"]},
        {"enum": [{"maxLenght": 1}]},
        {"const": {"maxLenght": 1}},
        {"default": {"maxLenght": 1}, "examples": [{"maxLenght": 1}]},
        {"x-order": 1, "title": "T", "$comment": "c", "readOnly": True, "nullable": True},
        {"$ref": "#/components/schemas/a", "components": {"schemas": {"a": {"type": "string"}}}},
        {"additionalProperties": False, "items": True},
    ],
)
def test_names_and_values_and_notes_are_no_keywords(schema: Any) -> None:
    assert check_schema(json.dumps(schema)) is None


def test_a_schema_nested_without_end_is_refused_and_breaks_nothing() -> None:
    assert check_schema('{"items":' * 3000 + "{}" + "}" * 3000)


def test_the_vocabularys_tree_is_built_once_and_its_size_is_told(make: Callable[..., ChatCodec]) -> None:
    codec, grown = make("a template of its own"), []
    codec.grammars.grown = grown.append  # type: ignore[assignment]
    first = codec.constrain(AnswerForm(PET), [0], is_chat=True)
    assert codec.constrain(AnswerForm(PET), [1], is_chat=True) is first
    assert codec.constrain(AnswerForm('{"type":"null"}'), [1], is_chat=True) is not first
    assert len(grown) == 1
