"""Which files `omlxd rm --files` may delete, and their deletion: never anything that omlxd cannot know to be a model's.

Two places qualify: a repository in the Hugging Face cache, which can be fetched again, and a folder of its own in
`models` of the home. Whatever is elsewhere was put there by somebody, and is theirs to delete.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from omlxd.cli.find import tilde
from omlxd.cli.invocation import client_of, home_of
from omlxd.core.errors import InvalidRequest, NotPermitted, OmlxError
from omlxd.core.manifest import Manifest, ModelSettings
from omlxd.daemon.model_files import hub_cache

if TYPE_CHECKING:
    from omlxd.cli.client import Client


def deletable(context: typer.Context, manifest: Manifest, model: ModelSettings) -> Path:
    """The folder to delete for this model.

    Raises:
        InvalidRequest: another model uses it, it is loaded, it is not there, or it is in no place where omlxd deletes.
    """
    keep = f"`omlxd rm {model.name}` takes the entry alone"
    others = [each for each in manifest.models.values() if each.name != model.name]
    sharing = [each.name for each in others if (each.path, each.repo) == (model.path, model.repo)]
    if sharing:
        raise InvalidRequest(f"`{sharing[0]}` uses the same files", hint=keep)
    if model.repo is not None:
        top, folder = hub_cache(os.environ), hub_cache(os.environ) / f"models--{model.repo.replace('/', '--')}"
    else:
        top, folder = home_of(context).root / "models", Path(model.path or "")
    if folder.is_symlink() or folder.resolve().parent != top.resolve():
        raise InvalidRequest(
            f"`{tilde(str(folder))}` is not in `{tilde(str(top))}`, and omlxd deletes nothing elsewhere",
            hint=f"{keep}; then delete the folder yourself",
        )
    if not folder.is_dir():
        raise InvalidRequest(f"`{tilde(str(folder))}` is not there", hint=keep)
    if any(Path(each.path).resolve().is_relative_to(folder.resolve()) for each in others if each.path):
        raise InvalidRequest(f"another model of the manifest is inside of `{tilde(str(folder))}`", hint=keep)
    _require_unloaded(client_of(context), model.name)
    return folder


def delete_files(folder: Path) -> int:
    """Delete the folder; the bytes that it took. Raises NotPermitted or OmlxError when the system refuses."""
    size_bytes = sum(
        (Path(at) / name).lstat().st_size for at, _, names in os.walk(folder) for name in names if name != ".lock"
    )
    try:
        shutil.rmtree(folder)
    except OSError as error:
        kind = NotPermitted if isinstance(error, PermissionError) else OmlxError
        raise kind(
            f"`{tilde(str(folder))}` could not be deleted wholly ({error.strerror})",
            hint="the model is out of the manifest; delete what is left of the folder yourself",
        ) from error
    return size_bytes


def _require_unloaded(client: Client, name: str) -> None:
    try:
        models = client.get("/v1/control/models")["models"]
    except OmlxError:
        return  # no daemon, nothing loaded
    if any(each["name"] == name and each["state"] not in ("unloaded", "failed") for each in models):
        raise InvalidRequest(f"`{name}` is loaded", hint=f"`omlxd unload {name}`, then the same again")
