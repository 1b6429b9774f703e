"""`omlxd requests` and `omlxd abort`: generations in flight."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from omlxd.cli import output
from omlxd.cli.invocation import client_of
from omlxd.cli.options import Json


def requests(context: typer.Context, json: Json = False) -> None:
    """List the requests in flight."""
    answer = client_of(context).get("/v1/control/requests")
    if json:
        output.data_json(answer)
    elif answer["requests"]:
        from omlxd.cli.render import draw  # Rich, only where a table is drawn
        from omlxd.cli.status_page import requests_table

        draw(requests_table(answer["requests"]))
    else:
        output.note("no requests in flight")


def abort(
    context: typer.Context,
    request: Annotated[str, typer.Argument(metavar="ID", help="As `omlxd requests` shows it.")],
) -> None:
    """End a request; its client gets one clear error."""
    client_of(context).call("DELETE", f"/v1/control/requests/{quote(request, safe='')}")
    output.note(f"request `{request}` aborted")
