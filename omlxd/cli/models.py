"""`omlxd models load unload pin unpin`: the models of the manifest, and which of them are in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Annotated, Any

import typer

from omlxd.cli import output
from omlxd.cli.client import Client, model_path
from omlxd.cli.invocation import client_of, home_of
from omlxd.cli.options import Force, Json, Models
from omlxd.core.errors import DaemonNotRunning, OmlxError, Unreachable, from_json
from omlxd.core.units import format_bytes, format_duration, format_left


def models(context: typer.Context, json: Json = False) -> None:
    """List the models of the manifest."""
    try:
        answer = client_of(context).get("/v1/control/models")
    except DaemonNotRunning as error:
        home = home_of(context)
        if not home.manifest.exists():
            raise
        from omlxd.cli.models_at_rest import models_at_rest  # pydantic: only here, 60 ms

        answer = models_at_rest(home)
        output.note(f"{error.message}; `omlxd start` starts it, and then there is a state")
    if json:
        output.data_json(answer)
    elif answer["models"]:
        from omlxd.cli.render import draw, manifest_table  # Rich, only where a table is drawn

        draw(manifest_table(answer["models"]))
    else:
        output.note("the manifest has no models; `omlxd find` shows what is here, `omlxd add` adds it")


def load(
    context: typer.Context,
    models: Models,
    pin: Annotated[bool, typer.Option("--pin", help="Pin it as well.")] = False,
    estimate_only: Annotated[
        bool, typer.Option("--estimate-only", help="Load nothing; show what `plan` says of it.")
    ] = False,
    json: Json = False,
) -> None:
    """Load models, one after the other, and wait until each is ready."""
    if estimate_only:
        from omlxd.cli.plan import plan

        plan(context, models, json=json)
        return
    client = client_of(context)
    _for_each(models, lambda model: _load(client, model, pin=pin, json=json))


def _load(client: Client, model: str, *, pin: bool, json: bool) -> None:
    try:
        result = load_with_progress(client, model, pin=pin)
    except KeyboardInterrupt:
        output.note(f"the load goes on; `omlxd unload {model}` cancels it")
        raise
    _warn(result)
    if json:
        output.data_json(result)
        return
    view = result["model"]
    for name in result.get("evicted", ()):
        output.note(f"unloaded `{name}` to make room")
    if result.get("load_s") is None:
        output.data(f"`{view['name']}` is loaded already ({_weights(view)}{_flags(view)})")
    else:
        output.data(f"loaded `{view['name']}` in {format_duration(result['load_s'])} ({_weights(view)}{_flags(view)})")


def load_with_progress(client: Client, model: str, *, pin: bool = False) -> dict[str, Any]:
    """Load a model, with a line of progress on a terminal; the daemon's result, or its error raised."""
    lines = client.ndjson("POST", model_path(model, "load"), {"wait": True, "pin": pin})
    with closing(lines), output.Progress() as progress:
        for line in lines:
            if "progress" in line:
                progress.show(_progress_text(line["progress"]))
            elif "error" in line:
                raise from_json(line["error"])
            elif "result" in line:
                return dict(line["result"])
    raise Unreachable("the daemon ended before the load did", hint="`omlxd logs -n 20` shows what happened")


def unload(
    context: typer.Context,
    models: Models,
    now: Annotated[bool, typer.Option("--now", help="End its running requests instead of waiting for them.")] = False,
    json: Json = False,
) -> None:
    """Unload models; a load in progress is cancelled."""
    client = client_of(context)
    _for_each(models, lambda model: _unload(client, model, now=now, json=json))


def _unload(client: Client, model: str, *, now: bool, json: bool) -> None:
    answer = client.call("POST", model_path(model, "unload"), {"now": now, "drain_timeout_s": None}, timeout_s=None)
    if json:
        output.data_json(answer)
        return
    name = answer["model"]["name"]
    if answer["was"] == "unloaded":
        output.data(f"`{name}` was not loaded")
    elif answer["was"] == "loading":
        output.data(f"cancelled the load of `{name}` ({format_bytes(answer['freed_bytes'])} freed)")
    else:
        output.data(f"unloaded `{name}` ({format_bytes(answer['freed_bytes'])} freed)")


def pin(context: typer.Context, models: Models, force: Force = False) -> None:
    """Keep models loaded whatever happens; does not load them."""
    client = client_of(context)
    _for_each(models, lambda model: _pin(client, model, force=force))


def _pin(client: Client, model: str, *, force: bool) -> None:
    answer = client.call("POST", model_path(model, "pin"), {"force": force}, timeout_s=None)
    _warn(answer)
    view = answer["model"]
    output.data(f"pinned `{view['name']}`")
    if view["state"] == "unloaded":
        output.note(f"`{view['name']}` is not loaded; `omlxd load {view['name']}` loads it")


def unpin(context: typer.Context, models: Models) -> None:
    """Let the enforcer unload models again."""
    client = client_of(context)
    _for_each(models, lambda model: _unpin(client, model))


def _unpin(client: Client, model: str) -> None:
    answer = client.call("POST", model_path(model, "unpin"), {}, timeout_s=None)
    _warn(answer)
    name = answer["model"]["name"]
    output.data(f"unpinned `{name}`")
    if answer.get("manifest_pin"):
        output.note(f"the manifest pins `{name}`; this holds all the same, over restarts too, until that is changed")


def _for_each(models: Sequence[str], act: Callable[[str], None]) -> None:
    """Act on each model once, in order; what fails of several is told, and the others are done all the same.

    Raises:
        DaemonNotRunning, Unreachable: nobody is there for the others either.
        OmlxError: it failed for the only one.
        typer.Exit: with the status of the first that failed.
    """
    failed: OmlxError | None = None
    for model in dict.fromkeys(models):
        try:
            act(model)
        except OmlxError as error:
            if len(models) == 1 or isinstance(error, DaemonNotRunning | Unreachable):
                raise
            output.report(error)
            failed = failed or error
    if failed is not None:
        raise typer.Exit(failed.exit_status)


def _warn(answer: dict[str, Any]) -> None:
    for warning in answer.get("warnings", ()):
        output.warn(warning)


def _progress_text(progress: dict[str, Any]) -> str:
    """`loading big 42% of 1.20 GiB, 3 s left`, or what it waits for."""
    if progress.get("state") == "waiting":
        return f"{progress['model']}: {progress.get('note') or 'waiting'}"
    text = f"loading {progress['model']}{output.percent(progress)}"
    if progress.get("total_bytes"):
        text += f" of {format_bytes(progress['total_bytes'])}"
    left_s = progress.get("left_s")
    return text if left_s is None else f"{text}, {format_left(left_s)}"


def _weights(view: dict[str, Any]) -> str:
    weights_bytes = view.get("weights_bytes")
    return format_bytes(weights_bytes) if weights_bytes is not None else "size unknown"


def _flags(view: dict[str, Any]) -> str:
    return ", pinned" if view.get("pinned") else ""
