"""The grammar of an answer: reasoning first where the model reasons, then JSON, or calls in the model's own format.

Written in llguidance's dialect of Lark. A marker that is one token of its own (`<tool_call>`) stands there as that
token, which no free text can hold; any other marker is text, and free text before it ends with its first appearance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omlxd.core.answer_form import AnswerForm
from omlxd.core.errors import InvalidRequest
from omlxd.engine.call_formats import NUMBER, CallFormat, Tagged
from omlxd.engine.grammars import json_rule

NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The parameters of a function that names none."""
_MARKERS = re.compile(rf"(<[^<>\s]+>|\[[A-Z_]+\]|{NUMBER}|\n)")
_KEY = re.compile(r"[^\s<>\"']+")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_QUOTED = r"""/"([^"\\\n]|\\["\\nt])*"/"""
"""A text as both Python and JSON write it."""
_Argument = tuple[str, dict[str, Any], bool]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How a model reasons before its answer.

    Attributes:
        start: the marker before it.
        end: the marker behind it.
        begun: the prompt has written `start` already.
    """

    start: str
    end: str
    begun: bool


@dataclass(frozen=True, slots=True)
class Speech:
    """How a model writes its answers.

    Attributes:
        token_of: the id of a marker that is one token of its own, None of any other.
        reasoning: None when it does not reason before this answer.
        calls: how it writes tool calls; None when that cannot be put into a grammar.
    """

    token_of: Callable[[str], int | None]
    reasoning: Reasoning | None = None
    calls: CallFormat | None = None


def grammar_of(form: AnswerForm, speech: Speech) -> str:
    """The grammar of an answer in this form.

    Raises:
        InvalidRequest: the model's format of tool calls, or what the arguments are to follow, cannot be held to.
    """
    return _Writer(form, speech).written()


class _Writer:
    """Collects rules; a term is what may stand in one."""

    def __init__(self, form: AnswerForm, speech: Speech) -> None:
        self._form, self._speech = form, speech
        self._rules: dict[str, str] = {}

    def written(self) -> str:
        start = self._answer()
        if (reasoning := self._speech.reasoning) is not None:
            self._rules["thought"] = f"{self._text_before(reasoning.end)} BREAK BREAK"
            first = "thought" if reasoning.begun else f"({self._term(reasoning.start)} thought)?"
            start = f"{first} ({start})"
        fixed = {"TEXT": r"/(.|\n)*/", "BREAK": r"/\n?/", "NUMBER": "/[0-9]{1,3}/", "QUOTED": _QUOTED}
        return "".join(f"{name}: {rule}\n" for name, rule in {"start": start, **self._rules, **fixed}.items())

    def _answer(self) -> str:
        form = self._form
        if form.schema is not None:
            self._rules["answer"] = json_rule(json.loads(form.schema))
        if form.schema is not None and not form.tools:
            return "answer"
        written = self._speech.calls
        if written is None:
            raise self._refused("the format in which this model writes its tool calls cannot be forced")
        section = self._section(written)
        opened = f"{self._term(written.start)} {section}"
        several = written.between is None and not form.one_call
        calls = f"{opened} (BREAK {opened})*" if several else opened
        if form.must_call:
            return f"BREAK {calls}"
        if form.schema is not None:
            return f"answer | {calls}"
        begun = f"{self._text_before(written.start)} {section}"
        return f"TEXT | {begun}" if form.one_call else f"({begun})* TEXT"

    def _section(self, written: CallFormat) -> str:
        """Everything behind the start marker of a section of calls."""
        calls = [self._call(written, at, tool["function"]) for at, tool in enumerate(self._form.tools)]
        self._rules["call"] = " | ".join(calls)
        several = written.between is not None and not self._form.one_call
        more = f"({self._term(written.between or '')} call)*" if several else ""
        parts = (self._term(written.opening), "call", more, self._term(written.closing), self._term(written.end))
        self._rules["section"] = " ".join(part for part in parts if part)
        return "section"

    def _call(self, written: CallFormat, at: int, function: Mapping[str, Any]) -> str:
        name, schema = str(function["name"]), function.get("parameters") or NO_ARGUMENTS
        if not re.fullmatch(written.names, name, re.ASCII):
            raise self._refused("one of the tools has a name that this model cannot write")
        if function.get("strict") and (written.tagged or written.keywords):
            raise self._refused("the format of this model's tool calls has no `strict`")
        if written.keywords:
            arguments = self._keywords(f"argument_{at}", schema)
        elif written.tagged is not None:
            arguments = self._tagged(written.tagged, f"argument_{at}", schema)
        else:
            an_object = {**schema, "type": "object"}  # whatever else the schema would let them be
            self._rules[f"arguments_{at}"] = json_rule(an_object, lenient=not function.get("strict"))
            arguments = f"arguments_{at}"
        before = self._term(written.before.replace("NAME", name))
        self._rules[f"call_{at}"] = " ".join(filter(None, (before, arguments, self._term(written.behind))))
        return f"call_{at}"

    def _tagged(self, tagged: Tagged, rule: str, schema: Mapping[str, Any]) -> str:
        """Each argument in its tags, in order. The parsers take what has no single type for a text."""
        terms, behind = [], self._term(tagged.behind)
        for number, (key, value, is_needed) in enumerate(self._arguments(schema, _KEY)):
            if words := _words(value):
                told = f"({' | '.join(map(json.dumps, words))}) {behind}"
            elif value.get("type", "string") == "string":
                told = self._text_before(tagged.behind)
            else:
                told = f"{json_rule(value, lenient=True)} {behind}"
            self._rules[f"{rule}_{number}"] = f"{self._term(tagged.before.replace('KEY', key))} {told}"
            terms.append(f"{rule}_{number}" if is_needed else f"({rule}_{number})?")
        return " ".join(terms)

    def _keywords(self, rule: str, schema: Mapping[str, Any]) -> str:
        """Arguments of a call in Python: first those that are needed, then the others."""
        needed: list[str] = []
        others: list[str] = []
        for number, (key, value, is_needed) in enumerate(self._arguments(schema, _IDENTIFIER)):
            if words := _words(value):
                told = f"({' | '.join(json.dumps(json.dumps(word)) for word in words)})"
            elif value.get("type", "string") == "string":
                told = "QUOTED"
            else:
                told = json_rule(value, lenient=True)
            self._rules[f"{rule}_{number}"] = f"{json.dumps(f'{key}=')} {told}"
            (needed if is_needed else others).append(f"{rule}_{number}")
        comma = '", "'
        if needed:
            return " ".join([f" {comma} ".join(needed), *(f"({comma} {each})?" for each in others)])
        chains = []  # whichever of the others comes first has no comma before it
        for at, first in enumerate(others):
            chains.append(" ".join([first, *(f"({comma} {each})?" for each in others[at + 1 :])]))
        return f"({' | '.join(chains)})?" if chains else ""

    def _arguments(self, schema: Mapping[str, Any], keys: re.Pattern[str]) -> Iterator[_Argument]:
        """Name, schema and whether it is needed, of each."""
        properties = schema.get("properties") or {}
        if schema.get("type", "object") != "object" or not all(map(keys.fullmatch, properties)):
            raise self._refused("this model writes arguments one by one by their names, and has none for these")
        shared = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
        for key, value in properties.items():
            yield key, {**value, **shared} if isinstance(value, Mapping) else {}, key in schema.get("required", ())

    def _text_before(self, text: str) -> str:
        """Any text, and `text` behind it."""
        marker = next(part for part in _MARKERS.split(text) if part.strip())
        before, _, behind = text.partition(marker)
        if (token := self._speech.token_of(marker)) is not None:
            return f"TEXT {self._term(before)} <[{token}]> {self._term(behind)}"
        name = f"text_before_{len(self._rules)}"
        end = before.replace("\n", r"\n?") + re.escape(marker).replace("/", r"\/")
        self._rules[f"{name}[lazy]"] = rf"/(.|\n)*{end}/"
        return f"{name} {self._term(behind)}"

    def _term(self, text: str) -> str:
        """The text itself, its markers as tokens where they are; nothing for no text."""
        terms = []
        for part in _MARKERS.split(text):
            if part == NUMBER:
                terms.append("NUMBER")
            elif part == "\n":
                terms.append("BREAK")
            elif (token := self._speech.token_of(part)) is not None:
                terms.append(f"<[{token}]>")
            elif part:
                terms.append(json.dumps(part))
        return " ".join(terms)

    def _refused(self, why: str) -> InvalidRequest:
        return InvalidRequest(
            f"`{self._form.param}`: {why}",
            hint="leave it to the model: send `auto`, or leave it out",
            details={"param": self._form.param},
        )


def _words(schema: Mapping[str, Any]) -> list[str]:
    """The texts that a value may be, when it may be nothing else."""
    words = schema.get("enum") or []
    return list(words) if all(isinstance(word, str) for word in words) else []
