"""Chat templates and tool parsers of real model families, over a tiny tokenizer: tools in, calls and reasoning out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omlxd.core.errors import InvalidRequest
from omlxd.core.reply import ANSWER, REASONING, TOOL_CALL
from omlxd.engine.model_folders import write_json
from omlxd.engine.text import ChatCodec

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
# What the templates of Qwen, Hermes and their kin do, in short.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for tool_call in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': (tool_call.function or tool_call).name, 'arguments': tool_call.function.arguments} | tojson }}"
    "</tool_call>{% endfor %}{# tool_call.name #}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think></think>"
    "{% elif enable_thinking %}<think>{% endif %}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]


def codec_of(folder: Path, template: str | None, *, thinks: bool) -> ChatCodec:
    """A byte tokenizer with this template and, if it thinks, tokens for it."""
    from mlx_lm.tokenizer_utils import load
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = [*SPECIAL, *(["<think>", "</think>"] if thinks else [])]
    vocab = {token: at for at, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    write_json(folder / "tokenizer_config.json", config | ({"chat_template": template} if template else {}))
    return ChatCodec(load(folder), len(vocab), None)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., ChatCodec]:
    return lambda template=TEMPLATE, thinks=False: codec_of(tmp_path / "m", template, thinks=thinks)


def test_the_bytes_of_half_a_character_are_told(make: Callable[..., ChatCodec]) -> None:
    codec, text = make(), "é€ 🙂"
    tokens = codec.encode_text(text)
    assert len(tokens) == len(text.encode())
    assert b"".join(codec.token_bytes(token) or b"?" for token in tokens) == text.encode()
    (end,) = codec.end_ids
    assert codec.token_bytes(end) == b"<|im_end|>"


def test_the_bytes_of_a_byte_fallback_are_told(tmp_path: Path) -> None:
    from mlx_lm.tokenizer_utils import load
    from tokenizers import Tokenizer, decoders, models

    vocab = {"<unk>": 0, "a": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "a"})
    codec = ChatCodec(load(tmp_path), len(vocab), None)
    assert [codec.token_bytes(token) for token in codec.encode_text("aé")] == [b"a", b"\xc3", b"\xa9"]


def test_only_a_model_with_marks_for_it_reasons(tmp_path: Path) -> None:
    assert codec_of(tmp_path / "thinks", TEMPLATE, thinks=True).reasons
    assert not codec_of(tmp_path / "answers", TEMPLATE, thinks=False).reasons


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"])
def test_a_template_that_leaves_earlier_calls_out_refuses_them(
    make: Callable[..., ChatCodec], template: str | None
) -> None:
    messages = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [CALLED]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    ]
    with pytest.raises(InvalidRequest, match="leaves calls of tools out") as refused:
        make(template).encode_chat(messages)
    assert refused.value.details["param"] == "messages"


def text_of(codec: ChatCodec, ids: list[int]) -> str:
    return "".join(codec.token_text(token) for token in ids)


HELLO = [{"role": "user", "content": "hello"}]
CALLED = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}


def test_tools_and_earlier_calls_are_in_the_prompt(make: Callable[..., ChatCodec]) -> None:
    codec = make()
    messages = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [CALLED]},
        {"role": "tool", "content": "sun"},
    ]
    prompt = text_of(codec, codec.encode_chat(messages, TOOLS))
    assert '"name": "weather", "parameters"' in prompt
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>' in prompt
    assert "<|im_start|>tool\nsun<|im_end|>" in prompt
    assert "parameters" not in text_of(codec, codec.encode_chat(messages))


def test_a_text_beyond_the_context_is_counted_without_a_word_on_stderr(
    make: Callable[..., ChatCodec], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    codec = make()
    codec._tokenizer.model_max_length = 10
    assert len(codec.encode_text("x" * 100)) == 100
    assert len(codec.encode_chat(HELLO)) > 10
    assert (caplog.text, capfd.readouterr().err) == ("", "")


BEGUN = {"role": "assistant", "content": "Good mor"}


@pytest.mark.parametrize(
    ("last", "end"),
    [
        (BEGUN, "<|im_start|>assistant\nGood mor"),
        (BEGUN | {"content": ""}, "<|im_end|>\n<|im_start|>assistant\n"),
        (BEGUN | {"role": "user"}, "Good mor<|im_end|>\n<|im_start|>assistant\n"),
        (BEGUN | {"tool_calls": [CALLED]}, "</tool_call><|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_the_answer_goes_on_from_a_last_message_of_the_assistant(
    make: Callable[..., ChatCodec], last: dict[str, Any], end: str
) -> None:
    codec = make()
    prompt = text_of(codec, codec.encode_chat([*HELLO, last]))
    assert prompt.removesuffix("<think></think>").endswith(end)


def test_without_a_template_too_the_answer_goes_on_from_a_last_message_of_the_assistant(
    make: Callable[..., ChatCodec],
) -> None:
    codec = make(None)
    assert text_of(codec, codec.encode_chat(HELLO)) == "user: hello\nassistant:"
    assert text_of(codec, codec.encode_chat([*HELLO, BEGUN])) == "user: hello\nassistant: Good mor"


def test_a_template_that_writes_no_answers_cannot_go_on_from_one(make: Callable[..., ChatCodec]) -> None:
    with pytest.raises(InvalidRequest, match="chat template refuses"):
        make("{{ messages[0].content }}").encode_chat([*HELLO, BEGUN])


def test_a_model_without_tools_refuses_them_by_name(make: Callable[..., ChatCodec]) -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(InvalidRequest) as refused:
        make(plain).encode_chat(HELLO, TOOLS)
    assert refused.value.details["param"] == "tools"
    assert "knows no tools" in refused.value.message


def test_tools_are_refused_with_the_reason_when_it_is_the_models_calls_that_are_not_known(
    make: Callable[..., ChatCodec],
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        make("{%- if tools is defined %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}").encode_chat(
            HELLO, TOOLS
        )
    assert refused.value.details["param"] == "tools"
    assert "writes its tool calls is not known" in refused.value.message


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no system') }}", "{{ messages[0].content + none }}", "{{ messages[7].content.x }}"],
)
def test_a_template_that_fails_is_the_requests_fault(make: Callable[..., ChatCodec], template: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template refuses"):
        make(template).encode_chat(HELLO)


def test_a_template_that_quotes_a_message_is_not_repeated(make: Callable[..., ChatCodec]) -> None:
    with pytest.raises(InvalidRequest, match="quote one of them") as refused:
        make("{{ raise_exception('no ' + messages[0].content) }}").encode_chat(
            [{"role": "user", "content": "a secret"}]
        )
    assert "secret" not in refused.value.message


def test_a_template_without_reasoning_has_plain_replies(make: Callable[..., ChatCodec]) -> None:
    codec = make()
    assert codec.reply_format(codec.encode_chat(HELLO), with_tools=False).is_plain
    with_tools = codec.reply_format(codec.encode_chat(HELLO), with_tools=True)
    assert with_tools.transitions[ANSWER] == [("<tool_call>", TOOL_CALL)]
    assert with_tools.transitions[TOOL_CALL] == [("</tool_call>", ANSWER)]


@pytest.mark.parametrize(("thinking", "start"), [(None, REASONING), (True, REASONING), (False, ANSWER)])
def test_a_reply_begins_where_the_prompt_has_left_it(
    make: Callable[..., ChatCodec], thinking: bool | None, start: str
) -> None:
    codec = make(thinks=True)
    prompt = codec.encode_chat(HELLO, (), thinking)
    reply_format = codec.reply_format(prompt, with_tools=True)
    assert reply_format.start == start
    assert ("</think>", ANSWER) in reply_format.transitions[REASONING]
    assert ("<tool_call>", TOOL_CALL) in reply_format.transitions[REASONING]


@pytest.mark.parametrize(
    ("parser", "text", "arguments"),
    [
        ("json_tools", '{"name": "weather", "arguments": {"city": "Bern"}}', {"city": "Bern"}),
        ("json_tools", '{"name": "weather"}', {}),
        ("mistral", 'weather[ARGS]{"city": "Bern"}', {"city": "Bern"}),
        ("pythonic", "[weather(city='Bern')]", {"city": "Bern"}),
        ("qwen3_coder", "<function=weather>\n<parameter=city>\nBern\n</parameter>\n</function>", {"city": "Bern"}),
    ],
)
def test_the_parsers_of_several_families_give_a_name_and_an_object(
    make: Callable[..., ChatCodec], parser: str, text: str, arguments: dict[str, Any]
) -> None:
    codec = with_parser(make(), parser)
    (call,) = codec.parse_tool_calls(text, TOOLS)
    assert (call.name, json.loads(call.arguments)) == ("weather", arguments)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"name": ""}', '{"arguments": {}}', '{"name": "x", "arguments": [1]}']
)
def test_what_is_no_call_is_none(make: Callable[..., ChatCodec], text: str) -> None:
    assert make().parse_tool_calls(text, TOOLS) == []


def with_parser(codec: ChatCodec, name: str) -> ChatCodec:
    import importlib

    codec._tokenizer._tool_parser = importlib.import_module(f"mlx_lm.tool_parsers.{name}").parse_tool_call
    return codec
