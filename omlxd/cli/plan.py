"""`omlxd plan`, and `load --estimate-only`: whether models would fit, from their files alone; nothing is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from omlxd.cli import output
from omlxd.cli.completion import model_names
from omlxd.cli.invocation import client_of, home_of
from omlxd.cli.limit import check_size
from omlxd.cli.options import Json
from omlxd.core.errors import DaemonNotRunning, DoesNotFit, InvalidRequest, OmlxError
from omlxd.core.states import SCHEMA, EntryState
from omlxd.core.units import format_bytes

if TYPE_CHECKING:
    from omlxd.core.limits import MemoryLimits
    from omlxd.core.manifest import Manifest, ModelSettings
    from omlxd.core.plan import Neighbour, Planner, Verdict, Wish
    from omlxd.daemon.home import Home
    from omlxd.daemon.state_file import SavedState

CONTEXT_TOKENS: Final = 4096
_HELD: Final = (EntryState.LOADED.value, EntryState.LOADING.value, EntryState.UNLOADING.value)


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
    """Work out whether models would fit, and how far; reads no weights and loads nothing."""
    names = models or []
    if max_memory is not None:
        check_size(max_memory)
    surroundings = find_surroundings(context, max_memory)
    wishes = [surroundings.wish(model, tokens, concurrency) for model in surroundings.chosen(names)]
    show(surroundings, wishes, together=len(names) > 1, json=json)


@dataclass(frozen=True)
class Surroundings:
    """What a plan is made in: the manifest, the limits, and who is in memory; `running` when a daemon told."""

    manifest: Manifest
    planner: Planner
    state: SavedState
    backend: str
    running: bool

    def chosen(self, names: Sequence[str]) -> list[ModelSettings]:
        """The models of these names, each once; all of the manifest without any. Raises UnknownModel."""
        found = [self.manifest.model(name) for name in names] or list(self.manifest.models.values())
        return list({model.name: model for model in found}.values())

    def wish(self, model: ModelSettings, tokens: int | None, rows: int) -> Wish:
        """What running the model like this takes; reads its config and headers.

        Raises:
            LoadFailed, NotPermitted: its files are not a model, or may not be read.
            InvalidRequest: it cannot have such a context, or not so many requests at a time.
        """
        from omlxd.core.costs import costs_of_config
        from omlxd.core.plan import Wish
        from omlxd.daemon.model_files import model_folder, read_model_folder

        files = read_model_folder(model_folder(model))
        longest = min((each for each in (model.max_context, files.context_length) if each), default=None)
        if longest is not None and (tokens or 0) > longest:
            raise InvalidRequest(
                f"`{model.name}` has a context of {longest} tokens, not {tokens}", hint=f"`--context {longest}`"
            )
        if rows > self.planner.max_batch:
            raise InvalidRequest(
                f"at most {self.planner.max_batch} requests of a model run at a time",
                hint="raise `max_batch` in the manifest, or lower `--concurrency`",
            )
        learned = self.state.learned.get(model.name)
        costs = learned.costs if learned is not None and learned.fingerprint == files.fingerprint else None
        return Wish(
            name=model.name,
            weights_bytes=files.weights_bytes,
            costs=costs_of_config(files.config, files.element_bytes, costs, self.backend),
            context_tokens=tokens or min(CONTEXT_TOKENS, longest or CONTEXT_TOKENS),
            rows=rows,
            longest_tokens=longest,
        )


def find_surroundings(context: typer.Context, max_memory: str | None = None) -> Surroundings:
    """What the daemon says when one runs, else what the manifest says would be."""
    from pathlib import Path

    from omlxd.core.manifest import max_memory_bytes
    from omlxd.daemon.machine import find_machine
    from omlxd.daemon.manifest_file import read_manifest  # pydantic: only here, 60 ms

    home = home_of(context)
    try:
        status = client_of(context).get("/v1/control/status")
    except DaemonNotRunning:
        status = None
    manifest = read_manifest(Path(status["manifest"]) if status else home.manifest)
    state = _state(home)
    limits = _limits_in_force(status["memory"]) if status else _limits_to_come(manifest, state)
    if max_memory is not None:
        from omlxd.core.limits import resolve_limits

        machine = find_machine()
        limits = resolve_limits(max_memory_bytes(max_memory, machine), None, machine)
        for warning in limits.warnings:
            output.warn(warning)
    neighbours = _in_memory(status["models"]) if status else _pinned(manifest, state)
    return Surroundings(
        manifest, _planner(manifest, limits, neighbours, status), state, _backend(status), status is not None
    )


def show(surroundings: Surroundings, wishes: Sequence[Wish], *, together: bool, json: bool) -> None:
    """Write the verdicts; raises DoesNotFit when what was asked for would not fit."""
    planner = surroundings.planner
    rows = [(wish, planner.alone(wish)) for wish in wishes]
    all_of_them = planner.together(wishes) if together else None
    if json:
        output.data_json(_as_json(surroundings, rows, all_of_them))
    elif rows:
        _draw(surroundings, rows, all_of_them)
    else:
        output.note("the manifest has no models yet; add a `[models.NAME]` table")
    asked = [all_of_them] if all_of_them is not None else [verdict for _, verdict in rows]
    if bad := [verdict for verdict in asked if not verdict.fits]:
        raise DoesNotFit(bad[0].why, hint=_remedy(bad[0]), details={"short_bytes": bad[0].short_bytes})


def _remedy(verdict: Verdict) -> str:
    if verdict.max_context_tokens:
        return f"`--context {verdict.max_context_tokens}` would fit"
    if verdict.beside:
        return f"`omlxd unpin` or `omlxd unload` one of {', '.join(verdict.beside)}, or raise `max_memory`"
    return (
        "raise `max_memory`, or choose smaller models" if verdict.binding == "max_memory" else "choose smaller models"
    )


def _planner(
    manifest: Manifest, limits: MemoryLimits, neighbours: tuple[Neighbour, ...], status: Mapping[str, Any] | None
) -> Planner:
    from omlxd.core.plan import Planner

    return Planner(
        limits,
        neighbours,
        chunk_tokens=manifest.daemon.prefill_chunk_tokens,
        max_batch=manifest.daemon.max_batch,
        unaccounted_bytes=status["memory"]["unaccounted"] if status else 0,
    )


def _state(home: Home) -> SavedState:
    from omlxd.daemon.state_file import SavedState, parse_state

    try:
        return parse_state(home.state.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return SavedState()  # there is none, or a damaged one, which is the daemon's to move aside


def _limits_in_force(memory: Mapping[str, Any]) -> MemoryLimits:
    from omlxd.core.limits import MemoryLimits

    hard_binding = memory.get("hard_binding") or memory["binding"]
    return MemoryLimits(memory["soft_limit"], memory["hard_limit"], memory["binding"], hard_binding=hard_binding)


def _limits_to_come(manifest: Manifest, state: SavedState) -> MemoryLimits:
    from omlxd.daemon.machine import find_machine

    saved = state.max_memory(str(manifest.daemon.max_memory))
    settings = manifest.daemon if saved is None else replace(manifest.daemon, max_memory=saved)
    return settings.memory_limits(find_machine())


def _in_memory(models: Sequence[Mapping[str, Any]]) -> tuple[Neighbour, ...]:
    """Who holds memory now, least recently used first."""
    from omlxd.core.plan import Neighbour

    held = [model for model in models if model["state"] in _HELD]
    held.sort(key=lambda model: (-(model["last_used_s"] or 0.0), model["name"]))

    def why(model: Mapping[str, Any]) -> str:
        if model["pinned"]:
            return "pinned"
        idle = model["state"] == EntryState.LOADED.value and not (model["running"] or model["waiting"])
        return "" if idle else "busy"

    return tuple(Neighbour(model["name"], model["committed_bytes"], bool(why(model)), why(model)) for model in held)


def _pinned(manifest: Manifest, state: SavedState) -> tuple[Neighbour, ...]:
    """Who will always be in memory when a daemon runs; a pinned model with bad files will not be."""
    from omlxd.core.plan import Neighbour
    from omlxd.daemon.model_files import model_folder, read_model_folder

    found = []
    for model in manifest.models.values():
        if state.pinned(model.name, model.pin):
            try:
                held_bytes = read_model_folder(model_folder(model)).weights_bytes
            except OmlxError as failed:
                output.warn(f"the pinned `{model.name}` is left out: {failed.message}")
                continue
            found.append(Neighbour(model.name, held_bytes, True, "pinned"))
    return tuple(found)


def _backend(status: Mapping[str, Any] | None) -> str:
    """The daemon's, once its engine has started; else what this platform has by default."""
    import sys

    return str((status or {}).get("backend") or ("metal" if sys.platform == "darwin" else "cpu"))


