"""What an answer has to look like, whatever the model would rather say: JSON, a schema, a call of a tool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ANY_OBJECT = '{"type":"object"}'
"""The schema of any JSON object."""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What an answer is held to; by default to nothing.

    Attributes:
        schema: a JSON Schema, as JSON, that the text of the answer follows; None for any text.
        tools: the functions that it may call, in OpenAI's shape.
        must_call: it is nothing but calls of them, one at least.
        one_call: there is one call at most, and nothing behind it; models whose calls no grammar can hold may make
            others, which do not count.
        param: the field of the request that asks for a form of calls; refusals name it.
    """

    schema: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    must_call: bool = False
    one_call: bool = False
    param: str = "tool_choice"

    @property
    def strict_tools(self) -> bool:
        """Whether the arguments of some tool have to follow its schema."""
        return any(tool["function"].get("strict") for tool in self.tools)

    @property
    def is_free(self) -> bool:
        """Whether any text will do."""
        return self.schema is None and not self.holds_calls

    @property
    def holds_calls(self) -> bool:
        """Whether calls are held to anything."""
        return bool(self.tools) and (self.must_call or self.one_call or self.strict_tools)
