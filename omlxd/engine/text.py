"""Text on both sides of the model: chat templates and prompts in, streamed text with stop sequences out."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from omlxd.core.answer_form import AnswerForm
from omlxd.core.errors import InvalidRequest
from omlxd.core.reply import ANSWER, REASONING, TOOL_CALL, ReplyFormat, longest_prefix_at_end
from omlxd.core.wording import shown
from omlxd.engine.answer_grammar import Reasoning, Speech, grammar_of
from omlxd.engine.call_formats import call_format
from omlxd.engine.codec import ToolCallText
from omlxd.engine.grammars import Constraint, Grammars

_JUST_BEFORE = 8  # tokens from the end of a prompt: the marker and a few breaks
_TOOLS = re.compile(r"\{[%{](?:(?![%}]\}).)*\btools\b", re.DOTALL)
"""A template's code that speaks of tools; a remark or a text of it may too."""
_BYTE = re.compile("<0x([0-9A-F]{2})>")
"""One byte of a character that the vocabulary does not have, as SentencePiece writes it."""
_PLAIN_NAME = re.compile("[A-Za-z0-9_-]+")
"""A function's name that every template writes as it is."""
SHORTEST_QUOTE = 8  # characters; a shorter message may stand in any error by chance


class ChatCodec:
    """A tokenizer with its chat template; implements `codec.TextCodec`.

    Args:
        tokenizer: mlx-lm's tokenizer wrapper.
        vocab_size: rows of the model's embedding; ids at or above it would read beyond the table.
        context_length: tokens, None when unknown.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, context_length: int | None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._lock = threading.Lock()  # transformers changes padding state inside encode: "Already borrowed"
        self.grammars = Grammars(self._written, frozenset(tokenizer.eos_token_ids), vocab_size)
        # A prompt beyond the context is refused in our own words; transformers would write its own to stderr first.
        tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True

    @property
    def vocab_size(self) -> int:
        """Number of token ids the model knows."""
        return self._vocab_size

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and answer together."""
        return self._context_length

    @property
    def end_ids(self) -> frozenset[int]:
        """Token ids that end a generation."""
        return frozenset(self._tokenizer.eos_token_ids)

    @property
    def reasons(self) -> bool:
        """Whether the model marks a reasoning before its answer."""
        edges = [edge for edges in self._tokenizer.response_transitions.values() for edge in edges]
        starts = self._tokenizer.response_initial_state == REASONING
        return bool(self._tokenizer.has_thinking) or starts or any(state == REASONING for _, state in edges)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | None = None,
    ) -> list[int]:
        """Prompt tokens of a conversation, by the model's own template, or plain `role: text` lines without one.

        A last message that is the assistant's is the beginning of the answer, which goes on from there.
        """
        if tools and not self._tokenizer.has_tool_calling:
            raise self._no_tools()
        begun, called = _begins_the_answer(messages), _called_names(messages)
        if not self._tokenizer.has_chat_template:
            if called:
                raise _drops_calls()
            lines = [f"{message['role']}: {message['content']}" for message in messages]
            return self.encode_text("\n".join(lines if begun else [*lines, "assistant:"]))
        options: dict[str, Any] = {"continue_final_message": True} if begun else {}
        if tools:
            options["tools"] = list(tools)
        if thinking is not None:
            options["enable_thinking"] = thinking
        from jinja2.exceptions import TemplateError

        try:
            with self._lock:
                ids = self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages], add_generation_prompt=not begun, **options
                )
        except (TemplateError, TypeError, ValueError, RecursionError) as error:  # templates add texts to what is none
            refused = InvalidRequest(
                f"the model's chat template refuses these messages: {_words(error, messages)}",
                hint="check the order of the roles; some models take no system message",
            )
            refused.logged = "the model's chat template refuses these messages"  # its own words may quote them
            raise refused from None
        if called:
            with self._lock:
                text = str(self._tokenizer.decode(ids))
            if not any(name in text for name in called):
                raise _drops_calls()
        return [int(token) for token in ids]

    def _no_tools(self) -> InvalidRequest:
        why, hint = "this model's chat template knows no tools", "ask a model that was made for them"
        if _TOOLS.search(str(self._tokenizer.chat_template or "")):
            why = "the way in which this model writes its tool calls is not known, so none could be told from text"
            hint = "ask a model of another family"
        return InvalidRequest(f"`tools`: {why}", hint=f"leave `tools` out, or {hint}", details={"param": "tools"})

    def encode_text(self, text: str) -> list[int]:
        """Prompt tokens of plain text."""
        with self._lock:
            return [int(token) for token in self._tokenizer.encode(text)]

    def token_text(self, token: int) -> str:
        """One token as text; half a character is U+FFFD."""
        with self._lock:
            return str(self._tokenizer.decode([token]))

    def token_bytes(self, token: int) -> bytes | None:
        """One token in UTF-8; of half a character as byte-level vocabularies and those with a byte fallback say it."""
        if "\ufffd" not in (text := self.token_text(token)):
            return text.encode()
        with self._lock:
            piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if (fallback := _BYTE.fullmatch(piece)) is not None:
            return bytes([int(fallback[1], 16)])
        if all(character in _BYTE_OF for character in piece):
            return bytes(_BYTE_OF[character] for character in piece)
        return None

    def reply_format(self, prompt: Sequence[int], *, with_tools: bool) -> ReplyFormat:
        """How the model marks the parts of its reply to this prompt, which may have begun its reasoning already."""
        tokenizer = self._tokenizer
        transitions = {state: list(edges) for state, edges in tokenizer.response_transitions.items()}
        normal = transitions.setdefault(ANSWER, [])
        normal += [(marker, ANSWER) for marker in tokenizer.structural_markers]
        start = tokenizer.response_initial_state or ANSWER
        if tokenizer.has_thinking:
            normal.append((tokenizer.think_start, REASONING))
            transitions.setdefault(REASONING, []).append((tokenizer.think_end, ANSWER))
            if tokenizer.rfind_think_start(prompt) > tokenizer.rfind_think_end(prompt):
                start = REASONING
        if with_tools and tokenizer.has_tool_calling:
            for state in (ANSWER, REASONING) if tokenizer.has_thinking else (ANSWER,):
                transitions[state].append((tokenizer.tool_call_start, TOOL_CALL))
            if tokenizer.tool_call_end:
                transitions[TOOL_CALL] = [(tokenizer.tool_call_end, ANSWER)]
        return ReplyFormat(start, {state: edges for state, edges in transitions.items() if edges})

    def constrain(self, form: AnswerForm, prompt: Sequence[int], *, is_chat: bool) -> Constraint | None:
        """What holds the answer to this prompt to a form, behind the model's reasoning if it reasons first."""
        tokenizer, param = self._tokenizer, form.param
        if is_chat and (tokenizer.response_transitions or tokenizer.structural_markers):
            raise InvalidRequest(
                f"`{param}`: this model writes its answers between markers of its own, and cannot be held to a form",
                hint="leave it out, or ask another model",
                details={"param": param},
            )
        calls = None
        if tokenizer.has_tool_calling:
            parser = str(tokenizer.tool_parser.__module__).rpartition(".")[2]
            calls = call_format(parser, tokenizer.chat_template)
        if calls is None and form.schema is None and not (form.must_call or form.strict_tools):
            return None
        reasoning = self._reasoning(prompt) if is_chat else None
        try:
            return self.grammars.constraint(grammar_of(form, Speech(self.grammars.token_of, reasoning, calls)))
        except ValueError as error:
            refused = InvalidRequest(
                f"`{param}`: {error}", hint="leave it out, or ask for a simpler form", details={"param": param}
            )
            refused.logged = f"`{param}`: the answer cannot be held to this form"  # the error may quote a schema
            raise refused from None

    def _reasoning(self, prompt: Sequence[int]) -> Reasoning | None:
        tokenizer = self._tokenizer
        if not tokenizer.has_thinking:
            return None
        begun, ended = tokenizer.rfind_think_start(prompt), tokenizer.rfind_think_end(prompt)
        if begun < ended and ended >= len(prompt) - _JUST_BEFORE:
            return None  # the template has told it not to
        return Reasoning(tokenizer.think_start, tokenizer.think_end, begun=begun > ended)

    def _written(self) -> dict[str, Any]:
        """The tokenizer as its file has it; raises ValueError when it is of another kind."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError("this model's tokenizer is not one of the `tokenizers` library")
        with self._lock:
            return dict(json.loads(backend.to_str()))

    def parse_tool_calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[ToolCallText]:
        """The calls in the text between a tool call's markers; empty when the text is none.

        The parsers are mlx-lm's, one for each family of models, and raise what they like.
        """
        try:
            parsed = self._tokenizer.tool_parser(text, [dict(tool) for tool in tools])
            calls = [
                ToolCallText(str(call["name"]), json.dumps(_arguments(call), ensure_ascii=False, allow_nan=False))
                for call in (parsed if isinstance(parsed, list) else [parsed])
            ]
        except Exception:
            return []
        return calls if all(call.name for call in calls) else []

    def held_back(self, generated: Sequence[int], stop: Sequence[str]) -> str:
        """What streaming has not told yet of the text of these tokens."""
        text = self.stream_text(stop)
        text.replay(generated)
        return text.finish()

    def stream_text(self, stop: Sequence[str]) -> StreamText:
        """A fresh detokenizer for one request."""
        with self._lock:
            return StreamText(self._tokenizer.detokenizer, stop)


class StreamText:
    """Turns token ids into text piece by piece and ends it at the first stop sequence.

    Text that could still become a stop sequence is held back until it cannot.

    Attributes:
        stopped_by: the stop sequence that was completed; None before.
    """

    def __init__(self, detokenizer: Any, stop: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(word for word in stop if word)
        self._held = ""
        self.stopped_by: str | None = None

    @property
    def held_characters(self) -> int:
        """How much text is made and not told."""
        return len(self._held)

    def add(self, token: int) -> tuple[str, bool]:
        """Text that is certain now, and whether a stop sequence was completed (it is not part of the text)."""
        self._detokenizer.add_token(token)
        return self._push(self._detokenizer.last_segment)

    def replay(self, tokens: Sequence[int]) -> None:
        """Go on behind these tokens, whose text was told before; what they held back comes with the next one."""
        for token in tokens:
            self.add(token)

    def finish(self) -> str:
        """The rest: incomplete characters and what was held back."""
        self._detokenizer.finalize()
        text, _ = self._push(self._detokenizer.last_segment)
        rest, self._held = self._held, ""
        return text + rest

    def _push(self, piece: str) -> tuple[str, bool]:
        if not self._stop:
            return piece, False
        text = self._held + piece
        hits = [(at, word) for word in self._stop if (at := text.find(word)) >= 0]
        if hits:
            self._held = ""
            at, self.stopped_by = min(hits)
            return text[:at], True
        keep = longest_prefix_at_end(text, self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False


def _byte_alphabet() -> dict[str, int]:
    """By its character, each byte as GPT-2's byte-level vocabularies write it: one that can be seen as itself."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(0x100) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(0x100 + at): byte for at, byte in enumerate(unseen)}


_BYTE_OF = _byte_alphabet()


def _called_names(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The functions that earlier messages have called, of names that would stand in the prompt as they are."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    return [call["function"]["name"] for call in calls if _PLAIN_NAME.fullmatch(call["function"]["name"])]


def _drops_calls() -> InvalidRequest:
    return InvalidRequest(
        "`messages`: this model's chat template leaves calls of tools out, and the model would not see them",
        hint="ask a model that was made for tools, or tell it in words what was called",
        details={"param": "messages"},
    )


def _begins_the_answer(messages: Sequence[Mapping[str, Any]]) -> bool:
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and bool(last.get("content")) and not last.get("tool_calls")


def _words(error: Exception, messages: Sequence[Mapping[str, Any]]) -> str:
    """What the template said, unless it quotes a message: errors are logged, and prompts are not."""
    said = str(error)
    contents = [str(message.get("content") or "") for message in messages]
    if any(len(content) >= SHORTEST_QUOTE and content in said for content in contents):
        return "its words quote one of them, and are not repeated here"
    return shown(said)


def _arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = call.get("arguments") or {}
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, Mapping):
        raise TypeError("arguments are an object")
    return arguments
