"""From this call of `omlxd service` to what the service is made from, and who runs services on this machine."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from omlxd.cli.process import StartOptions, environment
from omlxd.core.errors import InvalidRequest, NotPermitted, OmlxError
from omlxd.daemon.home import Home, find_home
from omlxd.service.host import ServiceHost, run
from omlxd.service.spec import ServiceSpec, service_name

KEPT_VARIABLES: Final = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")
"""What decides where a `repo` of the manifest is; a service has nothing of the shell's environment."""

AFTER_DRAIN_S: Final = 30.0
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def host_of(system: bool) -> ServiceHost:
    """launchd on macOS, the user's systemd on Linux.

    Raises:
        InvalidRequest: `--system` where there is none.
        OmlxError: neither is on this machine.
    """
    if sys.platform == "darwin":
        from omlxd.service.launchctl import Launchctl

        return Launchctl(run, os.getuid(), Path.home(), system)
    if system:
        raise InvalidRequest(
            "`--system` is for launchd", hint="`loginctl enable-linger` lets a user's services run from boot on"
        )
    if sys.platform == "linux":
        from omlxd.service.systemctl import Systemctl

        return Systemctl(run, os.environ)
    raise OmlxError(f"there is no service manager for `{sys.platform}`", hint="`omlxd start` starts the daemon")


def drain_timeout_of(home: Home, manifest: Path | None) -> float:
    """How long the daemon may drain, in seconds; raises ManifestInvalid: a service would only fail with it later."""
    from omlxd.daemon.manifest_file import read_manifest  # pydantic: only here, 60 ms

    return read_manifest(StartOptions(manifest=manifest).path(home)).daemon.drain_timeout_s


def spec_of(
    home: Home, manifest: Path | None, variables: Iterable[str], drain_timeout_s: float, *, system: bool
) -> ServiceSpec:
    """The service of this home.

    Args:
        home: the daemon's directory.
        manifest: as `--manifest` names it.
        variables: `NAME=VALUE`, or `NAME` for the value it has here.
        drain_timeout_s: as the manifest has it.
        system: a daemon of the machine, for the user who calls `sudo`.

    Raises:
        InvalidRequest, NotPermitted: a variable, or who calls, is wrong.
    """
    options = StartOptions(manifest=manifest)
    return ServiceSpec(
        name=service_name(home.root, find_home(None, {}).root),
        command=tuple(options.arguments(home)),
        error_file=home.daemon_err,
        environment=_kept(os.environ) | _asked(variables),
        stop_timeout_s=drain_timeout_s + AFTER_DRAIN_S,
        user=_caller_of_sudo(os.environ) if system else None,
    )


def _kept(environ: Mapping[str, str]) -> dict[str, str]:
    """What the daemon needs of this environment without being told: never a key or a token."""
    kept = {name: environ[name] for name in KEPT_VARIABLES if environ.get(name)}
    if (path := environment().get("PYTHONPATH")) is not None:  # a checkout that is not installed
        kept["PYTHONPATH"] = path
    return kept


def _asked(variables: Iterable[str]) -> dict[str, str]:
    asked = {}
    for written in variables:
        name, given, value = written.partition("=")
        if _VARIABLE.fullmatch(name) is None:
            raise InvalidRequest(f"`{name}` is not the name of a variable", hint="`--env NAME=VALUE`, or `--env NAME`")
        if not given and name not in os.environ:
            raise InvalidRequest(f"`{name}` is not set here", hint=f"`--env {name}=VALUE`")
        asked[name] = value if given else os.environ[name]
    return asked


def _caller_of_sudo(environ: Mapping[str, str]) -> str:
    user = environ.get("SUDO_USER")
    if os.geteuid() != 0 or not user or user == "root":
        raise NotPermitted(
            "a daemon of the machine is installed by root, for the user who asks",
            hint="`sudo omlxd --home ~/.omlxd service install --system`",
        )
    return user
