"""`omlxd status` (`ps`): the whole daemon on one screen, on one page, or as JSON."""

from __future__ import annotations

import json as json_module
import sys
from typing import Annotated

import typer

from omlxd.cli import output
from omlxd.cli.client import Client
from omlxd.cli.invocation import client_of
from omlxd.cli.options import Json
from omlxd.core.errors import InvalidRequest

STATUS_PATH = "/v1/control/status"


def status(
    context: typer.Context,
    watch: Annotated[
        bool, typer.Option("--watch", help="Live, the default on a terminal; with --json a line for each change.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="One page, the default on a pipe.")] = False,
    json: Json = False,
) -> None:
    """Show memory, limits, models, requests and the last decisions.

    On a terminal the screen is live.
    """
    client = client_of(context)
    if watch and once:
        raise InvalidRequest("`--watch` and `--once` exclude each other", hint="leave one of them out")
    live = not once and output.is_terminal(sys.stdout)
    if json:
        _write_lines(client) if watch else output.data_json(client.get(STATUS_PATH))
    elif live:
        from omlxd.cli.screen.app import watch as watch_screen  # Rich, only where a table is drawn

        if ended_by := watch_screen(client):
            raise typer.Exit(128 + ended_by)
    elif watch:
        raise InvalidRequest(
            "`--watch` needs a terminal", hint="`--watch --json` writes a line of JSON for each change"
        )
    else:
        answer = client.get(STATUS_PATH)
        from omlxd.cli.render import console, draw  # Rich, only where a table is drawn
        from omlxd.cli.status_page import status_page

        draw(status_page(answer, console().width))


def _write_lines(client: Client) -> None:
    """A status a line, after each event and each second; while the daemon is away there are none."""
    from omlxd.cli.screen.feed import Bell, looks

    away = False
    for at, look in enumerate(looks(client, Bell(client))):
        if look.trouble is not None:
            if not at:
                raise look.trouble
            if not away:
                output.note("the daemon has gone; reconnecting")
        elif away:
            output.note("connected again")
        away = look.trouble is not None
        if look.status is not None:
            sys.stdout.write(json_module.dumps(look.status, ensure_ascii=not output.is_utf8(sys.stdout)) + "\n")
            sys.stdout.flush()
