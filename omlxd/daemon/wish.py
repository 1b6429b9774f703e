"""What is asked of a model: a prompt, and the options of an answer, both checked before anything is done for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import getrandbits
from typing import Any, TypedDict

from omlxd.core.answer_form import AnswerForm
from omlxd.core.errors import ContextExceeded, InvalidRequest
from omlxd.daemon.system_segment import system_tokens
from omlxd.engine.codec import TextCodec
from omlxd.engine.orders import Sampling

DEFAULT_MAX_TOKENS = 4096
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 4096
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt as tokens; the first `shared_tokens` of them are likely to begin other prompts too."""

    tokens: tuple[int, ...]
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be continued: exactly one of a conversation, plain text or token ids.

    `tools` (function descriptions in OpenAI's shape) and `thinking` go to the chat template of a conversation.
    """

    messages: tuple[Mapping[str, Any], ...] | None = None
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    thinking: bool | None = None

    @property
    def param(self) -> str:
        """The field of a request that it came in."""
        return "prompt" if self.messages is None else "messages"

    @property
    def characters(self) -> int:
        """Length of its text; 0 when it came as tokens."""
        if self.messages is None:
            return len(self.text or "")
        spoken = sum(len(str(message.get("content") or "")) for message in self.messages)
        called = [call for message in self.messages for call in message.get("tool_calls", ())]
        return spoken + sum(len(json.dumps(each)) for each in (*called, *self.tools))

    def encode(self, codec: TextCodec) -> Encoded:
        """The prompt's tokens, all within the vocabulary; slow for long prompts, so call it in a thread.

        Raises:
            InvalidRequest: it has no tokens, an id is beyond the vocabulary, or the chat template refuses it.
        """
        if self.messages is not None:
            tokens = tuple(codec.encode_chat(self.messages, self.tools, self.thinking))
        elif self.text is not None:
            tokens = tuple(codec.encode_text(self.text))
        else:
            tokens = self.tokens or ()
        if not tokens:
            raise InvalidRequest("the prompt has no tokens", hint="send at least one character")
        worst = max(tokens) if min(tokens) >= 0 else min(tokens)
        if not 0 <= worst < codec.vocab_size:
            raise _beyond_vocabulary(worst, codec.vocab_size, "prompt")
        return Encoded(tokens, system_tokens(self.messages or (), tokens, codec, self.tools))


def check_prompt(
    messages: Sequence[Mapping[str, Any]] | None,
    prompt: str | None,
    tokens: Sequence[int] | None,
    tools: Sequence[Mapping[str, Any]] = (),
    thinking: bool | None = None,
) -> Prompt:
    """The prompt of `generate`; raises InvalidRequest unless exactly one of the first three is given and not empty."""
    if sum(given is not None for given in (messages, prompt, tokens)) != 1:
        raise InvalidRequest("give exactly one of `messages`, `prompt` and `tokens`", hint="leave the others out")
    if tokens is not None and not all(type(token) is int for token in tokens):
        raise InvalidRequest("`tokens` must be whole numbers", hint="send the ids that the tokenizer gives")
    if not (messages or prompt or tokens):
        raise InvalidRequest("the prompt is empty", hint="send at least one character")
    if messages is None:
        if tools or thinking is not None:
            raise InvalidRequest("`tools` and `thinking` need `messages`", hint="send `messages` and no `prompt`")
        return Prompt(text=prompt, tokens=None if tokens is None else tuple(tokens))
    return Prompt(tuple(messages), tools=tuple(tools), thinking=thinking)


class Options(TypedDict, total=False):
    """The options of an answer; the pool's `generate` says what they mean."""

    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    stop: str | Sequence[str]
    top_logprobs: int | None
    form: AnswerForm | None
    keep_alive_s: float | None
    ignore_eos: bool
    cache_prompt: bool
    reasoning_field: str


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request asks for beyond its prompt, checked."""

    sampling: Sampling
    max_tokens: int | None
    stop: tuple[str, ...]
    top_logprobs: int | None = None
    form: AnswerForm | None = None
    keep_alive_s: float | None = None
    ignore_eos: bool = False
    cache_prompt: bool = True
    reasoning_field: str | None = None

    def check(self, codec: TextCodec) -> None:
        """Raise InvalidRequest when a token of `logit_bias` is beyond the vocabulary, or the model cannot reason."""
        for token, _ in self.sampling.logit_bias:
            if token >= codec.vocab_size:
                raise _beyond_vocabulary(token, codec.vocab_size, "logit_bias")
        if self.reasoning_field is not None and not codec.reasons:
            raise InvalidRequest(
                f"`{self.reasoning_field}`: this model does not reason before it answers",
                hint="leave it out, or ask another model",
                details={"param": self.reasoning_field},
            )


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0, 2),
    ("min_p", 0, 1),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
)


def check_wish(options: Options) -> Wish:
    """The options of `generate`; raises InvalidRequest with the option's name in `details["param"]`."""
    if unknown := options.keys() - Options.__annotations__:
        raise TypeError(f"generate() got an unexpected keyword argument {min(unknown)!r}")
    stop, seed, bias = options.get("stop", ()), options.get("seed"), options.get("logit_bias", {})
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    max_tokens, top_logprobs = options.get("max_tokens"), options.get("top_logprobs")
    for param, low, high in _RANGES:
        _must(param, low <= float(options.get(param, 0)) <= high, f"between {low} and {high}")  # type: ignore[arg-type]
    _must("max_tokens", max_tokens is None or max_tokens >= 1, "at least 1")
    _must("top_p", 0 < options.get("top_p", 1) <= 1, "above 0 and at most 1")
    _must("top_k", options.get("top_k", 0) >= 0, "at least 0")
    _must("repetition_penalty", 0 < options.get("repetition_penalty", 1) <= 10, "above 0 and at most 10")
    _must("stop", len(stops) <= MAX_STOPS and all(stops), f"at most {MAX_STOPS} strings, none of them empty")
    longest = max((len(each) for each in stops), default=0)
    _must("stop", longest <= MAX_STOP_CHARACTERS, f"strings of at most {MAX_STOP_CHARACTERS} characters")
    _must("top_logprobs", 0 <= (top_logprobs or 0) <= MAX_TOP_LOGPROBS, f"between 0 and {MAX_TOP_LOGPROBS}")
    good = all(token >= 0 and -100 <= value <= 100 for token, value in bias.items())
    _must("logit_bias", good, "token ids with numbers between -100 and 100")
    sampling = Sampling(
        temperature=options.get("temperature", 0.0),
        top_p=options.get("top_p", 1.0),
        seed=getrandbits(32) if seed is None else seed,
        top_k=options.get("top_k", 0),
        min_p=options.get("min_p", 0.0),
        presence_penalty=options.get("presence_penalty", 0.0),
        frequency_penalty=options.get("frequency_penalty", 0.0),
        repetition_penalty=options.get("repetition_penalty", 1.0),
        logit_bias=tuple(bias.items()),
    )
    keep_alive_s = options.get("keep_alive_s")
    _must("keep_alive", keep_alive_s is None or keep_alive_s >= 0, "at least 0 seconds")
    ignore_eos, cache_prompt = options.get("ignore_eos", False), options.get("cache_prompt", True)
    form = options.get("form")
    _must("ignore_eos", not ignore_eos or form is None, "left out of an answer that is held to a form")
    return Wish(
        sampling,
        max_tokens,
        stops,
        top_logprobs,
        form,
        keep_alive_s,
        ignore_eos,
        cache_prompt,
        options.get("reasoning_field"),
    )


def _must(param: str, good: bool, be: str) -> None:
    if not good:
        raise InvalidRequest(
            f"`{param}` must be {be}", hint=f"correct `{param}`, or leave it out", details={"param": param}
        )


def _beyond_vocabulary(token: int, vocab_size: int, param: str) -> InvalidRequest:
    return InvalidRequest(
        f"token id {token} is not in the vocabulary of {vocab_size} tokens",
        hint="send text, or ids made with this model's tokenizer",
        details={"token": token, "vocab_size": vocab_size, "param": param},
    )


def tokens_left(
    model: str, prompt_tokens: int, max_tokens: int | None, context_length: int | None, param: str = "prompt"
) -> int:
    """How many tokens may be generated: what was asked for, but no more than the context leaves.

    Args:
        param: the field of the request that the prompt came in.

    Raises:
        ContextExceeded: the prompt and one token are longer than the context.
    """
    if context_length is None:
        return max_tokens or DEFAULT_MAX_TOKENS
    left = context_length - prompt_tokens
    if left < 1:
        raise ContextExceeded(
            f"the prompt has {prompt_tokens} tokens and `{model}` has a context of {context_length},"
            " of which the answer needs at least 1",
            hint=f"shorten the prompt by {1 - left} tokens or more",
            details={"prompt_tokens": prompt_tokens, "context_length": context_length, "param": param},
        )
    return min(max_tokens or DEFAULT_MAX_TOKENS, left)
