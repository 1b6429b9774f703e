"""What every command of one call shares: the home directory, and a client for its socket."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from omlxd.daemon.home import Home, find_home

if TYPE_CHECKING:
    from omlxd.cli.client import Client


@dataclass(frozen=True, slots=True)
class Invocation:
    """The global options; `home_directory` is None for `$OMLXD_HOME` or `~/.omlxd`."""

    home_directory: Path | None = None
    debug: bool = False


def home_of(context: typer.Context) -> Home:
    """The home that the user meant, whether it exists or not."""
    invocation = context.find_object(Invocation)
    if invocation is not None:
        return find_home(invocation.home_directory)
    return find_home(context.find_root().params.get("home"))  # completion parses options and runs nothing


def client_of(context: typer.Context) -> Client:
    """A client for the daemon of that home."""
    from omlxd.cli.client import Client  # 10 ms of h11, which help and completion do not need

    return Client(home_of(context).socket)
