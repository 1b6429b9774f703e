"""What can be said of a manifest's models without loading one: whether their files are there, and whether they fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from omlxd.core.errors import LoadFailed, ManifestInvalid, NotPermitted, OmlxError
from omlxd.core.manifest import Manifest, ModelSettings, is_model_name
from omlxd.core.units import format_bytes
from omlxd.core.wording import dotted, named
from omlxd.daemon.manifest_file import model_settings
from omlxd.daemon.manifest_schema import ModelTable
from omlxd.daemon.manifest_source import invalid_manifest, placed, read_text, read_toml
from omlxd.daemon.model_files import model_folder, read_model_folder


@dataclass(frozen=True)
class ModelReport:
    """What `check` finds out about one model of the manifest, without loading it.

    Attributes:
        path: its folder, or None when the repository is not downloaded.
        weights_bytes: what its weights will take in memory; None when the folder does not hold a model.
        context_length: tokens, when config.json says so.
        problems: one sentence each, with the next step; empty when the model can be loaded.
    """

    name: str
    path: str | None = None
    exists: bool = False
    weights_bytes: int | None = None
    model_type: str | None = None
    context_length: int | None = None
    problems: tuple[str, ...] = ()


def check_models(manifest: Manifest, soft_bytes: int = 0) -> list[ModelReport]:
    """A look at every model's files, and at whether each fits under the soft limit (0 = no limit) by itself."""
    return [_report(model, soft_bytes) for model in manifest.models.values()]


def warnings_of_missing(manifest: Manifest) -> tuple[str, ...]:
    """One sentence when folders of models are not there, else none; what is in them is not looked at."""
    missing = [model.name for model in manifest.models.values() if not _may_be_there(model)]
    if not missing:
        return ()
    where = "its folder is" if len(missing) == 1 else "their folders are"
    return (f"{named(missing)} cannot be loaded: {where} not there; `omlxd check` shows what is wrong",)


def _may_be_there(model: ModelSettings) -> bool:
    try:
        return model_folder(model).exists()
    except LoadFailed:
        return False
    except (NotPermitted, OSError):
        return True  # who may not look cannot say


def with_file_problems(error: ManifestInvalid, path: Path) -> ManifestInvalid:
    """The error, and beside its problems those of the files of every model whose own table is well."""
    try:
        raw = read_toml(read_text(path), path)
    except OmlxError:
        return error
    found = placed(_file_problems(raw, path), path)
    if not found:
        return error
    with_all = invalid_manifest(path, [*error.problems, *found])
    with_all.hint = error.hint
    return with_all


def _file_problems(raw: Mapping[str, Any], path: Path) -> Iterator[str]:
    models = raw.get("models")
    for name, written in models.items() if isinstance(models, dict) else ():
        try:
            table = ModelTable.model_validate(written, context={"folder": path.parent})
        except ValidationError:
            continue
        if (table.path is None) is (table.repo is None) or not is_model_name(name):
            continue
        where = dotted(("models", name, "path" if table.repo is None else "repo"))
        yield from (f"{where}: {problem}" for problem in _report(model_settings(name, table), 0).problems)


def _report(model: ModelSettings, soft_bytes: int) -> ModelReport:
    folder: Path | None = None
    try:
        folder = model_folder(model)
        files = read_model_folder(folder, thorough=True)
    except OmlxError as failed:
        problem = f"{failed.message}; {failed.hint}" if failed.hint else failed.message
        exists = failed.details.get("kind") not in ("missing_folder", "not_downloaded")
        return ModelReport(model.name, path=None if folder is None else str(folder), exists=exists, problems=(problem,))
    too_large = (
        f"its weights take {format_bytes(files.weights_bytes)}, more than `max_memory` ({format_bytes(soft_bytes)});"
        " raise `max_memory`" + (" or remove `pin`" if model.pin else " or choose a smaller model")
    )
    return ModelReport(
        model.name,
        path=str(folder),
        exists=True,
        weights_bytes=files.weights_bytes,
        model_type=files.model_type,
        context_length=files.context_length,
        problems=(too_large,) if 0 < soft_bytes < files.weights_bytes else (),
    )
