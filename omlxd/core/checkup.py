"""What `omlxd doctor` concludes from what was found: one finding a check, with the remedy where one is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from omlxd.core.limits import Machine, MemoryLimits
from omlxd.core.units import format_bytes

MIB: Final = 2**20
MLX_SERIES: Final = "0.32"
"""What `mlx` and `mlx-lm` begin with: the batch generator is no public API and changes with each minor version."""

FULL_DISK_BYTES: Final = 100 * MIB
NEARLY_FULL_DISK_BYTES: Final = 1024 * MIB
SOCKET_ALONE: Final = "on the socket alone"
EMPTIED_REMEDY: Final = (
    "put the models back into the manifest, then `omlxd reload`; if none is meant, `omlxd reload --force`"
)
EARLIEST_S: Final = 1_735_689_600  # the year 2025: no clock that is right shows less
AHEAD_S: Final = 120.0
WIRED_PERCENT: Final = 95  # of the machine's memory; the rest is the system's


class Health(StrEnum):
    """How it is."""

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's result.

    Attributes:
        check: its name.
        health: how it is.
        found: what was seen, a sentence without full stop.
        remedy: what to type or change; None when nothing is to be done.
    """

    check: str
    health: Health
    found: str
    remedy: str | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"check": self.check, "health": self.health.value, "found": self.found, "remedy": self.remedy}


def well(check: str, found: str) -> Finding:
    """Nothing is to be done."""
    return Finding(check, Health.OK, found)


def warning(check: str, found: str, remedy: str) -> Finding:
    """It works, and could be better."""
    return Finding(check, Health.WARNING, found, remedy)


def wrong(check: str, found: str, remedy: str) -> Finding:
    """Something does not work."""
    return Finding(check, Health.WRONG, found, remedy)


def judge_version(package: str, version: str | None) -> Finding:
    """Whether the installed `mlx` or `mlx-lm` is of the series that omlxd is written for; None when it is missing."""
    install = f"`pip install '{package}=={MLX_SERIES}.*'`"
    if version is None:
        return wrong(package, "not installed", install)
    if version.split(".")[:2] != MLX_SERIES.split("."):
        return wrong(package, f"{version}, and omlxd needs {MLX_SERIES}", install)
    return well(package, version)


def judge_device(machine: Machine, wired_limit_bytes: int | None) -> Finding:
    """What the device allows, and on Metal whether that can be more or should be less.

    Args:
        machine: with the device's cap.
        wired_limit_bytes: as `iogpu.wired_limit_mb` sets it, 0 for the system's choice; None where there is none.
    """
    allows = f"{machine.cap_source} allows {format_bytes(machine.cap_bytes)} of {format_bytes(machine.ram_bytes)}"
    if wired_limit_bytes is None:
        return well("device", allows)
    if wired_limit_bytes > machine.ram_bytes * WIRED_PERCENT // 100:
        found = f"the wired limit {format_bytes(wired_limit_bytes)} leaves the system less than {100 - WIRED_PERCENT} %"
        return warning("device", found, f"`{wired_limit_command(machine.ram_bytes)}`")
    if wired_limit_bytes:
        return well("device", f"{allows}, by `iogpu.wired_limit_mb`")
    return well("device", f"{allows}, until the next boot more by `{wired_limit_command(machine.ram_bytes)}`")


def judge_limits(limits: MemoryLimits, machine: Machine) -> Finding:
    """Whether the limits are those that were asked for, and on Metal what would raise the device's cap."""
    if not limits.warnings:
        return well("limits", _limits_text(limits))
    remedy = "lower `max_memory`"
    if limits.binding == "metal":
        remedy += f", or `{wired_limit_command(machine.ram_bytes)}`"
    return warning("limits", limits.warnings[0], remedy)


def judge_limits_in_force(
    in_force: MemoryLimits, asked: MemoryLimits, machine: Machine, *, emptied: bool = False
) -> Finding:
    """Whether a daemon that runs keeps the limits that it would be started with again.

    Args:
        in_force: the daemon's.
        asked: the manifest's.
        machine: what the limits follow from.
        emptied: whether the daemon has models and the manifest none, which a reload refuses.
    """
    if (in_force.soft_bytes, in_force.hard_bytes) == (asked.soft_bytes, asked.hard_bytes):
        return judge_limits(asked, machine)
    found = f"in force are {_limits_text(in_force)}, and the manifest asks for {_limits_text(asked)}"
    return warning("limits", found, EMPTIED_REMEDY if emptied else "`omlxd reload`")


def _limits_text(limits: MemoryLimits) -> str:
    soft = f"soft {format_bytes(limits.soft_bytes)} ({limits.set_by})" if limits.soft_bytes else "no soft limit"
    return f"{soft}, hard {format_bytes(limits.hard_bytes)} ({limits.hard_set_by})"


def judge_address(listens: str | None, asked: str | None, key: bool) -> Finding:
    """Whether a daemon that runs listens where the manifest says; another address there is known to be free.

    Args:
        listens: its `host:port`, None for the Unix socket alone.
        asked: the manifest's, with the port that was bound where any will do.
        key: whether clients must send one.
    """
    if listens == asked:
        return well("api", f"{asked}, {'with a key' if key else 'without a key'}" if asked else SOCKET_ALONE)
    found = f"the daemon listens {_at(listens)}, by the manifest {_at(asked)}"
    return warning("api", found, "`omlxd restart`")


