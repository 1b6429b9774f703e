"""`omlxd status` (`ps`): the whole daemon on one page."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Final

import typer

from omlxd.cli import output
from omlxd.cli.client import Client
from omlxd.cli.invocation import client_of
from omlxd.cli.options import Json
from omlxd.core.errors import InvalidRequest

STATUS_PATH: Final = "/v1/control/status"
REDRAW_S: Final = 1.0


def status(
    context: typer.Context,
    watch: Annotated[bool, typer.Option("--watch", help="Redraw each second, on a terminal.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Draw once, the default.")] = False,
    json: Json = False,
) -> None:
    """Show memory, limits, models, requests and the last decisions."""
    client = client_of(context)
    if watch and (once or json):
        raise InvalidRequest("`--watch` goes with neither `--once` nor `--json`", hint="leave one of them out")
    if json:
        output.data_json(client.get(STATUS_PATH))
    elif watch and output.is_terminal(sys.stdout):
        _watch(client)
    else:
        answer = client.get(STATUS_PATH)
        from omlxd.cli.render import console, draw, status_page  # Rich, only where a table is drawn

        draw(status_page(answer, console().width))


def _watch(client: Client) -> None:
    from rich.live import Live

    from omlxd.cli.render import console, status_page

    target = console()
    page = status_page(client.get(STATUS_PATH), target.width)
    # Redirected streams would not say that they are UTF-8.
    with Live(
        page, console=target, auto_refresh=False, screen=True, redirect_stdout=False, redirect_stderr=False
    ) as live:
        while True:
            time.sleep(REDRAW_S)
            live.update(status_page(client.get(STATUS_PATH), target.width), refresh=True)
