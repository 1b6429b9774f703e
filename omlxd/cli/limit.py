"""`omlxd limit`: shows the memory limits, or sets the soft one; the answer comes after the enforcer has acted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from omlxd.cli import output
from omlxd.cli.invocation import client_of
from omlxd.cli.options import Force, Json
from omlxd.core.errors import InvalidRequest
from omlxd.core.limits import limit_set_by
from omlxd.core.units import format_bytes, parse_limit
from omlxd.core.wording import named

_ANY_RAM_BYTES: Final = 2**40  # a percentage is for the daemon to work out


def limit(
    context: typer.Context,
    size: Annotated[
        str | None,
        typer.Argument(metavar="[SIZE]", help="8G, 8GB, 75%, bytes, `auto`, or 0 for none. Left out: show it."),
    ] = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Show the memory limits, or set how much the models may use."""
    client = client_of(context)
    if size is None:
        status = client.get("/v1/control/status")
        if json:
            output.data_json({"schema": status["schema"], "memory": status["memory"], "enforcer": status["enforcer"]})
        else:
            output.data(limits_line(status["memory"]))
        return
    if size.startswith("-") and not size[1:2].isdecimal():
        raise InvalidRequest(f"no such option: {size}", hint="`omlxd limit --help`")
    check_size(size)
    body = {"max_memory": size, "force": force}
    answer = client.call("PATCH", "/v1/control/limits", body, timeout_s=None)
    for warning in answer.get("warnings", ()):
        output.warn(warning)
    if json:
        output.data_json(answer)
        return
    tell_effects(answer)
    output.data(limits_line(answer["memory"]))
    if answer.get("level", "ok") != "ok" and not answer.get("warnings"):  # which say it, and why
        output.warn("memory is still over the limit; `omlxd status` says why")


def tell_effects(done: Mapping[str, Any]) -> None:
    """What a new limit cost whom, from the answer of `limits` or `reload`; one of an older daemon says less."""
    for name in done.get("evicted", ()):
        output.note(f"unloaded `{name}`")
    for name, requests in done.get("parked", {}).items():
        goes_on = "which goes on" if len(requests) == 1 else "which go on"
        it = "it" if len(requests) == 1 else "them"
        output.note(f"parked {named(requests)} of `{name}`, {goes_on} when there is memory for {it}")
    for name, requests in done.get("aborted", {}).items():
        output.note(f"aborted {named(requests)} of `{name}`")
    for name in done.get("postponed", ()):
        output.note(f"stopped the load of `{name}`, which is tried again")
    for name in done.get("cancelled", ()):
        output.note(f"cancelled the load of `{name}`")


def check_size(size: str) -> None:
    """Raises InvalidRequest when this is no memory limit; what a percentage comes to only the daemon knows."""
    if size.strip().lower() != "auto":
        parse_limit(size, ram_bytes=_ANY_RAM_BYTES)


def set_by(memory: Mapping[str, Any]) -> str:
    """What sets the soft limit: `max_memory` of the manifest, who said another one, or what caps either."""
    return limit_set_by(str(memory["binding"]), memory.get("limit_origin"))


def limits_line(memory: dict[str, Any]) -> str:
    """`limit 8.00 GiB (max_memory), hard limit 28.0 GiB, 3.10 GiB used`."""
    used = f"{format_bytes(memory['used'])} used"
    if not memory["soft_limit"]:
        if not memory["hard_limit"]:
            return f"no limit, {used}"
        return f"no soft limit; hard limit {format_bytes(memory['hard_limit'])} ({memory['hard_binding']}), {used}"
    return (
        f"limit {format_bytes(memory['soft_limit'])} ({set_by(memory)}),"
        f" hard limit {format_bytes(memory['hard_limit'])}, {used}"
    )
