"""The text of a launchd property list, and what `launchctl print` says; no effects."""

from __future__ import annotations

import plistlib
import re
from pathlib import Path
from typing import Any
from xml.parsers.expat import ExpatError

from omlxd.service.host import ServiceState, ServiceView
from omlxd.service.seal import sealed
from omlxd.service.spec import ServiceSpec

THROTTLE_S = 30  # launchd's back-off: a daemon that crashes at once is started again after this


def label(name: str) -> str:
    """What launchd calls the service."""
    return f"org.{name}"


def plist_text(spec: ServiceSpec) -> str:
    """The property list: an agent of the user's, or with `spec.user` a daemon that runs before anybody logs in."""
    job: dict[str, Any] = {
        "Label": label(spec.name),
        "ProgramArguments": [*spec.command, "--supervisor", "launchd"],
        "RunAtLoad": True,
        # An end with status 0 was asked for, or nothing that a restart could mend: a bad manifest.
        "KeepAlive": {"SuccessfulExit": False, "Crashed": True},
        "ThrottleInterval": THROTTLE_S,
        "ExitTimeOut": round(spec.stop_timeout_s),  # without it launchd kills in the middle of a drain
        "ProcessType": "Interactive",  # or the system slows it down as background work
        "StandardOutPath": str(spec.error_file),
        "StandardErrorPath": str(spec.error_file),
        "Umask": 0o077,
    }
    if spec.environment:
        job["EnvironmentVariables"] = dict(spec.environment)
    if spec.user is None:
        job["LimitLoadToSessionType"] = ["Aqua", "Background"]
    else:
        job["UserName"] = spec.user
    text = plistlib.dumps(job, sort_keys=False).decode()
    return sealed(text, at_line=2, opening="<!-- ", closing=" -->")  # below the XML and document type lines


def program_of(text: str) -> Path | None:
    """What a property list starts; None when it is none, or does not say."""
    try:
        return Path(plistlib.loads(text.encode())["ProgramArguments"][0])
    except (plistlib.InvalidFileException, ExpatError, AttributeError, LookupError, TypeError, ValueError):
        return None


def view_of(printed: str) -> ServiceView:
    """What `launchctl print` says of a job that is loaded."""
    pid = _field(printed, "pid")
    exit_code = _field(printed, "last exit code")
    last_exit = int(exit_code) if exit_code is not None else None
    if pid is not None:
        return ServiceView(ServiceState.RUNNING, pid=int(pid), last_exit=last_exit)
    return ServiceView(ServiceState.FAILED if last_exit else ServiceState.STOPPED, last_exit=last_exit)


def _field(printed: str, name: str) -> str | None:
    # The job's own fields stand one tab in; those of its endpoints and events further.
    found = re.search(rf"^\t{re.escape(name)} = (\d+)\b", printed, re.MULTILINE)
    return found[1] if found else None
