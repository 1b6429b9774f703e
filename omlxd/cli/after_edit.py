"""What follows an edit of the manifest: a running daemon takes it up, or the user is told what to type."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from omlxd.cli import output
from omlxd.cli.invocation import client_of, home_of
from omlxd.core.errors import DaemonNotRunning, OmlxError

if TYPE_CHECKING:
    from omlxd.cli.client import Client


def manifest_in_use(context: typer.Context, named: Path | None) -> Path:
    """The manifest to edit: the one that `--manifest` names, else the running daemon's, else the home's."""
    if named is not None:
        return named.expanduser().absolute()
    try:
        return Path(client_of(context).get("/v1/control/status")["manifest"])
    except OmlxError:
        return home_of(context).manifest


def take_up(client: Client, manifest: Path, *, force: bool = False, then: str = "") -> None:
    """Have the running daemon read the manifest that was edited, if it is its own.

    Args:
        client: of the daemon.
        manifest: what was edited.
        force: take one without models too.
        then: what the daemon does next because of it.
    """
    try:
        if Path(client.get("/v1/control/status")["manifest"]) != manifest:
            output.note(
                f"the running daemon has another manifest; `omlxd restart --manifest {manifest}` takes this one"
            )
            return
        body = {"wait": False} | ({"force": True} if force else {})
        done = client.call("POST", "/v1/control/reload", body, timeout_s=None)
        for warning in done.get("warnings", ()):
            output.warn(warning)
        output.note("the running daemon has taken it up" + (f", and {then}" if then else ""))
    except DaemonNotRunning as error:
        output.note(f"{error.message}; `omlxd start` starts it")
    except OmlxError as error:
        output.warn(f"the running daemon has not taken it up ({error.message}); `omlxd restart` does")
