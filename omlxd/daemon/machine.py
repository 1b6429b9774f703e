"""What this machine has to share: memory, the container's limit, the device's cap."""

from __future__ import annotations

import re
from pathlib import Path

import psutil

from omlxd.core.limits import CapSource, Machine

_CGROUP = Path("/sys/fs/cgroup")


def find_machine(device_cap: tuple[int, str] | None = None, cgroup: Path = _CGROUP) -> Machine:
    """The machine as limits see it; the tightest of the device's and the container's cap counts.

    Args:
        device_cap: bytes and source as `Engine.device_cap` tells them, None when nothing caps or MLX is not there yet.
        cgroup: where the container's limits are mounted.
    """
    ram_bytes = int(psutil.virtual_memory().total)
    caps: list[tuple[int, CapSource]] = []
    if device_cap is not None:
        caps.append((device_cap[0], "cuda" if device_cap[1] == "cuda" else "metal"))
    container_bytes = _container_bytes(cgroup)
    if container_bytes is not None and container_bytes < ram_bytes:
        caps.append((container_bytes, "cgroup"))
    if not caps:
        return Machine(ram_bytes)
    cap_bytes, source = min(caps)
    return Machine(ram_bytes, cap_bytes, source)


def _container_bytes(cgroup: Path) -> int | None:
    """The memory limit of this process's cgroup or the nearest above it (v2, then v1); None when there is none."""
    found = []
    for path in (*_own_groups(cgroup), cgroup / "memory" / "memory.limit_in_bytes"):
        try:
            text = path.read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            continue
        if text.isdigit() and 0 < int(text) < 2**60:  # v1 writes a huge number for "none", v2 writes "max"
            found.append(int(text))
    return min(found, default=None)


def _own_groups(cgroup: Path) -> list[Path]:
    try:
        own = Path("/proc/self/cgroup").read_text(encoding="utf-8")
    except (OSError, ValueError):
        own = ""
    match = re.search(r"^0::/(.*)$", own, re.MULTILINE)
    folder = cgroup / match[1] if match else cgroup
    folders = [folder, *(parent for parent in folder.parents if parent == cgroup or cgroup in parent.parents)]
    return [each / "memory.max" for each in folders]
