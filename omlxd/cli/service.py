"""`omlxd service`: lets launchd or systemd start the daemon at login, keep it alive, and end it."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Final

import typer

from omlxd.cli import output
from omlxd.cli.client import Client
from omlxd.cli.daemon import answering_line
from omlxd.cli.holder import holder_of
from omlxd.cli.invocation import home_of
from omlxd.cli.options import Json, ManifestFile
from omlxd.cli.service_spec import drain_timeout_of, host_of, spec_of
from omlxd.cli.supervised import Service
from omlxd.core.errors import AlreadyRunning, InvalidRequest, ManifestInvalid
from omlxd.core.manifest import DaemonSettings
from omlxd.core.states import SCHEMA
from omlxd.daemon.home import Home, find_home
from omlxd.service.host import ServiceHost, ServiceState, ServiceView
from omlxd.service.install import ServiceFile, read_service_file, remove_service_file, write_service_file
from omlxd.service.spec import service_name

_PRIVATE: Final = 0o600
_FOR_ROOT: Final = 0o644

service = typer.Typer(
    help="Run the daemon as a service of launchd or systemd.\n\nIt starts at each login, and again after a crash.",
    rich_markup_mode=None,
)

System = Annotated[bool, typer.Option("--system", help="launchd: a daemon of the machine, from boot on; needs `sudo`.")]
Variables = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="NAME[=VALUE]", help="A variable for the daemon; without a value, yours."),
]


@service.command()
def install(
    context: typer.Context, manifest: ManifestFile = None, env: Variables = None, system: System = False
) -> None:
    """Have the daemon started at each login from now on; `start` starts it now."""
    from omlxd.daemon.sockets import prepare_home

    home, host = home_of(context), host_of(system)
    name, spec = _name(home), spec_of(home, manifest, env or (), drain_timeout_of(home, manifest), system=system)
    before = host.view(name)  # where the system does not answer, nothing is written
    if not system:
        prepare_home(home)
    file = read_service_file(host.path(name))
    changed = write_service_file(file, host.text(spec), mode=_FOR_ROOT if system else _PRIVATE)
    host.enable(name)
    output.data(f"{'installed' if changed else 'already installed:'} {file.path}")
    if before.state is ServiceState.RUNNING:
        if changed:
            output.note("it runs as it was; `omlxd service stop` and `start` make it new")
    else:
        output.note("next: `omlxd service start`")


@service.command()
def uninstall(context: typer.Context, system: System = False) -> None:
    """End the service and take its file away; the home stays."""
    host, file = _there(context, system)
    name = _name(home_of(context))
    if file.edited:
        remove_service_file(file)  # refuses, before anything is ended
    if file.text is None:
        output.data("the service is not installed")
        return
    host.disable(name)
    remove_service_file(file)
    host.forget(name)
    output.data(f"removed {file.path}")


@service.command()
def start(context: typer.Context, system: System = False) -> None:
    """Start the service now and return when the daemon answers."""
    host, file = _there(context, system)
    _require_installed(file)
    home = home_of(context)
    name = _name(home)
    before = host.view(name)
    if before.state is not ServiceState.RUNNING and (holder := holder_of(home.lock)) is not None:
        raise AlreadyRunning(
            f"a daemon that is no service runs already (pid {holder.pid})",
            hint="`omlxd stop` ends it, then `omlxd service start`",
            details={"pid": holder.pid, "home": str(home.root)},
        )
    found = Service(host, home).start()
    output.sentence(answering_line({"pid": found["pid"]}, Client(home.socket)))


@service.command()
def stop(context: typer.Context, system: System = False) -> None:
    """End the service; running requests may finish first. It is back at the next login."""
    host, file = _there(context, system)
    _require_installed(file)
    host.stop(_name(home_of(context)))
    output.data("the service has stopped")


@service.command()
def status(context: typer.Context, system: System = False, json: Json = False) -> None:
    """Show whether the service is installed, whether it runs, and how it ended."""
    host, file = _there(context, system)
    name = _name(home_of(context))
    view = host.view(name) if file.text is not None else ServiceView(ServiceState.STOPPED, enabled=False)
    if json:
        output.data_json(_as_json(host, name, file, view))
        return
    if file.text is None:
        output.data(f"not installed; it would be {file.path}")
        output.note("hint: `omlxd service install`")
        return
    output.data(f"{file.path}{' (edited)' if file.edited else ''}{'' if view.enabled else ', not started at login'}")
    parts = [f"{host.kind}: {view.state.value}"]
    parts += [f"pid {view.pid}"] if view.pid is not None else []
    parts += [f"last exit status {view.last_exit}"] if view.last_exit is not None else []
    output.data(", ".join(parts))


@service.command()
def show(context: typer.Context, manifest: ManifestFile = None, env: Variables = None, system: System = False) -> None:
    """Show the file that `install` would write, and write nothing."""
    home = home_of(context)
    try:
        drain_timeout_s = drain_timeout_of(home, manifest)
    except ManifestInvalid as error:
        drain_timeout_s = DaemonSettings().drain_timeout_s
        output.warn(f"{error.message}; `omlxd service install` would refuse it")
    spec = spec_of(home, manifest, env or (), drain_timeout_s, system=system)
    sys.stdout.write(host_of(system).text(spec))


def _name(home: Home) -> str:
    return service_name(home.root, find_home(None, {}).root)


def _there(context: typer.Context, system: bool) -> tuple[ServiceHost, ServiceFile]:
    host = host_of(system)
    return host, read_service_file(host.path(_name(home_of(context))))


def _require_installed(file: ServiceFile) -> None:
    if file.text is None:
        raise InvalidRequest("the service is not installed", hint="`omlxd service install`")


def _as_json(host: ServiceHost, name: str, file: ServiceFile, view: ServiceView) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "kind": host.kind,
        "name": name,
        "file": str(file.path),
        "installed": file.text is not None,
        "edited": file.edited,
        "enabled": view.enabled,
        "state": view.state.value,
        "pid": view.pid,
        "last_exit": view.last_exit,
    }
