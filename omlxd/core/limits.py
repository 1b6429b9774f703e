"""From what the user asked for and what the machine has to the two limits that hold.

The soft limit is `max_memory`; above it the enforcer acts. The hard limit is what loads and prefill may never pass:
`min(max(soft, RAM - 4 GiB), device cap)`. A limit of 0 is one that is not enforced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from omlxd.core.errors import InvalidRequest
from omlxd.core.states import LimitOrigin
from omlxd.core.units import format_bytes

GIB: Final = 2**30
SYSTEM_RESERVE_BYTES: Final = 4 * GIB  # what the hard limit leaves to the system
AUTO_RESERVE_BYTES: Final = 8 * GIB  # what `auto` leaves to everything else

_SAID: Final[Mapping[str, str]] = {LimitOrigin.LIMIT: "omlxd limit", LimitOrigin.COMMAND_LINE: "--max-memory"}

CapSource = Literal["metal", "cuda", "cgroup"]

_CAP_NAMES: Final = {
    "ram": "the machine's memory",
    "metal": "what Metal lets one process use",
    "cuda": "the device's memory",
    "cgroup": "the container's memory limit",
}


@dataclass(frozen=True)
class Machine:
    """What there is to share: the system's memory, and what the device or container allows of it.

    Args:
        ram_bytes: the machine's memory.
        device_cap_bytes: the most the device allows (positive), or None where nothing does.
        device_cap_source: who set that cap.
    """

    ram_bytes: int
    device_cap_bytes: int | None = None
    device_cap_source: CapSource | None = None

    @property
    def cap_bytes(self) -> int:
        """The most that model memory can ever be."""
        return self._cap()[0]

    @property
    def cap_source(self) -> str:
        """What sets `cap_bytes`: `ram`, `metal`, `cuda` or `cgroup`."""
        return self._cap()[1]

    def _cap(self) -> tuple[int, str]:
        if self.device_cap_bytes is None:
            return self.ram_bytes, "ram"
        source = self.device_cap_source or "ram"
        # A CUDA device has memory of its own; everything else lives in RAM, whatever a cgroup promises.
        if source != "cuda" and self.ram_bytes < self.device_cap_bytes:
            return self.ram_bytes, "ram"
        return self.device_cap_bytes, source


@dataclass(frozen=True)
class MemoryLimits:
    """The limits in force, in bytes (0 = not enforced).

    Args:
        soft_bytes: above it the enforcer acts.
        hard_bytes: loads and prefill may never pass it.
        binding: what sets the soft limit: `max_memory`, `ram`, `metal`, `cuda` or `cgroup`.
        warnings: sentences for the user when the limit is not what was asked for.
        hard_binding: what sets the hard limit: `hard_limit`, `ram`, or what sets the soft one or caps it.
        origin: who said what `max_memory` is.
    """

    soft_bytes: int
    hard_bytes: int
    binding: str
    warnings: tuple[str, ...] = ()
    hard_binding: str = field(default="ram", compare=False)
    origin: LimitOrigin = LimitOrigin.MANIFEST

    @property
    def set_by(self) -> str:
        """What sets the soft limit, as the user knows it."""
        return limit_set_by(self.binding, self.origin)

    @property
    def hard_set_by(self) -> str:
        """What sets the hard limit, as the user knows it."""
        return limit_set_by(self.hard_binding, self.origin)


def resolve_limits(
    max_memory: int, hard_limit: int | None, machine: Machine, origin: LimitOrigin = LimitOrigin.MANIFEST
) -> MemoryLimits:
    """The limits that hold on this machine.

    Args:
        max_memory: the soft limit asked for, in bytes; 0 or less means no enforcement.
        hard_limit: an explicit hard limit in bytes, or None for `min(max(soft, RAM - 4 GiB), cap)`.
        machine: what there is.
        origin: who asked for that soft limit.

    Raises:
        InvalidRequest: the explicit hard limit is below the soft limit or above the cap.
    """
    cap_bytes, cap_source = machine.cap_bytes, machine.cap_source
    soft_bytes, binding = max(0, max_memory), "max_memory"
    said = limit_set_by(binding, origin)
    warnings: tuple[str, ...] = ()
    if soft_bytes > cap_bytes:
        soft_bytes, binding = cap_bytes * 95 // 100, cap_source
        warnings = (
            f"`{said}` {format_bytes(max_memory)} is above {_CAP_NAMES[cap_source]}"
            f" ({cap_source}: {format_bytes(cap_bytes)}); using {format_bytes(soft_bytes)}",
        )
    if hard_limit is None:
        left_bytes = machine.ram_bytes - SYSTEM_RESERVE_BYTES
        hard_bytes = max(0, min(max(soft_bytes, left_bytes), cap_bytes))
        hard_binding = "ram" if soft_bytes <= left_bytes else binding
        if cap_bytes < max(soft_bytes, left_bytes):
            hard_binding = cap_source
    else:
        hard_bytes, hard_binding = _checked_hard(hard_limit, soft_bytes, said, machine), "hard_limit"
    return MemoryLimits(
        soft_bytes=soft_bytes,
        hard_bytes=hard_bytes,
        binding=binding,
        warnings=warnings,
        hard_binding=hard_binding,
        origin=origin,
    )


def limit_set_by(binding: str, origin: str | None) -> str:
    """What sets a limit, in the user's words: a `max_memory` that is not the manifest's is named by who said it.

    Args:
        binding: `max_memory`, `ram`, `metal` and so on.
        origin: a `LimitOrigin`; None (an older daemon or log does not say it) counts as the manifest.
    """
    return _SAID.get(origin or "", binding) if binding == "max_memory" else binding


def auto_limit(machine: Machine) -> int:
    """The soft limit of `max_memory = "auto"`: the larger of RAM/2 and RAM - 8 GiB, at most 0.9 of the device cap."""
    asked_bytes = max(machine.ram_bytes // 2, machine.ram_bytes - AUTO_RESERVE_BYTES)
    return asked_bytes if machine.device_cap_bytes is None else min(asked_bytes, machine.cap_bytes * 9 // 10)


def _checked_hard(hard_limit: int, soft_bytes: int, said: str, machine: Machine) -> int:
    cap_bytes, cap_source = machine.cap_bytes, machine.cap_source
    numbers = {"hard_limit_bytes": hard_limit, "soft_limit_bytes": soft_bytes, "cap_bytes": cap_bytes}
    if hard_limit < soft_bytes:
        raise InvalidRequest(
            f"`hard_limit` {format_bytes(hard_limit)} is below the soft limit {format_bytes(soft_bytes)} ({said})",
            hint=f"set `hard_limit` to {format_bytes(soft_bytes)} or more, or lower `max_memory`",
            details=numbers,
        )
    if hard_limit > cap_bytes:
        raise InvalidRequest(
            f"`hard_limit` {format_bytes(hard_limit)} is above {_CAP_NAMES[cap_source]}"
            f" ({cap_source}: {format_bytes(cap_bytes)})",
            hint=f"lower `hard_limit` to {format_bytes(cap_bytes)} or leave it out",
            details=numbers,
        )
    return max(0, hard_limit)
