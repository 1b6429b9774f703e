"""What a service is made from: the command, its home and environment; nothing of launchd or systemd."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from omlxd.core.errors import InvalidRequest
from omlxd.core.wording import shown

NAME = "omlxd"
WATCHDOG_S = 180


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One daemon as a service.

    Attributes:
        name: of the unit; see `service_name`.
        command: the daemon's command line, absolute; how it is supervised is added by who renders it.
        error_file: where launchd puts what the process writes outside of its log.
        environment: variables that the daemon gets beside those that the system gives.
        stop_timeout_s: seconds that a stop may take before the process is killed.
        user: whose daemon it is when it runs for the machine; None for the user who installs it.

    Raises:
        InvalidRequest: a path or a variable has characters that neither file can hold.
    """

    name: str
    command: tuple[str, ...]
    error_file: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    stop_timeout_s: float = 60.0
    user: str | None = None

    def __post_init__(self) -> None:
        for text in (*self.command, str(self.error_file), *self.environment, *self.environment.values()):
            if not text.isprintable():  # control characters, line ends, and bytes that are not UTF-8
                raise InvalidRequest(
                    f"`{shown(text)}` has characters that a service file cannot hold",
                    hint="choose a path without control characters",
                )


def service_name(home: Path, default_home: Path) -> str:
    """`omlxd` for the default home; another home is another service, named after its path."""
    if home == default_home:
        return NAME
    return f"{NAME}-{hashlib.sha256(str(home).encode('utf-8', 'surrogateescape')).hexdigest()[:8]}"
