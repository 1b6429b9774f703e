"""`omlxd plan`, and `load --estimate-only`: whether models would fit, from their files alone; nothing is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from omlxd.cli import output
from omlxd.cli.completion import model_names
from omlxd.cli.invocation import client_of, home_of
from omlxd.cli.limit import check_size
from omlxd.cli.options import Json
from omlxd.core.errors import DaemonNotRunning, DoesNotFit, InvalidRequest, OmlxError
from omlxd.core.units import format_bytes
from omlxd.core.wording import named

if TYPE_CHECKING:
    from omlxd.core.limits import MemoryLimits
    from omlxd.core.manifest import Manifest
    from omlxd.core.plan import Neighbour, Verdict
    from omlxd.core.saved_state import SavedState
    from omlxd.daemon.planning import LeftOut, Plan, Surroundings


def plan(
    context: typer.Context,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Models that should run at the same time; without, each of the manifest by itself.",
            autocompletion=model_names,
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option("--context", metavar="N", min=1, help="Tokens of prompt and answer; 4096, or the model's most."),
    ] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", metavar="M", min=1, help="Requests of each model at the same time.")
    ] = 1,
    max_memory: Annotated[
        str | None, typer.Option("--max-memory", metavar="SIZE", help="A soft limit other than the one in force.")
    ] = None,
    json: Json = False,
) -> None:
    """Work out whether models would fit, and how far.

    It reads no weights and loads nothing.
    """
    names = models or []
    if max_memory is not None:
        check_size(max_memory)
    from omlxd.daemon.planning import make_plan

    surroundings = find_surroundings(context, max_memory, warn_of_pins=bool(names))  # else it is a row itself
    show(surroundings, make_plan(surroundings, names, tokens, concurrency), json=json)


def find_surroundings(
    context: typer.Context,
    max_memory: str | None = None,
    manifest: Manifest | None = None,
    *,
    warn_of_pins: bool = True,
) -> Surroundings:
    """What the daemon says when one runs, else what the manifest says would be.

    Args:
        context: of the command.
        max_memory: a soft limit other than that one.
        manifest: what is looked at in place of the file.
        warn_of_pins: tell which pinned models do not count, since their files are bad.
    """
    from pathlib import Path

    from omlxd.core.manifest import max_memory_bytes
    from omlxd.daemon.machine import find_machine
    from omlxd.daemon.manifest_file import read_manifest  # pydantic: only here, 60 ms
    from omlxd.daemon.planning import Surroundings, default_backend, limits_in_force, neighbours_of, planner_of
    from omlxd.daemon.state_file import read_state

    home = home_of(context)
    try:
        status = client_of(context).get("/v1/control/status")
    except DaemonNotRunning:
        status = None
    if manifest is None:
        manifest = read_manifest(Path(status["manifest"]) if status else home.manifest)
    state = read_state(home.state)
    limits = limits_in_force(status["memory"]) if status else _limits_to_come(manifest, state)
    if max_memory is not None:
        from omlxd.core.limits import resolve_limits
        from omlxd.core.states import LimitOrigin

        machine = find_machine()
        limits = resolve_limits(max_memory_bytes(max_memory, machine), None, machine, LimitOrigin.COMMAND_LINE)
        for warning in limits.warnings:
            output.warn(warning)
    neighbours = neighbours_of(status["models"]) if status else _pinned(manifest, state, warn=warn_of_pins)
    planner = planner_of(manifest, limits, neighbours, status["memory"]["unaccounted"] if status else 0)
    backend = str((status or {}).get("backend") or default_backend())
    return Surroundings(manifest, planner, state, backend, status is not None)


def show(surroundings: Surroundings, plan: Plan, *, json: bool) -> None:
    """Write the verdicts, and name each model that cannot be judged.

    Raises:
        DoesNotFit: what was asked for would not fit.
        OmlxError: a model cannot be judged.
    """
    if json:
        from omlxd.daemon.planning import plan_json

        output.data_json(plan_json(surroundings, plan))
    elif plan.rows:
        _draw(surroundings, plan)
    elif not plan.left_out:
        output.note("the manifest has no models yet; `omlxd find` shows what is here, `omlxd add` adds it")
    for left in plan.left_out:
        why = f"{left.error.message}; {left.error.hint}" if left.error.hint else left.error.message
        output.warn(f"`{left.name}` is left out: {why}")
    if bad := [verdict for verdict in _asked(plan) if not verdict.fits]:
        raise DoesNotFit(bad[0].why, hint=_remedy(bad[0]), details={"short_bytes": bad[0].short_bytes})
    if plan.left_out:
        raise _left_out(plan.left_out)


def _left_out(models: Sequence[LeftOut]) -> OmlxError:
    """Of the kind of the first bad files; where all are well, of what was asked of them."""
    said = f"{named(model.name for model in models)} {'is' if len(models) == 1 else 'are'} left out"
    bad = next((model.error for model in models if not isinstance(model.error, InvalidRequest)), None)
    if bad is None:
        return InvalidRequest(said, hint=models[0].error.hint)
    return type(bad)(said, hint="`omlxd check` looks at the files of all models")


def _asked(plan: Plan) -> list[Verdict]:
    return [plan.together] if plan.together is not None else [verdict for _, verdict in plan.rows]


def _remedy(verdict: Verdict) -> str:
    if verdict.max_context_tokens:
        return f"`--context {verdict.max_context_tokens}` would fit"
    if verdict.waits_for:
        idle = f"{named(verdict.waits_for)} {'is' if len(verdict.waits_for) == 1 else 'are'} idle"
        return f"ask all the same, it waits its turn; `omlxd status` shows when {idle}"
    if verdict.beside:
        names = named(each.name for each in verdict.beside)
        return f"`omlxd unpin` or `omlxd unload` one of {names}, or raise `max_memory`"
    return (
        "raise `max_memory`, or choose smaller models" if verdict.binding == "max_memory" else "choose smaller models"
    )


def _limits_to_come(manifest: Manifest, state: SavedState) -> MemoryLimits:
    from omlxd.daemon.machine import find_machine

    saved = state.max_memory(str(manifest.daemon.max_memory))
    if saved is None or state.limit is None:
        return manifest.daemon.memory_limits(find_machine())
    return replace(manifest.daemon, max_memory=saved).memory_limits(find_machine(), state.limit.origin)


def _pinned(manifest: Manifest, state: SavedState, *, warn: bool) -> tuple[Neighbour, ...]:
    """Who will always be in memory when a daemon runs; a pinned model with bad files will not be."""
    from omlxd.core.plan import PINNED, Neighbour
    from omlxd.daemon.model_files import model_folder, read_model_folder

    found = []
    for model in manifest.models.values():
        if state.pinned(model.name, model.pin):
            try:
                held_bytes = read_model_folder(model_folder(model)).weights_bytes
            except OmlxError as failed:
                if warn:
                    output.warn(f"the pinned `{model.name}` is left out: {failed.message}")
                continue
            found.append(Neighbour(model.name, held_bytes, True, PINNED))
    return tuple(found)


def _draw(surroundings: Surroundings, plan: Plan) -> None:
    from omlxd.cli.render import draw, has_room_for, plan_table  # Rich, only where a table is drawn

    limits = surroundings.planner.limits
    soft = f"limit {format_bytes(limits.soft_bytes)} ({limits.set_by})" if limits.soft_bytes else "no limit"
    hard = f", hard limit {format_bytes(limits.hard_bytes)}" if limits.hard_bytes else ""
    source = "as the daemon has it now" if surroundings.running else "the daemon is not running"
    output.sentence(f"{soft}{hard}; {source}")
    table = plan_table(plan.rows, plan.together)
    wide = has_room_for(table)
    draw(table if wide else plan_table(plan.rows, plan.together, narrow=True))
    for verdict in _asked(plan):
        unloads = "" if wide or not verdict.evict else f"; unloads {', '.join(f'`{name}`' for name in verdict.evict)}"
        output.sentence(f"  {verdict.why}{unloads}")
    for _, verdict in plan.rows:
        if not verdict.known:
            output.note(f"the architecture of `{verdict.names[0]}` is not known; its KV and transient are a guess")
