"""The text of a systemd user unit, and what `systemctl show` says; no effects."""

from __future__ import annotations

import re
from pathlib import Path

from omlxd.core.errors import InvalidRequest
from omlxd.service.host import ServiceState, ServiceView
from omlxd.service.seal import sealed
from omlxd.service.spec import WATCHDOG_S, ServiceSpec

GROWING_DELAYS_SINCE = 254
SHOWN = ("LoadState", "ActiveState", "UnitFileState", "MainPID", "ExecMainStatus", "Result")

_STATES = {
    "active": ServiceState.RUNNING,
    "activating": ServiceState.RUNNING,
    "reloading": ServiceState.RUNNING,
    "deactivating": ServiceState.RUNNING,
    "inactive": ServiceState.STOPPED,
    "failed": ServiceState.FAILED,
}


def unit_name(name: str) -> str:
    """What systemd calls the service."""
    return f"{name}.service"


def unit_text(spec: ServiceSpec, systemd_version: int) -> str:
    """The unit, for this version of systemd.

    Raises:
        InvalidRequest: the path of Python holds a `$`, for which systemd has no spelling there.
    """
    program, *arguments = spec.command
    if "$" in program:
        raise InvalidRequest(
            f"systemd cannot start `{program}`: a `$` in the path of a program", hint="move the environment elsewhere"
        )
    words = [_word(program), *(_word(each).replace("$", "$$") for each in (*arguments, "--supervisor", "systemd"))]
    environment = [f"Environment={_word(f'{name}={value}')}" for name, value in spec.environment.items()]
    limits, delays = _back_off(systemd_version)
    lines = [
        "[Unit]",
        "Description=omlxd: local language models under a memory limit",
        *limits,
        "",
        "[Service]",
        "Type=notify",
        "NotifyAccess=main",
        f"ExecStart={' '.join(words)}",
        "ExecReload=/bin/kill -HUP $MAINPID",
        *environment,
        "UMask=0077",
        "TimeoutStartSec=120",
        f"TimeoutStopSec={round(spec.stop_timeout_s)}",
        "# Fed only while the enforcer looks at memory and the thread that owns MLX takes steps.",
        f"WatchdogSec={WATCHDOG_S}",
        "Restart=on-failure",
        *delays,
        "# A wrong command line or manifest is not mended by another start.",
        "RestartPreventExitStatus=2 78",
        "OOMPolicy=stop",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return sealed("\n".join(lines) + "\n", at_line=0, opening="# ")


def program_of(text: str) -> Path | None:
    """What a unit starts; None when it does not say so as `unit_text` writes it."""
    found = re.search(r'^ExecStart="((?:[^"\\]|\\.)+)"', text, re.MULTILINE)
    return Path(re.sub(r"\\(.)", r"\1", found[1]).replace("%%", "%")) if found else None


def view_of(shown: str) -> ServiceView:
    """What `systemctl show` says, of the properties in `SHOWN`."""
    found = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    state = _STATES.get(found.get("ActiveState", ""), ServiceState.UNKNOWN)
    pid = int(found.get("MainPID") or 0)
    status = int(found.get("ExecMainStatus") or 0)
    return ServiceView(
        state,
        enabled=found.get("UnitFileState") == "enabled",
        pid=pid or None,
        last_exit=None if pid else status,
    )


def version_of(printed: str) -> int:
    """The number in what `systemctl --version` prints; 0 when there is none."""
    found = re.match(r"systemd (\d+)", printed)
    return int(found[1]) if found else 0


def _back_off(version: int) -> tuple[list[str], list[str]]:
    """Delays that grow from 1 s to 5 min where systemd can; before, ten tries and then `failed`."""
    if version >= GROWING_DELAYS_SINCE:
        return ["StartLimitIntervalSec=0"], ["RestartSec=1", "RestartSteps=8", "RestartMaxDelaySec=300"]
    return ["StartLimitIntervalSec=300", "StartLimitBurst=10"], ["RestartSec=10"]


def _word(text: str) -> str:
    """One word of a setting: quoted, and without the specifiers that `%` begins."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'
