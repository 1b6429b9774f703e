"""The form of an answer, checked as far as it can be without a model: bad schemas are refused before one is touched."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from omlxd.core.answer_form import ANY_OBJECT, AnswerForm
from omlxd.core.errors import InvalidRequest
from omlxd.engine.grammars import check_schema


async def settle(form: AnswerForm, schema_field: str, tool_fields: Mapping[str, str]) -> AnswerForm | None:
    """The form as answers can be held to it, None when they are free.

    Arguments of a tool that is not strict follow what is supported of its schema; where it is none, any object will do.

    Args:
        form: as it was asked for.
        schema_field: the field of the request that `form.schema` comes from.
        tool_fields: by a tool's name: the field that its parameters come from.

    Raises:
        InvalidRequest: a schema that has to be followed is none or is not supported; names the field.
    """
    return None if form.is_free else await asyncio.to_thread(_settle, form, schema_field, tool_fields)


def _settle(form: AnswerForm, schema_field: str, tool_fields: Mapping[str, str]) -> AnswerForm:
    if form.schema is not None and (problem := check_schema(form.schema)):
        raise _unsupported(schema_field, problem)
    tools = []
    for tool in form.tools:
        function = tool["function"]
        schema, strict = function.get("parameters"), bool(function.get("strict"))
        problem = _problem_of(schema, strict) if schema else None
        if problem and strict:
            raise _unsupported(tool_fields[function["name"]], problem)
        if problem:
            tool = {**tool, "function": {**function, "parameters": json.loads(ANY_OBJECT)}}
        tools.append(tool)
    return replace(form, tools=tuple(tools))


def _problem_of(schema: dict[str, Any], strict: bool) -> str | None:
    if strict and schema.get("type", "object") != "object":
        return "arguments are an object"
    return check_schema(json.dumps({**schema, "type": "object"}), lenient=not strict)


def _unsupported(field: str, problem: str) -> InvalidRequest:
    refused = InvalidRequest(
        f"`{field}`: answers cannot be held to this schema: {problem}",
        hint="take out of the schema what is not supported; omlxd-api(7) says what is",
        details={"param": field},
    )
    refused.logged = f"`{field}`: answers cannot be held to this schema"  # the problem may quote it
    return refused
