"""Answers that are held to a grammar: which tokens may come next, told to the sampler before each choice.

The grammars are llguidance's, which walks a tree of the whole vocabulary in 40 microseconds a token (49,152 tokens,
JSON; a pattern written to be hard has taken 0.4 s) and lets go of the interpreter's lock for it. Its own MLX helper is
a Metal kernel; here the mask is applied with `mx.where`, on every backend. The tree takes half a second to build, or
1.7 s with the merges of its tokenizer, which it has no use for: it is built with a model's first such request, on a
thread that tokenizes, and kept.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omlxd.core.errors import InvalidRequest
from omlxd.core.wording import shown
from omlxd.engine.schema_keywords import unknown_keyword

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher, LLTokenizer

KEPT_GRAMMARS = 16
TREE_BYTES_PER_TOKEN = 640
"""Measured: 31 MB for 49,152 tokens."""
GUIDANCE = {"whitespace_pattern": r"[ \t]?|\n( {0,32}|\t{0,8})"}
"""Between any two tokens of JSON: one blank, or a line break with its indentation, which is of blanks or of tabs.

A model that likes blanks could go on with them for ever, and one that mixes both is lost in them.
"""


def check_schema(schema: str, *, lenient: bool = False) -> str | None:
    """What is wrong with a JSON Schema, or what of it is not supported; None when answers can be held to it.

    With `lenient`, what is not supported, or no keyword at all, is passed over. Needs no model; takes a
    millisecond, of a schema of a megabyte up to a second.
    """
    from llguidance import LLMatcher  # 80 ms

    options: Any = {**GUIDANCE, "lenient": lenient}
    try:
        if not lenient and (unknown := unknown_keyword(json.loads(schema))) is not None:
            return unknown
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=options)
        is_wrong, found = LLMatcher.validate_grammar_with_warnings(grammar, limits=_limits())
    except (ValueError, RecursionError) as error:  # nested too deep
        is_wrong, found = True, [str(error)]
    if not is_wrong:
        return None
    if "coerce_one_of" in found[0]:
        return "the branches of `oneOf` do not exclude each other; write `anyOf`"
    return _plain(_first_line(found[0]))


def _plain(words: str) -> str:
    """llguidance's most usual complaints, in words that say what to look at."""
    if words.startswith("Unimplemented keys: ["):
        keys = ", ".join(f"`{key}`" for key in re.findall(r'"([^"]+)"', words))
        return f"{keys} {'are' if ', ' in keys else 'is'} not supported"
    for theirs, ours in (
        ("Unsatisfiable schema: anyOf is empty", "an `anyOf`, `enum` or `type` is empty, so nothing can follow it"),
        ("Unsatisfiable schema: ", "nothing can follow it: "),
        ("Invalid type: ", "`type` cannot be "),
        ("Unknown format: ", "`format` cannot be "),
        ("regex parse error:", "a `pattern` is no regular expression that is supported"),
    ):
        if words.startswith(theirs):
            return ours + words.removeprefix(theirs)
    return words


