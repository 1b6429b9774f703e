"""`omlxd add` and `omlxd rm`: a model's entry in the manifest, which keeps its comments."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from omlxd.cli import output
from omlxd.cli.after_edit import manifest_in_use, take_up
from omlxd.cli.completion import model_names
from omlxd.cli.discovery import Found, Source, look_at
from omlxd.cli.find import judge, manifest_or_none, tilde
from omlxd.cli.invocation import client_of, home_of
from omlxd.core.errors import DoesNotFit, InvalidRequest, LoadFailed, OmlxError
from omlxd.core.quantisation import quantisation
from omlxd.core.units import format_bytes
from omlxd.core.wording import nearest, shown

if TYPE_CHECKING:
    from omlxd.core.manifest import Manifest, ModelSettings

ManifestFile = Annotated[
    Path | None,
    typer.Option("--manifest", metavar="FILE", help="Default: the running daemon's, else omlxd.toml at home."),
]
Pin = Annotated[bool, typer.Option("--pin", help="Never unloaded to make room.")]
Ttl = Annotated[str | None, typer.Option("--ttl", metavar="TIME", help="Unloaded after this time without a request.")]
REPO: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


def add(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the model is to be called.")],
    where: Annotated[
        str, typer.Argument(metavar="PATH_OR_REPO", help="Its folder, or ORGANISATION/NAME in the Hugging Face cache.")
    ],
    pin: Pin = False,
    preload: Annotated[bool, typer.Option("--preload", help="Loaded when the daemon starts.")] = False,
    ttl: Ttl = None,
    alias: Annotated[
        list[str] | None, typer.Option("--alias", metavar="NAME", help="Another name; may be repeated.")
    ] = None,
    max_context: Annotated[
        int | None, typer.Option("--max-context", metavar="N", min=1, help="Tokens of prompt and answer together.")
    ] = None,
    manifest: ManifestFile = None,
    force: Annotated[
        bool, typer.Option("--force", help="Even when it is there under another name, or pins would not fit.")
    ] = False,
) -> None:
    """Put a model into the manifest, after a look at its files."""
    given = {"pin": pin, "preload": preload, "aliases": alias, "ttl": ttl, "max_context": max_context}
    more = {key: value for key, value in given.items() if value}
    add_entry(context, name, source_of(where), more, manifest=manifest, force=force)


def add_entry(
    context: typer.Context,
    name: str,
    source: Source,
    more: Mapping[str, Any],
    *,
    manifest: Path | None = None,
    force: bool = False,
) -> None:
    """Check everything, write the entry, and have a running daemon take it up."""
    from omlxd.daemon.manifest_edit import edit_manifest, with_model  # pydantic: only here, 60 ms
    from omlxd.daemon.manifest_file import parse_manifest

    path = manifest_in_use(context, manifest)
    found = _whole(source, home_of(context).root)
    settings = {"repo" if source.repo else "path": source.written if source.repo else tilde(source.written), **more}

    def change(text: str) -> str:
        before = parse_manifest(text, path)
        _refuse_taken(before, name, source, force)
        written = with_model(text, path, name, settings)
        _require_pins_fit(context, parse_manifest(written, path), name, found, force)
        return written

    edit_manifest(path, change)
    files = found.files
    assert files is not None
    stored, context_length = quantisation(files.config, files.element_bytes), files.context_length
    about = f"{format_bytes(files.weights_bytes)}, {stored}" + (f", context {context_length}" if context_length else "")
    output.sentence(f"added `{name}` ({about}) to {path}")
    _tell_fit(context, path, name, found)
    loads = "loads it now" if more.get("pin") else "loads it now if there is room" if more.get("preload") else ""
    take_up(client_of(context), path, then=f"{loads}; `omlxd status` shows how far it is" if loads else "")


def rm(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name of the manifest.", autocompletion=model_names)],
    files: Annotated[
        bool, typer.Option("--files", help="Delete its files too, when omlxd or the Hugging Face cache holds them.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before files are deleted.")] = False,
    manifest: ManifestFile = None,
) -> None:
    """Take a model out of the manifest; its files stay."""
    from omlxd.cli.model_removal import deletable, delete_files  # with what it imports, 10 ms
    from omlxd.daemon.manifest_edit import edit_manifest, without_model  # pydantic: only here, 60 ms
    from omlxd.daemon.manifest_file import parse_manifest

    path = manifest_in_use(context, manifest)
    gone: list[str] = []
    doomed: list[Path] = []

    def change(text: str) -> str:
        model = _entry(parse_manifest(text, path), name)
        if files:
            doomed.append(deletable(context, parse_manifest(text, path), model))
            if not yes:
                _ask(name, doomed[0])
        written, lines = without_model(text, path, name)
        gone.append(lines)
        return written

    edit_manifest(path, change)
    output.data(f"removed `{name}` from {path}; these lines are gone:")
    for line in gone[0].strip().splitlines():
        output.data(f"  | {line}")
    take_up(client_of(context), path, force=True)  # the last one may have been meant
    for folder in doomed:
        output.data(f"deleted {folder} ({format_bytes(delete_files(folder))})")


def source_of(where: str) -> Source:
    """A folder that is there, a repository's name, or what is written like a path."""
    folder = Path(where).expanduser()
    if folder.is_dir() or not REPO.fullmatch(where):
        return Source(os.path.normpath(folder.absolute()), repo=False)
    return Source(where, repo=True)


