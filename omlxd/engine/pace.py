"""Whose step comes between two decode steps, and how large it is, by what the last steps took."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from omlxd.core.group_budget import SIZES
from omlxd.core.prefix_index import worth_copying
from omlxd.core.step_time import UNKNOWN, StepTime, step_time
from omlxd.core.turns import (
    GATHER_S,
    GROUP_S,
    STEP_S,
    UNKNOWN_BYTES_PER_S,
    Hold,
    Waiting,
    chunk_tokens,
    group_tokens,
    next_turn,
    slice_bytes,
)
from omlxd.engine.loader import SlicedLoad
from omlxd.engine.resident import ResidentModel
from omlxd.engine.running import Running

LEAST_TOKENS = 8
"""Fewer say more about the step than about its tokens."""
LEAST_BYTES = 2**20
LAST_STEPS = 8


@dataclass(frozen=True, slots=True)
class PromptTurn:
    """The next step is a chunk of this prompt, or this one and other short ones, of `group_tokens` with padding.

    At the first chunk fewer kept tokens than `least_reused` are run again.
    """

    model: ResidentModel
    request: Running
    chunk_tokens: int
    group_tokens: int
    least_reused: int


@dataclass(frozen=True, slots=True)
class Gathering:
    """No step yet: others come in moments whose prompts can be read together with the next one."""

    left_s: float


@dataclass(frozen=True, slots=True)
class LoadTurn:
    """The next step is a slice of the load."""

    slice_bytes: int


class Pace:
    """What the last prefill steps of each model took, and how fast the last slices of a load came.

    A token takes longer in a longer context, and the first steps of a model take longer than all that follow, so what
    was seen lately counts and no average of everything.
    """

    def __init__(self) -> None:
        self._steps: dict[str, deque[tuple[int, float]]] = {}
        self._times: dict[str, StepTime] = {}
        self._holds: dict[str, Hold] = {}
        self._bytes_per_s: float | None = None
        self._decoded_s = 0.0

    def next_turn(
        self, models: Iterable[ResidentModel], load: SlicedLoad | None, now_s: float, *, answers_wait: bool
    ) -> PromptTurn | LoadTurn | Gathering | None:
        """Whose turn it is, by `core.turns`; None when nobody waits. While they are decoded, `answers_wait`."""
        prompts = [(model, request) for model in models for request in model.prompts]
        prompts.sort(key=lambda prompt: (prompt[1].order.arrival, prompt[1].came_s))
        waiting = [self._waiting(model, request, now_s) for model, request in prompts]
        if load:
            left_s = (load.total_bytes - load.done_bytes) / (self._bytes_per_s or UNKNOWN_BYTES_PER_S)
            waiting.append(Waiting(left_s, now_s - load.moved_s, is_load=True))
        turn = next_turn(waiting, now_s - self._decoded_s)
        if turn is None:
            return None
        if load and turn.index == len(prompts):
            return LoadTurn(slice_bytes(load.total_bytes, self._bytes_per_s, turn.budget_s))
        model, request = prompts[turn.index]
        if (left_s := request.came_s + GATHER_S - now_s) > 0 and model.coming and _may_share(model, request):
            return Gathering(left_s)
        granted, time = model.granted_chunk_tokens(request), self._times.get(model.name, UNKNOWN)
        size = chunk_tokens(granted, time, turn.budget_s)
        together_s = STEP_S if answers_wait else min(GROUP_S, self._hold(model).left_s(now_s))
        together = group_tokens(model.group_tokens, time, max(turn.budget_s, together_s))
        return PromptTurn(model, request, size, together, worth_copying(time.token_s))

    def holds(self, model: ResidentModel, now_s: float) -> bool:
        """Whether the model's answers stand still until prompts that are read soon can join them, by `core.turns`."""
        prompts = model.prompts_soon
        return self._hold(model).goes_on(len(prompts) + model.unjoined, self._next_read_s(model, prompts), now_s)

    def holds_after(self, model: ResidentModel, request: Running, now_s: float) -> bool:
        """Whether they would, or this request would, once its prompt is read."""
        others = [other for other in model.prompts_soon if other is not request]
        left_s = self._left_s(model, request) + self._next_read_s(model, others)
        return self._hold(model).may_go_on(1 + len(others) + model.unjoined, left_s, now_s)

    def decoded(self, now_s: float) -> None:
        """Answers got their tokens."""
        self._decoded_s = now_s

    def prefilled(self, model: str, tokens: int, took_s: float) -> None:
        """A prefill step of so many tokens took so long."""
        if tokens >= LEAST_TOKENS and took_s > 0:
            steps = self._steps.setdefault(model, deque(maxlen=LAST_STEPS))
            steps.append((tokens, took_s))
            self._times[model] = step_time(steps)

    def loaded(self, size_bytes: int, took_s: float) -> None:
        """A slice of so many bytes took so long."""
        if size_bytes >= LEAST_BYTES and took_s > 0:
            seen = size_bytes / took_s
            self._bytes_per_s = ((self._bytes_per_s or seen) + seen) / 2

    def _waiting(self, model: ResidentModel, request: Running, now_s: float) -> Waiting:
        return Waiting(self._left_s(model, request), now_s - request.moved_s)

    def _left_s(self, model: ResidentModel, request: Running) -> float:
        time = self._times.get(model.name, UNKNOWN)
        return time.in_chunks(request.left_tokens, model.granted_chunk_tokens(request))

    def _next_read_s(self, model: ResidentModel, prompts: Sequence[Running]) -> float:
        if not prompts or not model.shares_batch:
            return math.inf
        return min(self._left_s(model, request) for request in prompts)

    def _hold(self, model: ResidentModel) -> Hold:
        return self._holds.setdefault(model.name, Hold())


def _may_share(model: ResidentModel, request: Running) -> bool:
    """Whether its prompt can be read in one step with another one."""
    return not request.cache and 2 * request.left_tokens <= SIZES[0] and model.shares_batch
