"""`omlxd pull`: a model from the Hugging Face hub into its cache, and into the manifest when it is given a name."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from omlxd.cli import output
from omlxd.cli.discovery import Source, look_at
from omlxd.cli.entries import REPO, Pin, Ttl, add_entry
from omlxd.cli.find import manifest_or_none
from omlxd.cli.hub import Contents, fetch, fetch_config, look_up, unfinished
from omlxd.cli.invocation import home_of
from omlxd.core.errors import DoesNotFit, InvalidRequest, LoadFailed, OmlxError
from omlxd.core.units import format_bytes
from omlxd.core.wording import shown
from omlxd.daemon.model_files import hub_cache


def pull(
    context: typer.Context,
    repo: Annotated[str, typer.Argument(metavar="REPO", help="ORGANISATION/NAME on the hub, or its web address.")],
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Put it into the manifest under this name.")
    ] = None,
    pin: Pin = False,
    ttl: Ttl = None,
    force: Annotated[bool, typer.Option("--force", help="Even when it cannot fit under the limit.")] = False,
) -> None:
    """Download a model from the Hugging Face hub.

    Files that are here already are not fetched again.
    """
    repo = _repo(repo)
    more: dict[str, Any] = {key: value for key, value in (("pin", pin), ("ttl", ttl)) if value}
    if more and name is None:
        raise InvalidRequest("`--pin` and `--ttl` are for the manifest", hint="give the model a name with `--name`")
    with _interrupted_at_once(repo):
        contents = look_up(repo)
        if not force:
            _require_fit(context, repo, contents)
        _require_supported(repo)
        _require_room(contents)
        missing = format_bytes(contents.missing_bytes)
        if contents.missing_bytes:
            output.note(f"{repo}: {missing} of {format_bytes(contents.total_bytes)} in {contents.files} files to fetch")
        fetch(repo)
    found = look_at(Source(repo, repo=True), thorough=True)
    if found.error is not None:
        raise found.error
    assert found.files is not None
    here = "is here" if contents.missing_bytes else "is here already"
    output.data(f"{repo} {here}: {format_bytes(found.files.weights_bytes)} in {found.folder}")
    if name is not None:
        add_entry(context, name, found.source, more, force=force)
    else:
        output.note(f"next: `omlxd add NAME {repo}`")


def _repo(written: str) -> str:
    """`organisation/name` of what was written or copied from the browser."""
    repo = written.strip()
    for prefix in ("https://", "http://", "hf://", "huggingface.co/", "hf.co/", "models/"):
        repo = repo.removeprefix(prefix)
    repo = "/".join(repo.split("?")[0].strip("/").split("/")[:2])
    if not REPO.fullmatch(repo) or "--" in repo or ".." in repo:
        raise InvalidRequest(
            f"`{shown(written)}` is not the name of a model on the hub",
            hint="write ORGANISATION/NAME, as `omlxd pull mlx-community/Qwen3-8B-4bit`",
        )
    return repo


def _require_fit(context: typer.Context, repo: str, contents: Contents) -> None:
    """Refuse to fetch for an hour what can then never be loaded."""
    from omlxd.cli.plan import find_surroundings

    try:
        limits = find_surroundings(context, manifest=manifest_or_none(home_of(context).manifest)).planner.limits
    except OmlxError as error:
        output.warn(f"whether it fits is not known: {error.message}")
        return
    if 0 < limits.soft_bytes < contents.weights_bytes:
        raise DoesNotFit(
            f"the weights of `{repo}` take {format_bytes(contents.weights_bytes)}, the limit is"
            f" {format_bytes(limits.soft_bytes)} ({limits.set_by})",
            hint="choose a smaller one, or one with fewer bits; `--force` fetches it all the same",
            details={"weights_bytes": contents.weights_bytes, "soft_limit_bytes": limits.soft_bytes},
        )


def _require_supported(repo: str) -> None:
    from omlxd.daemon.model_support import installed_architectures

    try:
        config = json.loads(fetch_config(repo).read_bytes())
    except ValueError:
        config = None
    installed = installed_architectures()
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise LoadFailed(
            f"the config.json of `{repo}` names no model type, so mlx-lm cannot load it",
            hint="choose another model",
            details={"kind": "bad_config"},
        )
    if installed is not None and not installed.support(config):
        raise LoadFailed(
            f"`{repo}` has the model type `{shown(config['model_type'])}`, which the installed mlx-lm does not support",
            hint="upgrade mlx-lm, or choose another model",
            details={"kind": "unsupported_model"},
        )


def _require_room(contents: Contents) -> None:
    cache = hub_cache(os.environ)
    there = next(each for each in (cache, *cache.parents) if each.exists())
    free_bytes = shutil.disk_usage(there).free
    if contents.missing_bytes > free_bytes:
        raise OmlxError(
            f"{format_bytes(contents.missing_bytes)} are to be fetched, and the disk of `{cache}` has"
            f" {format_bytes(free_bytes)} left",
            hint="make room (`omlxd rm NAME --files` deletes a model), or set `HF_HOME` to another disk",
        )


@contextmanager
def _interrupted_at_once(repo: str) -> Iterator[None]:
    """Ctrl-C ends the process at once: the hub's threads would finish their files first, which may take an hour.

    Files that are complete are kept; the others could not be taken up again, and would only take room.
    """
    others = unfinished(repo)

    def end(number: int, frame: object) -> None:
        for path in unfinished(repo) - others:
            path.unlink(missing_ok=True)
        sys.stderr.write(f"\ninterrupted; `omlxd pull {repo}` goes on with the files that are missing\n")
        sys.stderr.flush()
        os._exit(130)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