def _whole(source: Source, home: Path) -> Found:
    """The model there; raises LoadFailed when there is none that can be loaded."""
    found = look_at(source, thorough=True)
    if found.files is not None:
        return found
    if source.repo and found.folder is None:
        fetched = f"`omlxd pull {source.written}` fetches it, `omlxd find` lists what is here"
        at_home = home / source.written
        raise LoadFailed(
            f"`{source.written}` is neither a folder here nor in the Hugging Face cache",
            hint=f"did you mean `{tilde(str(at_home))}`?" if at_home.is_dir() else fetched,
        )
    folder = Path(source.written)
    if not source.repo and not folder.exists():
        beside = [each.name for each in folder.parent.iterdir()] if folder.parent.is_dir() else []
        near = nearest(folder.name, beside)
        raise LoadFailed(
            f"`{shown(source.written)}` does not exist",
            hint=f"did you mean `{folder.parent / near}`?" if near else "`omlxd find` lists the models of this machine",
        )
    assert found.error is not None
    raise found.error


def _refuse_taken(manifest: Manifest, name: str, source: Source, force: bool) -> None:
    taken = next((each for each in manifest.models.values() if name == each.name or name in each.aliases), None)
    if taken is not None:
        what = f"there is a model `{name}` already" if name == taken.name else f"`{name}` is an alias of `{taken.name}`"
        where = taken.repo or tilde(taken.path or "")
        raise InvalidRequest(f"{what} ({where})", hint=f"choose another name, or `omlxd rm {taken.name}` first")
    same = next((each for each in manifest.models.values() if _is_same(source, each)), None)
    if same is not None and not force:
        raise InvalidRequest(
            f"this model is in the manifest as `{same.name}`",
            hint=f"use that name, or give it another: `aliases` of `[models.{same.name}]`;"
            " `--force` adds it twice, each with memory of its own",
        )


def _is_same(source: Source, model: ModelSettings) -> bool:
    if source.repo or model.path is None:
        return source == _source(model)
    return Path(source.written).resolve() == Path(model.path).resolve()


def _entry(manifest: Manifest, name: str) -> ModelSettings:
    """The model of exactly this name: an alias could stand for more than was meant."""
    if name in manifest.models:
        return manifest.models[name]
    model = manifest.model(name)  # raises UnknownModel with the nearest name
    raise InvalidRequest(f"`{name}` is an alias of `{model.name}`", hint=f"`omlxd rm {model.name}` removes the model")


def _require_pins_fit(context: typer.Context, manifest: Manifest, name: str, found: Found, force: bool) -> None:
    """A pinned model that is larger than the limit would keep the daemon from starting."""
    if not manifest.models[name].pin or found.files is None:
        return
    from omlxd.cli.plan import find_surroundings

    limits = find_surroundings(context, manifest=manifest).planner.limits
    sizes = [look_at(_source(each)).files for each in manifest.models.values() if each.pin and each.name != name]
    others_bytes = sum(files.weights_bytes for files in sizes if files is not None)
    own_bytes = found.files.weights_bytes
    if limits.soft_bytes <= 0 or own_bytes + others_bytes <= limits.soft_bytes:
        return
    if own_bytes > limits.soft_bytes or not force:
        beside = f" beside {format_bytes(others_bytes)} of other pinned models" if others_bytes else ""
        raise DoesNotFit(
            f"`{name}` takes {format_bytes(own_bytes)}{beside}, more than the limit"
            f" {format_bytes(limits.soft_bytes)} ({limits.set_by}) holds",
            hint="leave out `--pin`, or raise `max_memory`"
            + ("; `--force` pins it all the same" if own_bytes <= limits.soft_bytes else ""),
        )


def _source(model: ModelSettings) -> Source:
    return Source(str(model.repo or model.path), repo=model.repo is not None)


def _tell_fit(context: typer.Context, path: Path, name: str, found: Found) -> None:
    from omlxd.cli.plan import find_surroundings
    from omlxd.daemon.manifest_file import read_manifest

    try:
        surroundings = find_surroundings(context, manifest=manifest_or_none(path) or read_manifest(path))
    except OmlxError:
        return  # it is written; what `plan` cannot say is no reason to fail
    verdict = judge(surroundings, found, name)
    if verdict is not None and not verdict.fits:
        output.warn(f"{verdict.why}; `omlxd plan {name}` shows how far it fits")


def _ask(name: str, folder: Path) -> None:
    if not sys.stdin.isatty():
        raise InvalidRequest(f"`{folder}` would be deleted", hint=f"`omlxd rm {name} --files --yes` does not ask")
    output.note(f"This deletes {folder} for every program that uses it.")
    if not typer.confirm("Delete it?", err=True):
        raise InvalidRequest(
            "nothing was deleted, and the manifest is as it was", hint=f"`omlxd rm {name}` takes the entry alone"
        )
