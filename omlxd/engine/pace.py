"""How fast prompts run and weights come in, by what the last steps took."""

from __future__ import annotations

LEAST_TOKENS = 8
"""Fewer say more about the step than about its tokens."""
LEAST_BYTES = 2**20


class Pace:
    """Seconds a prompt token takes, by model, and bytes a second of a load; old and new measurements weigh the same.

    A token takes longer in a longer context, and the first steps of a model take longer than all that follow, so what
    was seen lately counts and no average of everything.
    """

    def __init__(self) -> None:
        self.token_s: dict[str, float] = {}
        self.bytes_per_s: float | None = None

    def prefilled(self, model: str, tokens: int, took_s: float) -> None:
        """A prefill step of so many tokens took so long."""
        if tokens >= LEAST_TOKENS and took_s > 0:
            seen = took_s / tokens
            self.token_s[model] = (self.token_s.get(model, seen) + seen) / 2

    def loaded(self, size_bytes: int, took_s: float) -> None:
        """A slice of so many bytes took so long."""
        if size_bytes >= LEAST_BYTES and took_s > 0:
            seen = size_bytes / took_s
            self.bytes_per_s = ((self.bytes_per_s or seen) + seen) / 2
