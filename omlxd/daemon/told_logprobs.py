"""Log probabilities wait until the text of their tokens is told: a stop sequence may yet cut it off."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omlxd.engine.events import TokenLogprob


@dataclass(slots=True)
class _Waiting:
    logprob: TokenLogprob
    start: int
    end: int | None = None


class ToldLogprobs:
    """Those of one answer, in order, across its parks. All positions are characters of the answer."""

    def __init__(self) -> None:
        self._told = 0
        self._made = 0
        self._waiting: deque[_Waiting] = deque()

    def add(self, text: str, held_characters: int, logprobs: Sequence[TokenLogprob]) -> tuple[TokenLogprob, ...]:
        """Those whose text is told now.

        Args:
            text: what is told with these tokens.
            held_characters: what is made and not told.
            logprobs: of these tokens; the first half of a character makes no text and goes with the other half.
        """
        self._told += len(text)
        if not logprobs and not self._waiting:  # nobody asked, or there is nothing to tell: most tokens by far
            self._made = max(self._made, self._told + held_characters)
            return ()
        self._waiting.extend(_Waiting(each, self._made) for each in logprobs)
        if (made := self._told + held_characters) > self._made:
            self._made = made
            for each in self._waiting:
                each.end = made if each.end is None else each.end
        return self._taken(lambda each: each.end is not None and each.end <= self._told)

    def finish(self, *, is_cut: bool) -> tuple[TokenLogprob, ...]:
        """The last ones; when a stop sequence has cut the answer, none of a token that lies behind the cut."""
        return self._taken(lambda each: not is_cut or each.start < self._told)

    def _taken(self, is_told: Callable[[_Waiting], bool]) -> tuple[TokenLogprob, ...]:
        taken = []
        while self._waiting and is_told(self._waiting[0]):
            taken.append(self._waiting.popleft().logprob)
        return tuple(taken)
