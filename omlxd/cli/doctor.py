"""`omlxd doctor`: looks at everything that can be wrong, and says what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from omlxd import __version__
from omlxd.cli import output
from omlxd.cli.client import Client
from omlxd.cli.holder import Holder, holder_of
from omlxd.cli.invocation import home_of
from omlxd.cli.options import Json, ManifestFile
from omlxd.cli.process import StartOptions
from omlxd.cli.service_spec import host_of
from omlxd.core.checkup import Finding, Health, judge_running, judge_service, warning, well, wrong
from omlxd.core.errors import OmlxError
from omlxd.core.states import SCHEMA
from omlxd.daemon.home import Home, find_home
from omlxd.service.host import ServiceState
from omlxd.service.install import read_service_file
from omlxd.service.spec import service_name

if TYPE_CHECKING:
    from omlxd.daemon.checkup import InForce

ANSWER_TIMEOUT_S: Final = 1.0
_MARKS: Final = {Health.OK: ("✓", "32"), Health.WARNING: ("!", "33"), Health.WRONG: ("✗", "31")}


def doctor(context: typer.Context, manifest: ManifestFile = None, json: Json = False) -> None:
    """Check installation, manifest, models, home and daemon.

    Nothing is loaded.
    """
    from omlxd.daemon.checkup import check_home, check_installation, check_manifest  # pydantic, psutil: only here
    from omlxd.daemon.state_file import read_state

    home = home_of(context)
    holder = holder_of(home.lock)
    daemon, in_force = _daemon(home, holder)
    installation, machine = check_installation()
    path = in_force.manifest if manifest is None and in_force is not None else StartOptions(manifest).path(home)
    saved, running = read_state(home.state), holder is not None
    of_manifest, settings = check_manifest(path, machine, saved, running=running, in_force=in_force)
    of_home = check_home(home, settings, running=holder is not None, pid=holder.pid if holder else None)
    found = [*installation, *of_manifest, *of_home, daemon, _service(home, holder)]
    is_well = all(finding.health is not Health.WRONG for finding in found)
    if json:
        output.data_json({"schema": SCHEMA, "ok": is_well, "checks": [finding.to_json() for finding in found]})
    else:
        _draw(found)
    if not is_well:
        raise typer.Exit(1)


def _daemon(home: Home, holder: Holder | None) -> tuple[Finding, InForce | None]:
    """Whether whoever holds the lock answers, and gets on; and what it goes by."""
    from omlxd.daemon.checkup import InForce
    from omlxd.daemon.planning import limits_in_force

    if holder is None:
        return well("daemon", "not running"), None
    try:
        status = Client(home.socket).get("/v1/control/status", timeout_s=ANSWER_TIMEOUT_S)
        version, state, level = str(status["version"]), str(status["state"]), str(status["enforcer"]["level"])
        limits, models = limits_in_force(status["memory"]), len(status["models"])
        in_force = InForce(Path(str(status["manifest"])), limits, status["api"], models)
        return judge_running(version, __version__, state, level), in_force
    except OmlxError as error:
        found = f"pid {holder.pid} holds the lock, but {error.message}"
        return wrong("daemon", found, error.hint or "`omlxd restart`"), None
    except (KeyError, TypeError):
        return wrong("daemon", "what answers at the socket is no omlxd", "`omlxd restart`"), None


def _service(home: Home, holder: Holder | None) -> Finding:
    name = service_name(home.root, find_home(None, {}).root)
    try:
        host = host_of(system=False)
        file = read_service_file(host.path(name))
        if file.text is None:
            return well("service", "not installed")
        view = host.view(name)
    except OmlxError as error:
        return warning("service", error.message, error.hint or "`omlxd service status`")
    program = host.program(file.text)
    return judge_service(
        host.kind,
        view.state.value,
        enabled=view.enabled,
        edited=file.edited,
        last_exit=view.last_exit,
        missing=None if program is None or program.exists() else str(program),
        other=holder.pid if holder is not None and view.state is not ServiceState.RUNNING else None,
    )


def _draw(found: Sequence[Finding]) -> None:
    width = max(len(finding.check) for finding in found)
    for finding in found:
        mark, colour = _MARKS[finding.health]
        found_and_remedy = finding.found if finding.remedy is None else f"{finding.found}; {finding.remedy}"
        output.sentence(f"{finding.check:<{width}}  {found_and_remedy}", label=mark, sgr=colour, hang=width + 4)
