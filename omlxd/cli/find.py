"""`omlxd find`: the models of this machine that could be added, and whether they would fit."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omlxd.cli import output
from omlxd.cli.discovery import Found, default_folders, find_models
from omlxd.cli.invocation import home_of
from omlxd.cli.options import Json
from omlxd.cli.values import one_line
from omlxd.core.errors import InvalidRequest, OmlxError
from omlxd.core.manifest import Manifest
from omlxd.core.quantisation import quantisation
from omlxd.core.states import SCHEMA
from omlxd.core.units import format_bytes
from omlxd.daemon.model_files import hub_cache

if TYPE_CHECKING:
    from omlxd.core.plan import Verdict
    from omlxd.daemon.planning import Surroundings


def find(
    context: typer.Context,
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FOLDER]...", help="Where to look; default: the Hugging Face cache and usual folders."),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Also what is not complete or not supported, and why.")] = False,
    json: Json = False,
) -> None:
    """Find models in the Hugging Face cache and in folders.

    Only complete ones are listed.
    """
    from omlxd.cli.plan import find_surroundings

    manifest = manifest_or_none(home_of(context).manifest)
    surroundings = find_surroundings(context, manifest=manifest)
    for folder in folders or ():
        if not folder.expanduser().is_dir():
            raise InvalidRequest(f"`{folder}` is not a folder", hint="`omlxd find` alone looks in the usual places")
    chosen = [each.expanduser().absolute() for each in folders or ()]
    looked = chosen or default_folders(home_of(context), surroundings.manifest)
    found = find_models([each for each in looked if each.is_dir()], cache=not chosen)
    whole = [each for each in found if each.files is not None]
    broken = [each for each in found if each.files is None]
    names = _names(surroundings.manifest)
    verdicts = [judge(surroundings, each) for each in whole]
    if json:
        rows = [_as_json(each, verdict, names) for each, verdict in zip(whole, verdicts, strict=True)]
        rows += [_as_json(each, None, names) for each in broken if all_]
        output.data_json({"schema": SCHEMA, "models": rows})
        return
    if whole:
        _draw(whole, verdicts, names)
    for each in broken if all_ else ():
        output.sentence(f"  {one_line(each.problem)}")
    if broken and not all_:
        output.note(f"{len(broken)} left out as not complete or not supported; `--all` shows them and why")
    if not whole:
        output.note(f"no models were found in {_places(looked, cache=not chosen)}")
        output.note(
            "`omlxd pull ORGANISATION/NAME` fetches one from the Hugging Face hub, `omlxd find FOLDER` looks there"
        )
    elif any(each.source.written not in names for each in whole):
        output.note("`omlxd add NAME WHERE` puts one into the manifest")


def _places(folders: Sequence[Path], *, cache: bool) -> str:
    """Where was looked, each as one would type it, and which of it does not exist."""
    hub = hub_cache(os.environ)
    places = [("the Hugging Face cache ", hub)] if cache else []
    places += [("", folder) for folder in folders]
    return ", ".join(
        f"{what}`{one_line(tilde(str(path)))}`{'' if path.is_dir() else ' (does not exist)'}" for what, path in places
    )


def manifest_or_none(path: Path) -> Manifest | None:
    """An empty manifest where there is none yet, else None: it is there to be read."""
    return None if path.exists() else Manifest(path=str(path))


def judge(surroundings: Surroundings, found: Found, name: str = "it") -> Verdict | None:
    """How a model would fare by itself; None when its files do not say.

    One of this name that is still in memory makes way for it.
    """
    try:
        return surroundings.planner.alone(surroundings.wish(found.source.settings(name), None, 1))
    except OmlxError:
        return None


def _names(manifest: Manifest) -> dict[str, str]:
    """The manifest's models by where they are."""
    return {str(model.repo or model.path): model.name for model in manifest.models.values()}


def _as_json(found: Found, verdict: Verdict | None, names: Mapping[str, str]) -> dict[str, Any]:
    files = found.files
    return {
        "name": names.get(found.source.written),
        "repo": found.source.written if found.source.repo else None,
        "path": None if found.folder is None else str(found.folder),
        "model_type": files.model_type if files else None,
        "weights_bytes": files.weights_bytes if files else None,
        "quantisation": quantisation(files.config, files.element_bytes) if files else None,
        "context_length": files.context_length if files else None,
        "fits": verdict.fits if verdict else None,
        "max_context": verdict.max_context_tokens if verdict else None,
        "problem": found.problem or None,
    }


def _draw(found: Sequence[Found], verdicts: Sequence[Verdict | None], names: Mapping[str, str]) -> None:
    from rich.table import Table
    from rich.text import Text

    from omlxd.cli.render import draw  # Rich, only where a table is drawn

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("NAME", "SIZE", "WEIGHTS", "CONTEXT", "FITS", "WHERE"):
        table.add_column(title, justify="right" if title in ("SIZE", "CONTEXT") else "left", overflow="fold")
    for each, verdict in zip(found, verdicts, strict=True):
        if each.files is None:
            continue
        table.add_row(
            Text(one_line(names.get(each.source.written, "-"))),
            format_bytes(each.files.weights_bytes),
            quantisation(each.files.config, each.files.element_bytes),
            str(each.files.context_length or "-"),
            Text(_fit(verdict)),
            Text(one_line(tilde(each.source.written))),
        )
    draw(table)


def _fit(verdict: Verdict | None) -> str:
    if verdict is None:
        return "?"
    if verdict.fits:
        return f"yes, {verdict.max_context_tokens} tokens"
    return f"{verdict.max_context_tokens} tokens" if verdict.max_context_tokens else "no"


def tilde(path: str) -> str:
    """The path as one would write it: from `~`, where that is."""
    home = str(Path.home())
    return f"~{path.removeprefix(home)}" if path.startswith(f"{home}/") else path
