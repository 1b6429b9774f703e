"""Whose turn it is between two decode steps, how long it may take, and how much of a prompt or a load fits into that.

Whoever is nearest to its first token goes first, so that a short prompt never waits for a long one and a load never
delays people whose model is there. What is long is not starved: the oldest prompt and the load may stand still for
`PATIENCE_S`, then they take one turn. So the oldest always gets on, and every prompt is the oldest one day.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from omlxd.core.step_time import StepTime

STEP_S: Final = 0.1
"""What a turn may take while somebody waits for its end, where its size can be chosen."""
LONE_STEP_S: Final = 0.5
"""What it may take while nobody does; whoever comes in the middle of it, or goes away, waits for it."""
QUIET_S: Final = 1.0
"""How long after the last decode step nobody is taken to come soon."""
PATIENCE_S: Final = 0.5
"""How long the oldest prompt and the load stand still for others."""
HOLD_S: Final = 0.5
"""How long answers stand still, and for at most half of the time, while short prompts are read that join them."""
GROUP_S: Final = 0.3
"""What reading several short prompts at once may take while no answer waits for its end."""
GATHER_S: Final = 0.03
"""How long a short prompt waits for others that are on their way, to be read together with them."""
LOAD_YIELDS_S: Final = 2.0
"""A load ranks behind prompts that need up to so much longer: those who wait for it wait anyway."""

LEAST_TOKENS: Final = 16
"""Smaller chunks cost more a token than they save in waiting."""
WORTH_MORE: Final = 1.5
"""How much longer than its smallest step a model may take that passes the time with every step."""

_MIB: Final = 2**20
MOST_SLICE_BYTES: Final = 256 * _MIB
UNKNOWN_BYTES_PER_S: Final = 640 * _MIB
_FEW_SLICE_BYTES: Final = 64 * _MIB
_LEAST_SLICES: Final = 4


@dataclass(frozen=True, slots=True)
class Waiting:
    """A prompt, or the load, that could take the next turn.

    Attributes:
        left_s: seconds of work it still needs, by what was measured.
        still_s: seconds since its last turn, or since it came.
        is_load: whether it is the load.
    """

    left_s: float
    still_s: float
    is_load: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """The next turn: which of those that wait, and how many seconds it may take."""

    index: int
    budget_s: float


def next_turn(waiting: Sequence[Waiting], quiet_s: float) -> Turn | None:
    """Whose turn it is; None when nobody waits.

    Args:
        waiting: in the order they came; the load anywhere.
        quiet_s: seconds since the last decode step; 0 while answers are being decoded, which wait for the turn's end.
    """
    if not waiting:
        return None
    nearest = min(range(len(waiting)), key=lambda at: (_rank_s(waiting[at]), at))
    index = _out_of_patience(waiting)
    if index is None:
        index = nearest
    # Prompts that come after this one by rank would wait for it whatever its steps are.
    delays_somebody = quiet_s < QUIET_S or index != nearest or (waiting[index].is_load and len(waiting) > 1)
    return Turn(index, STEP_S if delays_somebody else LONE_STEP_S)


class Hold:
    """Whether the answers of a model stand still until the short prompts that came together are read.

    A request that joins a decode batch copies the rows of all others, and so it does when it leaves; and a step of few
    rows costs the same as one of many, wherever reading the weights is what takes the time. So prompts that are read
    soon join at once. Each is told its first token as soon as it has it; those who wait for their next one have had as
    much time before as they lose, and do again afterwards.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._free_s = float("-inf")

    def left_s(self, now_s: float) -> float:
        """Seconds that answers may still stand still, if they do at all."""
        return HOLD_S if self._since_s is None else HOLD_S - (now_s - self._since_s)

    def may_go_on(self, joining: int, left_s: float, now_s: float) -> bool:
        """Whether it is worth it to wait for the next one that joins, and those who wait have the patience.

        Args:
            joining: prompts that wait, and requests that are read and have not joined the batch.
            left_s: seconds until the next of the prompts is read; infinite when none waits.
            now_s: monotonic seconds.
        """
        since_s = now_s if self._since_s is None else self._since_s
        return joining > 1 and now_s >= self._free_s and now_s + left_s - since_s <= HOLD_S

    def goes_on(self, joining: int, left_s: float, now_s: float) -> bool:
        """The same, and from now on nobody of the model decodes, or everybody does."""
        goes_on = self.may_go_on(joining, left_s, now_s)
        if goes_on and self._since_s is None:
            self._since_s = now_s
        if not goes_on and self._since_s is not None:
            self._free_s, self._since_s = now_s + (now_s - self._since_s), None
        return goes_on


def chunk_tokens(granted_tokens: int, time: StepTime, budget_s: float) -> int:
    """Tokens of the next prefill step: as many as fit the time, never more than memory was reserved for.

    A model whose smallest step passes the time anyway may take somewhat more of it, if that brings it on. Sizes double
    from `LEAST_TOKENS`: few different shapes, since backends compile or plan each of them.

    Args:
        granted_tokens: what memory was reserved for.
        time: what steps of this model take.
        budget_s: what the step may take.
    """
    limit_s = max(budget_s, WORTH_MORE * time.of(LEAST_TOKENS))
    if time.of(granted_tokens) <= limit_s:
        return granted_tokens
    size = LEAST_TOKENS
    while time.of(2 * size) <= limit_s:
        size *= 2
    return min(size, granted_tokens)


def group_tokens(granted_tokens: int, time: StepTime, budget_s: float) -> int:
    """Tokens, padding included, of the short prompts that one step reads at once; 0 when no token fits the time.

    Args:
        granted_tokens: what memory was reserved for.
        time: what steps of this model take.
        budget_s: what the step may take.
    """
    if time.of(granted_tokens) <= budget_s:
        return granted_tokens
    return max(0, int((budget_s - time.fixed_s) / time.token_s)) if time.token_s else 0


def slice_bytes(total_bytes: int, bytes_per_s: float | None, budget_s: float) -> int:
    """Bytes of the next slice of a load: what fits the time, and no more than a quarter of a model of some size.

    Args:
        total_bytes: the weights of the model.
        bytes_per_s: how fast slices came lately, None when none was measured.
        budget_s: what the slice may take.
    """
    most = max(_FEW_SLICE_BYTES, min(MOST_SLICE_BYTES, total_bytes // _LEAST_SLICES))
    return min(most, int((bytes_per_s or UNKNOWN_BYTES_PER_S) * budget_s))


def _rank_s(each: Waiting) -> float:
    return each.left_s + (LOAD_YIELDS_S if each.is_load else 0.0)


def _out_of_patience(waiting: Sequence[Waiting]) -> int | None:
    """The oldest prompt or the load, whichever has stood still longer, once that is too long."""
    loads = [at for at, each in enumerate(waiting) if each.is_load]
    oldest = next((at for at, each in enumerate(waiting) if not each.is_load), None)
    candidates = [*loads, *([] if oldest is None else [oldest])]
    longest = max(candidates, key=lambda at: (waiting[at].still_s, -at))
    return longest if waiting[longest].still_s >= PATIENCE_S else None