def json_rule(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """The schema as a term of a Lark grammar; with `lenient`, without what is not supported of it."""
    return f"%json {json.dumps({**schema, 'x-guidance': {**GUIDANCE, 'lenient': lenient}})}"


class Guide:
    """Walks one answer through its grammar.

    Attributes:
        position: how many tokens of the answer it has seen.
        problem: why it cannot go on; None while it can.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, generated: Sequence[int] = ()) -> None:
        self.position = len(generated)
        self.problem: str | None = None
        self._matcher, self._vocab_size = matcher, vocab_size
        self._words: np.ndarray[Any, Any] | None = None
        if generated and not matcher.consume_tokens(list(generated)):
            self._fail()

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow what it has seen."""
        return self.problem is None and self._matcher.is_stopped()

    def take(self, position: int, token: int) -> None:
        """The token at this position of the answer was chosen; one that it has seen already says nothing new."""
        if position != self.position:
            return
        self.position += 1
        if self.problem is None and not self._matcher.is_stopped() and not self._matcher.consume_token(token):
            self._fail()

    def allowed(self, width: int) -> np.ndarray[Any, Any] | None:
        """Which of `width` token ids may come next, as booleans; None when it has nothing to say any more."""
        import numpy as np
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

        if self.problem is not None or self._matcher.is_stopped():
            return None
        if self._words is None:
            self._words = allocate_token_bitmask(1, self._vocab_size)
        fill_next_token_bitmask(self._matcher, self._words, 0)
        bits = np.unpackbits(self._words.view(np.uint8)[0], bitorder="little")[:width].view(np.bool_)
        if len(bits) < width:
            bits = np.pad(bits, (0, width - len(bits)))
        if self._matcher.is_error():
            self._fail()
        elif not bits.any():
            self.problem = "the model has no token to go on with"
        return bits if self.problem is None else None

    def _fail(self) -> None:
        # Not in the matcher's own words, which quote the answer: errors are logged.
        self.problem = "what may come next has become too much to keep track of"


class Constraint:
    """A grammar that is ready for answers of one model."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def try_first(self) -> None:
        """Raise ValueError when no answer can even begin: that a schema is nothing but itself is found out only so."""
        guide = self.begin(())
        guide.allowed(self._vocab_size)
        if guide.problem is not None:
            raise ValueError("no answer can follow it; it may refer to nothing but itself")

    def begin(self, generated: Sequence[int]) -> Guide:
        """The guide of an answer that has begun with these tokens (microseconds, and 7 more for each of them)."""
        return Guide(self._matcher.deep_copy(), self._vocab_size, generated)


class Grammars:
    """The grammars of one tokenizer. Safe to use from any thread.

    Args:
        written: reads the tokenizer as its file has it; raises ValueError when there is no such thing.
        end_ids: token ids that end an answer.
        vocab_size: token ids the model knows.

    Attributes:
        grown: is told how many bytes were added to the process for good.
    """

    def __init__(self, written: Callable[[], dict[str, Any]], end_ids: frozenset[int], vocab_size: int) -> None:
        self._written, self._end_ids, self._vocab_size = written, end_ids, vocab_size
        self.grown: Callable[[int], None] = _nobody
        self._lock = threading.Lock()
        self._tree: LLTokenizer | None = None
        self._markers: dict[str, int] = {}
        self._kept: OrderedDict[str, Constraint] = OrderedDict()

    def token_of(self, marker: str) -> int | None:
        """The id of a marker that is one token of its own; None of any other. Takes as long as `constraint`."""
        with self._lock:
            self._built()
            return self._markers.get(marker)

    def constraint(self, lark: str) -> Constraint:
        """A Lark grammar, made ready; takes up to seconds the first time: never on the loop or the engine's thread.

        Raises:
            ValueError: the grammar is too large or contradicts itself, or the tokenizer is of no use for it.
        """
        from llguidance import LLMatcher

        with self._lock:
            if (known := self._kept.get(lark)) is not None:
                self._kept.move_to_end(lark)
                return known
            tree = self._built()
            matcher = LLMatcher(tree, LLMatcher.grammar_from_lark(lark), log_level=0, limits=_limits())
            if matcher.is_error():
                raise ValueError("no grammar for this model can be made of it; it may be too large")
            made = Constraint(matcher, tree.vocab_size)
            made.try_first()
            self._kept[lark] = made
            while len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)
            return made

    def _built(self) -> LLTokenizer:
        if self._tree is None:
            from llguidance import LLTokenizer

            from omlxd.engine.glibc import trim_heap

            if not self._end_ids:
                raise ValueError("this model has no token that ends an answer")
            written = self._written()
            added = {each["content"]: int(each["id"]) for each in written.get("added_tokens", ())}
            size = max(self._vocab_size, 1 + max((_highest(written["model"]["vocab"]), *added.values())))
            if "merges" in written["model"]:
                written["model"]["merges"] = []  # no text is tokenized with it, and they take most of the time
            written |= {"truncation": None, "padding": None}
            try:
                self._tree = LLTokenizer(json.dumps(written), n_vocab=size, eos_token=sorted(self._end_ids))
            except Exception as error:  # each kind of tokenizer fails in its own way
                raise ValueError(f"this model's tokenizer is of no use: {_first_line(str(error))}") from None
            self._markers = {text: token for text, token in added.items() if self._tree.is_special_token(token)}
            self.grown(size * TREE_BYTES_PER_TOKEN)
            del written
            trim_heap()
        return self._tree


def _highest(vocab: Mapping[str, int] | Sequence[Any]) -> int:
    return max(vocab.values(), default=0) if isinstance(vocab, Mapping) else len(vocab) - 1


def guide_failed(model: str, problem: str) -> InvalidRequest:
    """The answer cannot go on as its form wants; asked for again it could not either, so it is the request's fault."""
    return InvalidRequest(
        f"the answer of `{model}` could not be held to the form that was asked for: {problem}",
        hint="ask for a simpler schema",
    )


def _limits() -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False)  # the others would tell the answer so far


def _first_line(text: str) -> str:
    return shown(text.partition("\n")[0])


def _nobody(_: int) -> None:
    """Nobody keeps count."""
