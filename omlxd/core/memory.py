"""One reading of memory, and which of its numbers a policy compares with the limits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Policy(StrEnum):
    """How the enforcer answers pressure; each is a choice of rungs of one ladder (see `core.policy`)."""

    GRACEFUL = "graceful"
    REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """What was seen at one instant, all in bytes.

    Attributes:
        active_bytes: live MLX arrays (`mx.get_active_memory()`).
        cache_bytes: freed buffers that MLX keeps; reclaimable, not "used".
        footprint_bytes: what the operating system charges the process.
        base_bytes: the footprint before any weight; 0 while no engine has started.
        overhead_bytes: what the footprint shows beyond `active`, `cache` and `base`; sampled slowly.
        system_total_bytes: the machine's memory.
        system_available_bytes: what the machine could still give without swapping.
        at_rest: taken with no step in flight; only such a reading may cost anybody anything.
    """

    active_bytes: int = 0
    cache_bytes: int = 0
    footprint_bytes: int = 0
    base_bytes: int = 0
    overhead_bytes: int = 0
    system_total_bytes: int = 0
    system_available_bytes: int = 0
    at_rest: bool = True

    @property
    def used_bytes(self) -> int:
        """Live arrays plus what MLX's own gauge does not see."""
        return self.active_bytes + self.overhead_bytes

    def pressure_bytes(self, policy: Policy) -> int:
        """The number this policy compares with the soft limit: `reference` takes active memory alone (R1)."""
        return self.active_bytes if policy is Policy.REFERENCE else self.used_bytes

    def to_json(self) -> dict[str, Any]:
        """The reading as plain integers, for logs."""
        return asdict(self)