def _as_json(
    surroundings: Surroundings, rows: Sequence[tuple[Wish, Verdict]], together: Verdict | None
) -> dict[str, Any]:
    limits = surroundings.planner.limits
    return {
        "schema": SCHEMA,
        "manifest": surroundings.manifest.path,
        "daemon": surroundings.running,
        "backend": surroundings.backend,
        "soft_limit": limits.soft_bytes,
        "hard_limit": limits.hard_bytes,
        "binding": limits.binding,
        "models": [
            {"context": wish.context_tokens, "concurrency": wish.rows, **_verdict_json(verdict)}
            | {"max_context": verdict.max_context_tokens, "max_concurrency": verdict.max_concurrency}
            for wish, verdict in rows
        ],
        "together": None if together is None else _verdict_json(together),
    }


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "names": list(verdict.names),
        "fits": verdict.fits,
        **asdict(verdict.need),
        "evict": list(verdict.evict),
        "beside": list(verdict.beside),
        "beside_bytes": verdict.beside_bytes,
        "limit_bytes": verdict.limit_bytes,
        "binding": verdict.binding,
        "hard": verdict.hard,
        "short_bytes": verdict.short_bytes,
        "known": verdict.known,
        "why": verdict.why,
    }


def _draw(surroundings: Surroundings, rows: Sequence[tuple[Wish, Verdict]], together: Verdict | None) -> None:
    from omlxd.cli.render import draw, plan_table  # Rich, only where a table is drawn

    limits = surroundings.planner.limits
    soft = f"limit {format_bytes(limits.soft_bytes)} ({limits.binding})" if limits.soft_bytes else "no limit"
    hard = f", hard limit {format_bytes(limits.hard_bytes)}" if limits.hard_bytes else ""
    source = "as the daemon has it now" if surroundings.running else "the daemon is not running"
    output.data(f"{soft}{hard}; {source}")
    draw(plan_table(rows, together))
    for verdict in [together] if together is not None else [verdict for _, verdict in rows]:
        output.data(f"  {verdict.why}")
    for _, verdict in rows:
        if not verdict.known:
            output.note(f"the architecture of `{verdict.names[0]}` is not known; its KV and transient are a guess")
