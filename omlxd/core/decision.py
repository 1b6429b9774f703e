"""What the enforcer can do, and a decision to do it: plain data that policy, enforcer and records share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from omlxd.core.snapshot import Candidate


@dataclass(frozen=True, slots=True)
class DropCache:
    """Give MLX's freed buffers back; costs nothing."""


@dataclass(frozen=True, slots=True)
class Unload:
    """Abort the model's running requests and unload it; its waiting requests survive."""

    model: str


@dataclass(frozen=True, slots=True)
class CancelLoad:
    """Stop the load at its next slice; one that is `retried` is tried again by itself after a while."""

    model: str
    retried: bool = False


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """Abort the model's running requests, so that their KV caches are freed, and keep it loaded."""

    model: str


@dataclass(frozen=True, slots=True)
class TrimPrefixCaches:
    """Shrink the prefix caches of all models together to `keep_bytes`, least recently used first."""

    keep_bytes: int


@dataclass(frozen=True, slots=True)
class Park:
    """Take a running request out, free its KV cache, keep its tokens, and run it again when it fits."""

    model: str
    request: str


Action = DropCache | Unload | CancelLoad | AbortRequests | TrimPrefixCaches | Park


class Outcome(StrEnum):
    """What a decision amounts to."""

    WITHIN_LIMIT = "within_limit"
    ACT = "act"
    NOT_AT_REST = "not_at_rest"
    UNLOADING = "unloading"
    ALL_PINNED = "all_pinned"
    UNACCOUNTED = "unaccounted"
    SYSTEM_SHORT = "system_short"


@dataclass(frozen=True, slots=True)
class Decision:
    """The next action, if any, and its reason in plain words with numbers.

    `candidates` holds those considered in the order of choice, at most `case.MAX_CANDIDATES`.
    """

    rung: str
    action: Action | None
    candidates: tuple[Candidate, ...]
    reason: str
    pressure_bytes: int
    soft_bytes: int
    outcome: Outcome

    @property
    def exhausted(self) -> bool:
        """Over the limit with nothing left to do (R9)."""
        return self.outcome in (Outcome.ALL_PINNED, Outcome.UNACCOUNTED)
