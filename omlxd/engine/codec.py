"""Text to tokens and back, as those see it who do not run models.

Imports neither MLX nor mlx-lm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from omlxd.core.answer_form import AnswerForm
from omlxd.core.reply import ReplyFormat

if TYPE_CHECKING:
    from omlxd.engine.grammars import Constraint


@dataclass(frozen=True, slots=True)
class ToolCallText:
    """A call of a tool as the model wrote it: the tool's name, and its arguments as a JSON object in a text."""

    name: str
    arguments: str


class TextCodec(Protocol):
    """A model's tokenizer and chat template; stays after the model is unloaded. Safe to use from any thread."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int | None:
        """Tokens the model was made for, or less where the manifest says so; None when unknown."""
        ...

    @property
    def reasons(self) -> bool:
        """Whether the model marks a reasoning before its answer, so that it may be asked for."""
        ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | None = None,
    ) -> list[int]:
        """Prompt tokens of a conversation, with the tools on offer; `thinking` asks templates that know it (None: the
        template's way). Raises InvalidRequest when the template refuses it, knows no tools or drops earlier calls.
        """
        ...

    def encode_text(self, text: str) -> list[int]:
        """Prompt tokens of plain text, with the special tokens the tokenizer adds."""
        ...

    def held_back(self, generated: Sequence[int], stop: Sequence[str]) -> str:
        """What streaming has not told yet of the text of these tokens: a word's or character's begin, half a stop."""
        ...

    def token_text(self, token: int) -> str:
        """One token as text; half a character is U+FFFD."""
        ...

    def token_bytes(self, token: int) -> bytes | None:
        """One token in UTF-8, of which it may be a part of a character; None when its vocabulary does not say."""
        ...

    def reply_format(self, prompt: Sequence[int], *, with_tools: bool) -> ReplyFormat:
        """How the model marks the parts of its reply to this prompt."""
        ...

    def constrain(self, form: AnswerForm, prompt: Sequence[int], *, is_chat: bool) -> Constraint | None:
        """What holds the answer to this prompt to a form; takes a second the first time, so call it in a thread.

        None when all that is asked for is one call at most, of a model whose calls no grammar can hold: who hears the
        answer has to leave the others out.

        Raises InvalidRequest, with the field in `details["param"]`, when this model cannot be held to it.
        """
        ...

    def parse_tool_calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[ToolCallText]:
        """The calls in the text between a tool call's markers; empty when the text is none. May take a while."""
        ...
