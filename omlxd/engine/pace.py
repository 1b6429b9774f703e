"""Whose step comes between two decode steps, and how large it is, by what the last steps took."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from omlxd.core.turns import UNKNOWN_BYTES_PER_S, UNKNOWN_TOKEN_S, Waiting, chunk_tokens, next_turn, slice_bytes
from omlxd.engine.loader import SlicedLoad
from omlxd.engine.resident import ResidentModel, Running

LEAST_TOKENS = 8
"""Fewer say more about the step than about its tokens."""
LEAST_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class PromptTurn:
    """The next step is a chunk of this prompt."""

    model: ResidentModel
    request: Running
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class LoadTurn:
    """The next step is a slice of the load."""

    slice_bytes: int


class Pace:
    """Seconds a prompt token takes, by model, and bytes a second of a load; old and new measurements weigh the same.

    A token takes longer in a longer context, and the first steps of a model take longer than all that follow, so what
    was seen lately counts and no average of everything.
    """

    def __init__(self) -> None:
        self._token_s: dict[str, float] = {}
        self._bytes_per_s: float | None = None
        self._decoded_s = 0.0

    def next_turn(
        self, models: Iterable[ResidentModel], load: SlicedLoad | None, now_s: float
    ) -> PromptTurn | LoadTurn | None:
        """Whose turn it is, by `core.turns`; None when nobody waits."""
        prompts = [(model, request) for model in models for request in model.prompts]
        prompts.sort(key=lambda prompt: prompt[1].came_s)
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
        granted, token_s = model.granted_chunk_tokens(request), self._token_s.get(model.name)
        return PromptTurn(model, request, chunk_tokens(granted, token_s, turn.budget_s))

    def decoded(self, now_s: float) -> None:
        """Answers got their tokens."""
        self._decoded_s = now_s

    def prefilled(self, model: str, tokens: int, took_s: float) -> None:
        """A prefill step of so many tokens took so long."""
        if tokens >= LEAST_TOKENS and took_s > 0:
            seen = took_s / tokens
            self._token_s[model] = (self._token_s.get(model, seen) + seen) / 2

    def loaded(self, size_bytes: int, took_s: float) -> None:
        """A slice of so many bytes took so long."""
        if size_bytes >= LEAST_BYTES and took_s > 0:
            seen = size_bytes / took_s
            self._bytes_per_s = ((self._bytes_per_s or seen) + seen) / 2

    def _waiting(self, model: ResidentModel, request: Running, now_s: float) -> Waiting:
        token_s = self._token_s.get(model.name, UNKNOWN_TOKEN_S)
        return Waiting(request.left_tokens * token_s, now_s - request.moved_s)
