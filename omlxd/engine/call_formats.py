"""How families of models write their tool calls, as far as that can be put into a grammar; read by mlx-lm's parsers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ANY_NAME = r"[\w.:/-]+"
WORD = r"[\w-]+"


@dataclass(frozen=True, slots=True)
class Tagged:
    """Arguments with a tag each; a text stands as it is, anything else as JSON.

    Attributes:
        before: before a value; `KEY` stands for the argument's name.
        behind: behind it; a text ends with the first one.
    """

    before: str
    behind: str


@dataclass(frozen=True, slots=True)
class CallFormat:
    """What stands around and between calls; a line break in these texts may be left out, and `NUMBER` is some digits.

    Attributes:
        start, end: the markers that mlx-lm's parser goes by, around a section of calls.
        before: before the arguments of a call; `NAME` stands for the tool's name.
        behind: behind them.
        opening, closing: around the calls of a section.
        between: between the calls of a section; None when each has a section of its own.
        names: a pattern of the names of tools that can be written.
        tagged: how each argument is written.
        keywords: arguments are those of a call in Python; without this and `tagged` they are one JSON object.
    """

    start: str
    end: str
    before: str
    behind: str
    opening: str = ""
    closing: str = ""
    between: str | None = None
    names: str = ANY_NAME
    tagged: Tagged | None = None
    keywords: bool = False


NUMBER = "\0"
"""Stands for a number in a format; no name of a tool holds it."""
_FORMATS: Mapping[str, CallFormat] = {
    "json_tools": CallFormat("<tool_call>", "</tool_call>", '\n{"name": "NAME", "arguments": ', "}\n"),
    "kimi_k2": CallFormat(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        f"<|tool_call_begin|>functions.NAME:{NUMBER}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        between="",
    ),
    "qwen3_coder": CallFormat(
        "<tool_call>",
        "</tool_call>",
        "\n<function=NAME>\n",
        "</function>\n",
        tagged=Tagged("<parameter=KEY>\n", "\n</parameter>\n"),
    ),
    "minimax_m2": CallFormat(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        '<invoke name="NAME">\n',
        "</invoke>\n",
        opening="\n",
        between="",
        tagged=Tagged('<parameter name="KEY">', "</parameter>\n"),
    ),
    "glm47": CallFormat(
        "<tool_call>",
        "</tool_call>",
        "NAME\n",
        "",
        names=WORD,
        tagged=Tagged("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    "pythonic": CallFormat(
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        "NAME(",
        ")",
        opening="[",
        closing="]",
        between=", ",
        names=r"[A-Za-z_][\w.]*",
        keywords=True,
    ),
}
_MISTRAL = CallFormat("[TOOL_CALLS]", "", "NAME[ARGS]", "", names=WORD)
_OLD_MISTRAL = CallFormat(
    "[TOOL_CALLS]",
    "",
    '{"name": "NAME", "arguments": ',
    "}",
    opening="[",
    closing="]",
    between=", ",
)


def call_format(parser: str, chat_template: Any) -> CallFormat | None:
    """The format that mlx-lm's parser of this name reads and this template's model writes; None when unknown."""
    if parser == "mistral":
        return _MISTRAL if "[ARGS]" in str(chat_template) else _OLD_MISTRAL
    return _FORMATS.get("glm47" if parser == "laguna" else parser)
