"""`omlxd reload`: the daemon reads its manifest again; shows what differs, and waits until it has had its effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from omlxd.cli import output
from omlxd.cli.client import Client
from omlxd.cli.event_sentences import change_words
from omlxd.cli.invocation import client_of
from omlxd.cli.limit import tell_effects
from omlxd.cli.options import Json
from omlxd.core.errors import Unreachable, from_json

PATH = "/v1/control/reload"


def reload(
    context: typer.Context,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Do not wait for models that finish requests or are loaded.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Even when the manifest has no models any longer.")] = False,
    json: Json = False,
) -> None:
    """Read the manifest again and apply what differs."""
    client = client_of(context)
    asked = {"force": True} if force else {}  # a daemon from before an upgrade does not know the word
    if no_wait:
        done = client.call("POST", PATH, {"wait": False} | asked, timeout_s=None)
        if json:
            output.data_json(done)
        else:
            _show(done)
        return
    done = _applied(client, asked, json=json)
    if json:
        output.data_json(done)


def _applied(client: Client, asked: Mapping[str, Any], *, json: bool) -> dict[str, Any]:
    """Show what was changed as soon as it is, and return when everything that it leads to has happened."""
    try:
        for line in client.ndjson("POST", PATH, asked):
            if "result" in line:
                done = dict(line["result"])
                if not json:
                    _show_effect(done)
                return done
            if "error" in line:
                raise from_json(line["error"])
            if not json and "applied" in line:
                _show(line["applied"])
    except KeyboardInterrupt:
        output.note("not waiting any longer; the daemon goes on with it")
        raise
    raise Unreachable("the daemon ended before the reload was complete", hint="`omlxd logs -n 20` shows what happened")


def _show(done: Mapping[str, Any]) -> None:
    for change in done["changes"]:
        output.data(change_words(change))
    output.data(_summary(done))
    tell_effects(done)
    for warning in done["warnings"]:
        output.warn(warning)
    if done["pending"]:
        names = ", ".join(f"`{name}`" for name in done["pending"])
        output.note(f"{names}: done when the requests have ended")


def _show_effect(done: Mapping[str, Any]) -> None:
    """The models that came for it, and those that went for them; what was said already is not said again."""
    for name in done.get("loaded", ()):
        output.note(f"loaded `{name}`")
    for name in done.get("unloaded", ()):
        if name not in done["evicted"]:
            output.note(f"unloaded `{name}`")


def _summary(done: Mapping[str, Any]) -> str:
    count = len(done["changes"])
    if not count:
        return f"nothing has changed in `{done['manifest']}`"
    text = f"reloaded `{done['manifest']}`: " + ("1 change" if count == 1 else f"{count} changes")
    keys = ", ".join(f"`{key}`" for key in done["restart"])
    return text + (f"; {keys} after `omlxd restart`" if keys else "")
