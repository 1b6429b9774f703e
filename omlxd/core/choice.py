"""Who has to go, of those that may: pure arithmetic over an order that somebody else decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def necessary(order: Sequence[T], short_bytes: int, frees_bytes: Callable[[T], int]) -> list[T]:
    """The shortest prefix that frees `short_bytes`, less what can be spared of it; empty when all do not suffice.

    Args:
        order: those that may go, the first to go first.
        frees_bytes: what would be free without one of them.
    """
    freed_bytes, sizes = 0, list[int]()
    for each in order:
        sizes.append(frees_bytes(each))
        freed_bytes += sizes[-1]
        if freed_bytes >= short_bytes:
            break
    else:
        return []
    spared = set()
    for index in range(len(sizes) - 2, -1, -1):  # the last to go is spared first
        if freed_bytes - sizes[index] >= short_bytes:
            freed_bytes -= sizes[index]
            spared.add(index)
    return [each for index, each in enumerate(order[: len(sizes)]) if index not in spared]
