"""The daemon as launchd or systemd runs it: finding its service, and starting it until it answers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

from omlxd.cli.client import Client
from omlxd.cli.process import POLL_S, READY_TIMEOUT_S
from omlxd.cli.service_spec import host_of
from omlxd.core.errors import DaemonNotRunning, OmlxError, StartFailed, Unreachable
from omlxd.daemon.home import Home, find_home
from omlxd.service.host import ServiceHost, ServiceState
from omlxd.service.install import read_service_file
from omlxd.service.spec import service_name

_GIVEN_UP_LOOKS: Final = 5


@dataclass(frozen=True, slots=True)
class Service:
    """The service of one home.

    Attributes:
        host: who runs it.
        home: whose it is.
    """

    host: ServiceHost
    home: Home

    @property
    def name(self) -> str:
        """Of the unit."""
        return service_name(self.home.root, find_home(None, {}).root)

    def start(self) -> dict[str, Any]:
        """Start it and wait until the daemon answers; returns its status.

        One that is seen to be gone again and again is not waited for.

        Raises:
            StartFailed: the daemon did not answer.
            OmlxError: it cannot be started.
        """
        host, name, client, gone = self.host, self.name, Client(self.home.socket), 0
        host.start(name)
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline_s and gone < _GIVEN_UP_LOOKS:
            try:
                found: dict[str, Any] = client.get("/v1/control/status", timeout_s=2.0)
                int(found["pid"])
                return found
            except (DaemonNotRunning, Unreachable):
                pass
            except (KeyError, TypeError, ValueError):
                hint = f"look at `{self.home.socket}`"
                raise StartFailed("what answers at the socket is no omlxd", hint=hint) from None
            gone = gone + 1 if host.view(name).state in (ServiceState.FAILED, ServiceState.STOPPED) else 0
            time.sleep(POLL_S)
        state = host.view(name).state.value
        raise StartFailed(f"the service's daemon did not answer ({state})", hint=self._where_to_look())

    def _where_to_look(self) -> str:
        if self.host.kind == "launchd":
            return f"`omlxd check`; what the process wrote is in `{self.home.daemon_err}`"
        return f"`omlxd check`; `journalctl --user -u {self.name} -n 20` shows what the process wrote"


def service_that_runs(home: Home, pid: int | None) -> Service | None:
    """The service whose daemon has this pid; None when there is none, or nobody who could say."""
    if pid is None:
        return None
    try:
        for system in (False, True):
            service = Service(host_of(system), home)
            if read_service_file(service.host.path(service.name)).text is None:
                continue
            if service.host.view(service.name).pid == pid:
                return service
    except OmlxError:
        pass  # no service manager here, none that answers, or no `--system` for it
    return None
