"""systemd as the host of the service: the user's own manager, by `systemctl --user`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from omlxd.core.errors import OmlxError
from omlxd.service.host import Ran, Run, ServiceView, refused
from omlxd.service.spec import ServiceSpec
from omlxd.service.systemd import SHOWN, program_of, unit_name, unit_text, version_of, view_of

_NO_MANAGER = "it needs a login session; `loginctl enable-linger` gives you one that is always there"

_NOBODY_ANSWERS = re.compile(r"Failed to connect to (?:user scope )?bus[^:]*: *(?P<why>[^(\n]+)")


class Systemctl:
    """The user's systemd.

    Args:
        run: runs a command.
        environment: where `XDG_CONFIG_HOME` and `HOME` are looked up.
    """

    kind = "systemd"

    def __init__(self, run: Run, environment: Mapping[str, str]) -> None:
        self._run = run
        configuration = environment.get("XDG_CONFIG_HOME") or f"{environment.get('HOME') or Path.home()}/.config"
        self._folder = Path(configuration) / "systemd" / "user"

    def path(self, name: str) -> Path:
        return self._folder / unit_name(name)

    def text(self, spec: ServiceSpec) -> str:
        return unit_text(spec, self._version)

    def program(self, text: str) -> Path | None:
        return program_of(text)

    def enable(self, name: str) -> None:
        self._must("daemon-reload")
        self._must("enable", unit_name(name))

    def disable(self, name: str) -> None:
        self._must("disable", "--now", unit_name(name))

    def forget(self, name: str) -> None:
        self._must("daemon-reload")
        self._systemctl("reset-failed", unit_name(name))  # fails when it never failed, which is well

    def start(self, name: str) -> None:
        self._must("daemon-reload")
        self._systemctl("reset-failed", unit_name(name))
        # The caller waits for its answer, and knows better what to say when it does not.
        self._must("start", "--no-block", unit_name(name))

    def stop(self, name: str) -> None:
        self._must("stop", unit_name(name))

    def view(self, name: str) -> ServiceView:
        return view_of(self._must("show", "--property", ",".join(SHOWN), unit_name(name)).output)

    @cached_property
    def _version(self) -> int:
        try:
            return version_of(self._run(("systemctl", "--version")).output)
        except OmlxError:
            return 0  # no systemd here: what any version of it reads

    def _systemctl(self, *words: str) -> Ran:
        return self._run(("systemctl", "--user", *words))

    def _must(self, *words: str) -> Ran:
        ran = self._systemctl(*words)
        if ran.status != 0:
            failed = refused(("systemctl", "--user", *words), ran, _NO_MANAGER)
            if (nobody := _NOBODY_ANSWERS.search(ran.output)) is None:
                raise failed
            why = " ".join(nobody["why"].split()).rstrip(".")
            # The command and all that it wrote is the cause, which `--debug` shows.
            raise OmlxError(
                f"no systemd of yours answers here ({why})", hint=_NO_MANAGER, details=failed.details
            ) from failed
        return ran
