"""Which token sequences are kept for later prompts to begin with, found by their longest shared beginning: pure.

mlx-lm's `LRUPromptCache` was measured and is not it: it evicts in the order of storing, whether or not an entry was
used since; it cannot forget one model of several; and its search visits every continuation of what is shared, token
by token, copying as it goes (0.15 s for 8 chats of 4,000 tokens, 1.9 s for 16,000), on a thread that others wait for.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")
MAX_PER_MODEL: Final = 32
LEAST_TOKENS: Final = 32
"""Shorter prompts are not kept: they are run faster."""
FEWEST_TOKENS: Final = 4
COPY_S: Final = 0.01
"""What a prompt's own copy of a kept beginning is taken to cost: a block of each layer, evaluated one by one
(0.3 ms for 2 small layers and 26 ms for 36 large ones, measured on two cores)."""

_TOKEN_BYTES: Final = array("I").itemsize


@dataclass(frozen=True, slots=True)
class Kept(Generic[T]):
    """One sequence and what is kept for it.

    Attributes:
        model: whose it is.
        key: its tokens, packed: prefixes are compared at memory speed.
        nbytes: memory that it holds.
        cuttable: whether it also serves prompts that share only a beginning of it.
        value: what is kept.
    """

    model: str
    key: bytes
    nbytes: int
    cuttable: bool
    value: T

    @property
    def tokens(self) -> int:
        """Its length in tokens."""
        return len(self.key) // _TOKEN_BYTES


class PrefixIndex(Generic[T]):
    """Sequences of several models in the order of their last use; not for more than one thread."""

    def __init__(self, max_per_model: int = MAX_PER_MODEL) -> None:
        self._max_per_model = max_per_model
        self._kept: dict[tuple[str, bytes], Kept[T]] = {}  # the least recently used first

    @property
    def nbytes(self) -> int:
        """What all of them hold together."""
        return sum(kept.nbytes for kept in self._kept.values())

    def by_model(self) -> dict[str, int]:
        """Bytes by model, of those models that have any."""
        held: Counter[str] = Counter()
        for kept in self._kept.values():
            held[kept.model] += kept.nbytes
        return dict(held)

    def find(self, model: str, tokens: Sequence[int]) -> tuple[Kept[T], int] | None:
        """What shares the longest beginning with `tokens`, and how many tokens of it are shared; None without any."""
        wanted, best, most = _pack(tokens), None, 0
        for kept in self._kept.values():
            if kept.model == model and (shared := _shared(kept, wanted)) >= max(most, 1):
                best, most = kept, shared  # of equals the one used last
        return None if best is None else (best, most)

    def touch(self, kept: Kept[T]) -> None:
        """It was used now."""
        name = (kept.model, kept.key)
        self._kept[name] = self._kept.pop(name)

    def add(
        self, model: str, tokens: Sequence[int], nbytes: int, cuttable: bool, make: Callable[[], T], keep_bytes: int
    ) -> bool:
        """Keep `tokens`, after making room for it; whether that was done.

        Args:
            nbytes: what it will hold; it is left out when that is more than `keep_bytes`.
            cuttable: whether it also serves prompts that share only a beginning of it.
            make: called once when there is room.
            keep_bytes: what all may hold together.
        """
        key = _pack(tokens)
        if self._covered(model, key) or nbytes > keep_bytes:
            return False
        if cuttable:
            self._forget([kept for kept in self._of(model) if key.startswith(kept.key)])
        self._forget(self._of(model)[: 1 - self._max_per_model or None])
        self.shrink(keep_bytes - nbytes)
        self._kept[model, key] = Kept(model, key, nbytes, cuttable, make())
        return True

    def shrink(self, keep_bytes: int) -> None:
        """Forget the least recently used until all hold at most `keep_bytes` together."""
        held_bytes = self.nbytes
        for kept in tuple(self._kept.values()):
            if held_bytes <= keep_bytes:
                return
            held_bytes -= kept.nbytes
            self._forget([kept])

    def drop(self, model: str) -> None:
        """Forget all of a model."""
        self._forget(self._of(model))

    def _covered(self, model: str, key: bytes) -> bool:
        """Whether something kept serves every prompt that `key` would serve; it counts as used."""
        for kept in self._of(model):
            if kept.key == key or (kept.cuttable and kept.key.startswith(key)):
                self.touch(kept)
                return True
        return False

    def _of(self, model: str) -> list[Kept[T]]:
        return [kept for kept in self._kept.values() if kept.model == model]

    def _forget(self, kept: Sequence[Kept[T]]) -> None:
        for each in kept:
            del self._kept[each.model, each.key]


def worth_copying(token_s: float) -> int:
    """The fewest shared tokens whose copy costs less than running them, at so many seconds a token.

    Most prompts of a model share the head of its chat template, which a slow machine runs for a tenth of a second.
    """
    if token_s <= 0:
        return LEAST_TOKENS
    return max(FEWEST_TOKENS, min(LEAST_TOKENS, math.ceil(COPY_S / token_s)))


def _pack(tokens: Sequence[int]) -> bytes:
    return array("I", tokens).tobytes()


def _shared(kept: Kept[Any], wanted: bytes) -> int:
    """How many tokens of what is kept `wanted` can begin with: all of it, or some where it can be cut."""
    if wanted.startswith(kept.key):
        return kept.tokens
    return _common(kept.key, wanted) // _TOKEN_BYTES if kept.cuttable else 0


def _common(one: bytes, other: bytes) -> int:
    """Length of the common beginning, by halving: comparing slices costs next to nothing."""
    low, high = 0, min(len(one), len(other)) + 1  # equal up to low, not (or not known to be) up to high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
