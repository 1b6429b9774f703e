"""A loaded model's turn: who is served in it, and whether its door is still open."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field


@dataclass(eq=False)
class Turn:
    """From the end of a load to the model's eviction.

    Attributes:
        began_s: when the load had finished.
        batch: the requests that had gathered for it by then; they come first.
        kept: a user's own `load` brought it.
        serves: the requests that are still served when the door is closed; None while it is open.
        closed_s: since when it is closed.
    """

    began_s: float
    batch: frozenset[str] = frozenset()
    kept: bool = False
    serves: frozenset[str] | None = field(default=None, init=False)
    closed_s: float | None = field(default=None, init=False)

    def takes(self, request: str | None) -> bool:
        """Whether this request (or, with None, any new one) belongs to this turn."""
        return self.serves is None or request in self.serves

    def close(self, running: Set[str], now_s: float, batch_ends_s: float) -> None:
        """Serve only what runs and, until `batch_ends_s`, those who had gathered; closing again keeps that up to date.

        Args:
            running: the requests that the engine has.
        """
        served = frozenset(running) | (self.batch if now_s < batch_ends_s else frozenset())
        self.serves = served if self.serves is None else served & self.serves
        self.closed_s = now_s if self.closed_s is None else self.closed_s

    def reopen(self) -> None:
        """Take new requests again."""
        self.serves = self.closed_s = None
