"""How long a prefill step takes by its tokens, from the last steps of a model: a fixed part and a part for each token.

Without the fixed part a slow model would be caught in its smallest chunks: where 16 tokens take as long as 64 nearly
do, halving the chunk again and again halves the speed and wins nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step: `fixed_s`, and `token_s` for each of its tokens."""

    fixed_s: float
    token_s: float

    def of(self, tokens: int) -> float:
        """Seconds of one step of so many tokens."""
        return self.fixed_s + self.token_s * tokens

    def in_chunks(self, tokens: int, chunk_tokens: int) -> float:
        """Seconds of so many tokens in steps of at most `chunk_tokens`."""
        return self.fixed_s * math.ceil(tokens / chunk_tokens) + self.token_s * tokens


UNKNOWN: Final = StepTime(0.004, 0.003)
"""Of a model that has taken no step."""


def step_time(steps: Sequence[tuple[int, float]]) -> StepTime:
    """What the last steps say.

    A straight line through them; while all have one size, half of a step is taken to be fixed, so that a size that may
    fit is tried. Never a negative part.

    Args:
        steps: tokens and seconds of each, at most a few: what was long ago had another context.
    """
    if not steps:
        return UNKNOWN
    middle_tokens = sum(tokens for tokens, _ in steps) / len(steps)
    middle_s = sum(took_s for _, took_s in steps) / len(steps)
    spread = sum((tokens - middle_tokens) ** 2 for tokens, _ in steps)
    slope = sum((tokens - middle_tokens) * (took_s - middle_s) for tokens, took_s in steps)
    if spread == 0 or slope <= 0:
        return StepTime(middle_s / 2, middle_s / 2 / middle_tokens)
    token_s = min(slope / spread, middle_s / middle_tokens)  # more would make the fixed part negative
    return StepTime(max(0.0, middle_s - token_s * middle_tokens), token_s)
