"""A request on the engine's thread: where its prompt is, and what each token of its answer means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from omlxd.core.states import FinishReason
from omlxd.engine.events import TokenLogprob
from omlxd.engine.grammars import Guide
from omlxd.engine.orders import GenerationOrder
from omlxd.engine.sampling import OwnSampler, Sampler, ShapingSampler
from omlxd.engine.text import StreamText


@dataclass(eq=False)
class Running:
    """A request on the engine's thread; `came_s` and `moved_s` tell when it came and when its prompt moved last.

    `reused` tokens came from the prefix cache, or are expected to while it waits.
    """

    order: GenerationOrder
    sampler: Sampler
    text: StreamText
    end_ids: frozenset[int]
    came_s: float = 0.0
    moved_s: float = 0.0
    prefilled: int = 0
    reused: int = 0
    generated: int = 0
    answer: list[int] = field(default_factory=list)
    kv_bytes: int = 0
    cache: list[Any] = field(default_factory=list)
    tokens: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.generated = len(self.order.generated)
        self.tokens = self.order.prompt + self.order.generated  # what an earlier stay made is run again
        self.text.replay(self.order.generated)

    @property
    def left_tokens(self) -> int:
        """Tokens that are still to be run before it decodes, as far as is known before it begins."""
        return len(self.tokens) - max(self.prefilled, self.reused)

    @property
    def length_tokens(self) -> int:
        """Tokens in its KV cache while it decodes."""
        return len(self.order.prompt) + self.generated

    @property
    def ends_next(self) -> bool:
        """Whether the next token is its last, whatever it is."""
        return self.generated + 1 >= self.order.max_tokens

    @property
    def history(self) -> tuple[int, ...]:
        """All tokens so far, the last of the answer included."""
        return (*self.tokens, *self.answer)

    def logprob(self) -> TokenLogprob | None:
        """How likely the token was that was taken last, if that is to be told; asked for once per token."""
        return self.sampler.report() if isinstance(self.sampler, ShapingSampler) else None

    @property
    def problem(self) -> str | None:
        """Why its answer cannot be held to its grammar any more; None while it can, and when it has none."""
        return self._guide.problem if self._guide is not None else None

    @property
    def _guide(self) -> Guide | None:
        return self.sampler.guide if isinstance(self.sampler, ShapingSampler) else None

    def accept(self, token: int) -> tuple[str, FinishReason | None]:
        """Count a token and return the text that is certain now, and why the request is over if it is.

        Raises whatever went wrong when the token was chosen, or its text made.
        """
        if isinstance(self.sampler, OwnSampler) and self.sampler.error is not None:
            raise self.sampler.error
        self.answer.append(token)
        if token in self.end_ids:
            return self.text.finish(), FinishReason.STOP
        if (guide := self._guide) is not None:
            guide.take(self.generated, token)  # the sampler has, unless the request is about to change its lane
        self.generated += 1
        text, stopped = self.text.add(token)
        if stopped:
            return text, FinishReason.STOP
        if guide is not None and guide.is_complete:
            return text + self.text.finish(), FinishReason.STOP
        if self.generated >= self.order.max_tokens:
            return text + self.text.finish(), FinishReason.LENGTH
        return text, None


Take = Callable[[Running, int], bool]
"""Receives each token in order; returns whether the request goes on."""
