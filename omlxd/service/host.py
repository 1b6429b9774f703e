"""What launchd and systemd have in common for us: the seam between the commands and what runs services here."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from omlxd.core.errors import OmlxError
from omlxd.service.spec import ServiceSpec

RUN_TIMEOUT_S = 300.0


class ServiceState(StrEnum):
    """What the system says of the service."""

    RUNNING = "running"
    STOPPED = "stopped"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ServiceView:
    """The service as the system sees it; None where it does not say."""

    state: ServiceState
    enabled: bool = True
    pid: int | None = None
    last_exit: int | None = None


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command of the system ended, and all that it wrote."""

    status: int
    output: str


Run = Callable[[Sequence[str]], Ran]


class ServiceHost(Protocol):
    """launchd or systemd. Every method but `text` and `path` talks to it; none of them writes the file."""

    @property
    def kind(self) -> str:
        """`launchd` or `systemd`."""
        ...

    def path(self, name: str) -> Path:
        """Where the file of the service of this name belongs."""
        ...

    def text(self, spec: ServiceSpec) -> str:
        """What its file says; pure but for the version of the host."""
        ...

    def program(self, text: str) -> Path | None:
        """What a file of ours starts; None when it does not say so as we do."""
        ...

    def enable(self, name: str) -> None:
        """The file was written: have it started at each login (or boot) from now on, but not now. Idempotent."""
        ...

    def disable(self, name: str) -> None:
        """The file is about to go: end the service and forget it. Idempotent."""
        ...

    def forget(self, name: str) -> None:
        """The file is gone."""
        ...

    def start(self, name: str) -> None:
        """Start it now, from the file as it is; one that runs is left alone. It need not be ready at return."""
        ...

    def stop(self, name: str) -> None:
        """End it and wait until it is gone; it stays away until the next login (or boot) or `start`."""
        ...

    def view(self, name: str) -> ServiceView:
        """What the system says of it now."""
        ...


def run(command: Sequence[str]) -> Ran:
    """Run a command of the system to its end.

    Raises:
        OmlxError: it does not exist, or did not end in five minutes.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        raise OmlxError(
            f"`{command[0]}` cannot be run ({error.strerror})", hint="`omlxd start` runs the daemon without a service"
        ) from None
    except subprocess.TimeoutExpired:
        raise OmlxError(
            f"`{' '.join(command)}` did not end within {RUN_TIMEOUT_S:g} s",
            hint="run it yourself to see why; `omlxd start` runs the daemon without a service",
        ) from None
    return Ran(done.returncode, done.stdout.decode("utf-8", "replace"))


def refused(command: Sequence[str], ran: Ran, hint: str) -> OmlxError:
    """The error of a command that ended with a status other than 0."""
    said = " ".join(ran.output.split()) or f"status {ran.status}"
    return OmlxError(f"`{' '.join(command)}` failed: {said}", hint=hint, details={"status": ran.status})
