"""launchd as the host of the service: an agent of the user's, or a daemon of the machine, by `launchctl`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from omlxd.core.errors import OmlxError
from omlxd.service.host import Ran, Run, ServiceState, ServiceView, refused
from omlxd.service.launchd import label, plist_text, program_of, view_of
from omlxd.service.spec import ServiceSpec

_PAUSE_S = 0.2
_GONE_TRIES = 600
_BOOTSTRAP_TRIES = 20
_NOT_YET = (5, 37)  # "Input/output error" and "Operation already in progress": the old job is still going away


@dataclass(frozen=True, slots=True)
class Launchctl:
    """The user's launchd, or with `system` the machine's.

    Attributes:
        run: runs a command.
        uid: whose agent it is.
        home: that user's home directory.
        system: a daemon in `/Library/LaunchDaemons` instead of an agent.
        sleep: waits between two looks.
    """

    run: Run
    uid: int
    home: Path
    system: bool = False
    sleep: Callable[[float], None] = time.sleep

    @property
    def kind(self) -> str:
        return "launchd"

    def path(self, name: str) -> Path:
        root = Path("/Library/LaunchDaemons") if self.system else self.home / "Library" / "LaunchAgents"
        return root / f"{label(name)}.plist"

    def text(self, spec: ServiceSpec) -> str:
        return plist_text(spec)

    def program(self, text: str) -> Path | None:
        return program_of(text)

    def enable(self, name: str) -> None:
        self._must("enable", self._target(name))  # undoes a `launchctl disable`; the file alone does the rest

    def disable(self, name: str) -> None:
        self.stop(name)

    def forget(self, name: str) -> None:
        pass

    def start(self, name: str) -> None:
        if self._printed(name).status == 0:
            self._must("kickstart", self._target(name))
            return
        command = ("launchctl", "bootstrap", self._domain(), str(self.path(name)))
        for _ in range(_BOOTSTRAP_TRIES):
            ran = self.run(command)
            if ran.status == 0:
                return
            if ran.status not in _NOT_YET:
                break
            self.sleep(_PAUSE_S)
        raise self._refused(command, ran)

    def stop(self, name: str) -> None:
        if self._printed(name).status != 0:
            return
        self.run(("launchctl", "bootout", self._target(name)))  # may say "in progress": what counts is that it goes
        for _ in range(_GONE_TRIES):
            if self._printed(name).status != 0:
                return
            self.sleep(_PAUSE_S)
        raise OmlxError(f"launchd did not end `{label(name)}`", hint=f"`launchctl print {self._target(name)}`")

    def view(self, name: str) -> ServiceView:
        printed = self._printed(name)
        return view_of(printed.output) if printed.status == 0 else ServiceView(ServiceState.STOPPED)

    def _domain(self) -> str:
        """`gui/UID` where somebody is logged in at the screen; over ssh there is only `user/UID`."""
        if self.system:
            return "system"
        gui = f"gui/{self.uid}"
        return gui if self.run(("launchctl", "print", gui)).status == 0 else f"user/{self.uid}"

    def _target(self, name: str) -> str:
        return f"{self._domain()}/{label(name)}"

    def _printed(self, name: str) -> Ran:
        return self.run(("launchctl", "print", self._target(name)))

    def _must(self, *words: str) -> None:
        command = ("launchctl", *words)
        if (ran := self.run(command)).status != 0:
            raise self._refused(command, ran)

    def _refused(self, command: Sequence[str], ran: Ran) -> OmlxError:
        return refused(command, ran, "`--system` needs `sudo`" if self.system else "it needs a login session of yours")
