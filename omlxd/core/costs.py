"""What a model's requests cost in memory, as the ledger and admission ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from omlxd.core import kv_estimate
from omlxd.core.learned_costs import LearnedCosts
from omlxd.core.model_shape import ModelShape, shape_of

BLOCK_TOKENS: Final = kv_estimate.STEP_TOKENS
"""KV caches grow by this many tokens at a time, and so do reservations."""


class KvCosts(Protocol):
    """Predicted bytes of one model's requests."""

    @property
    def certain(self) -> bool:
        """Whether a request may be refused on the strength of these figures: checked formulas, or measured."""
        ...

    def kv_bytes(self, tokens: int, rows: int = 1, chunk: int = 0) -> int:
        """KV caches of `rows` requests padded to `tokens`; `chunk` when just prefilled in chunks of that size."""
        ...

    def prefill_transient_bytes(self, chunk: int, context: int) -> int:
        """What a prefill step of `chunk` tokens that ends at `context` holds in passing."""
        ...

    def group_transient_bytes(self, tokens: int) -> int:
        """What a step holds in passing that reads several prompts of so many tokens in all, with padding."""
        ...

    def decode_transient_bytes(self, rows: int, context: int) -> int:
        """What a decode step holds in passing, the copies of joining, growing and leaving included."""
        ...


@dataclass(frozen=True, slots=True)
class ShapeCosts:
    """Costs by the formulas of `kv_estimate`, for one model on one backend."""

    shape: ModelShape
    backend: str = "cpu"

    @property
    def certain(self) -> bool:
        """Checked formulas, or measured."""
        return self.shape.known or self.shape.learned is not None

    def kv_bytes(self, tokens: int, rows: int = 1, chunk: int = 0) -> int:
        """See `KvCosts`."""
        return kv_estimate.kv_bytes(self.shape, tokens, rows, chunk)

    def prefill_transient_bytes(self, chunk: int, context: int) -> int:
        """See `KvCosts`."""
        return kv_estimate.prefill_transient_bytes(self.shape, chunk, context, self.backend)

    def group_transient_bytes(self, tokens: int) -> int:
        """See `KvCosts`."""
        return kv_estimate.group_transient_bytes(self.shape, tokens, self.backend)

    def decode_transient_bytes(self, rows: int, context: int) -> int:
        """See `KvCosts`."""
        return kv_estimate.decode_transient_bytes(self.shape, rows, context, self.backend)


def costs_of_config(
    config: Mapping[str, Any], element_bytes: int | None, learned: LearnedCosts | None, backend: str | None
) -> ShapeCosts:
    """The costs of the model with this config.json, on a backend that may not be known yet (the CPU is the dearest).

    What was learned counts only where no checked formula says it.
    """
    shape = shape_of(config, element_bytes)
    if not shape.known:
        shape = replace(shape, learned=learned)
    return ShapeCosts(shape, backend or "cpu")


@dataclass(frozen=True, slots=True)
class NoCosts:
    """Of a model of which nothing is known: nothing is reserved for its requests, and none is refused."""

    @property
    def certain(self) -> bool:
        """Nothing is known."""
        return False

    def kv_bytes(self, tokens: int, rows: int = 1, chunk: int = 0) -> int:
        """Nothing is reserved."""
        return 0

    def prefill_transient_bytes(self, chunk: int, context: int) -> int:
        """Nothing is reserved."""
        return 0

    def group_transient_bytes(self, tokens: int) -> int:
        """Nothing is reserved."""
        return 0

    def decode_transient_bytes(self, rows: int, context: int) -> int:
        """Nothing is reserved."""
        return 0


NO_COSTS: Final = NoCosts()