def _at(listens: str | None) -> str:
    return f"at {listens}" if listens else SOCKET_ALONE


def wired_limit_command(ram_bytes: int) -> str:
    """What lets Metal use all but the system's 5 % of the memory, in whole MiB, until the next boot."""
    return f"sudo sysctl iogpu.wired_limit_mb={ram_bytes * WIRED_PERCENT // 100 // MIB}"


def judge_promised(pinned_bytes: int, preloaded_bytes: int, soft_bytes: int) -> Finding:
    """Whether what is pinned and what is loaded at the start fit at the same time.

    Args:
        pinned_bytes: weights of the pinned models.
        preloaded_bytes: weights of the models that are preloaded and not pinned.
        soft_bytes: the soft limit, 0 for none.
    """
    found = f"{format_bytes(pinned_bytes)} pinned, {format_bytes(preloaded_bytes)} more preloaded"
    if 0 < soft_bytes < pinned_bytes:
        return wrong("pins", f"{found}: over the limit", "remove a `pin` or raise `max_memory`")
    if 0 < soft_bytes < pinned_bytes + preloaded_bytes:
        return warning("pins", f"{found}: not all at a time", "remove a `preload` or raise `max_memory`")
    return well("pins", found)


def judge_lock(held: bool, pid: int | None) -> Finding:
    """Who holds the lock, if anybody does.

    Args:
        held: whether somebody does.
        pid: the process number in it, or None when there is none.
    """
    if held and pid is None:
        return warning("lock", "held, and nobody has written down who holds it", "look again in a second")
    return well("lock", f"held by pid {pid}" if held else "free")


def judge_disk(free_bytes: int) -> Finding:
    """Whether the log and the state file can still be written."""
    found = f"{format_bytes(free_bytes)} free where the home is"
    if free_bytes < FULL_DISK_BYTES:
        return wrong("disk", found, "make room: the log loses lines, and what is set is not saved")
    if free_bytes < NEARLY_FULL_DISK_BYTES:
        return warning("disk", found, "make room")
    return well("disk", found)


def judge_logs(held_bytes: int, most_bytes: int) -> Finding:
    """Whether the logs stay within what the manifest gives them (rotated files, and what the process wrote beside)."""
    found = f"{format_bytes(held_bytes)} of at most {format_bytes(most_bytes)}"
    if held_bytes > most_bytes:
        return warning("logs", f"{format_bytes(held_bytes)}, more than {format_bytes(most_bytes)}", "remove old files")
    return well("logs", found)


def judge_stale(names: Sequence[str]) -> Finding:
    """Files that an earlier daemon left and nobody needs."""
    if names:
        return warning(
            "files", f"left over: {', '.join(f'`{name}`' for name in names)}", "look at them and remove them"
        )
    return well("files", "nothing left over")


def judge_clock(now_s: float, last_written_s: float) -> Finding:
    """Whether the wall clock can be right.

    Args:
        now_s: what it shows, seconds since 1970.
        last_written_s: the last write to the log by the file's own time; 0 when there is none.
    """
    if now_s < EARLIEST_S:
        return wrong("clock", "it shows a time before 2025", "set the clock")
    if last_written_s > now_s + AHEAD_S:
        return warning("clock", f"the log was written {last_written_s - now_s:.0f} s in the future", "set the clock")
    return well("clock", "plausible")


def judge_service(
    kind: str, state: str, *, enabled: bool, edited: bool, last_exit: int | None, missing: str | None, other: int | None
) -> Finding:
    """Whether the service can run the daemon, and does so.

    Args:
        kind: `launchd` or `systemd`.
        state: as they call it.
        enabled: whether it starts at login.
        edited: whether its file is not as we wrote it.
        last_exit: how it ended, if it did.
        missing: the program in its file, when that does not exist.
        other: the pid of a daemon that runs without it.
    """
    if missing is not None:
        return wrong(
            "service", f"it starts `{missing}`, which does not exist", "`omlxd service install` with this omlxd"
        )
    if state == "failed":
        return wrong("service", f"{kind} says that it failed (status {last_exit})", "`omlxd service start`")
    if not enabled:
        return warning("service", "installed, and not started at login", "`omlxd service install`")
    if other is not None:
        found = f"{kind}: {state}, and a daemon that is no service runs (pid {other})"
        return warning("service", found, "`omlxd stop`, then `omlxd service start`")
    return well("service", f"{kind}: {state}{', its file was edited' if edited else ''}")


def judge_running(version: str, own_version: str, state: str, level: str) -> Finding:
    """Whether the daemon that runs is the one that is installed, and gets on."""
    if version != own_version:
        return warning("daemon", f"it is omlxd {version}, and this is {own_version}", "`omlxd restart`")
    if level == "exhausted":
        return warning("daemon", f"{state}, over its limit with nothing left to do", "`omlxd why`")
    return well("daemon", f"omlxd {version}, {state}")
