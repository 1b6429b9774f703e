"""`omlxd init` and `omlxd check`: writes a manifest, and finds all that is wrong with one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omlxd.cli import output
from omlxd.cli.invocation import home_of
from omlxd.cli.options import Json, ManifestFile
from omlxd.core.errors import (
    DoesNotFit,
    InvalidRequest,
    LoadFailed,
    ManifestInvalid,
    NotPermitted,
    OmlxError,
    StartFailed,
)
from omlxd.core.limits import MemoryLimits
from omlxd.core.manifest_template import default_manifest_text
from omlxd.core.states import SCHEMA
from omlxd.core.units import format_bytes

if TYPE_CHECKING:
    from omlxd.core.manifest import Manifest
    from omlxd.daemon.model_check import ModelReport


def init(
    context: typer.Context,
    manifest: ManifestFile = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a commented manifest to begin with."""
    path = _path(context, manifest)
    try:
        if manifest is None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if force:
            path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(default_manifest_text())
    except FileExistsError as error:
        raise InvalidRequest(
            f"`{path}` is there already", hint="`omlxd check` checks it, `--force` replaces it"
        ) from error
    except PermissionError as error:
        raise NotPermitted(
            f"`{path}` cannot be written ({error.strerror})", hint="name another with `--manifest`"
        ) from error
    except OSError as error:
        raise OmlxError(
            f"`{path}` cannot be written ({error.strerror})", hint="name another with `--manifest`"
        ) from error
    output.data(f"wrote {path}")
    output.note("next: add your models to it, then `omlxd check` and `omlxd start`")


def check(context: typer.Context, manifest: ManifestFile = None, json: Json = False) -> None:
    """Check the manifest and the models' files, without a daemon.

    Nothing is loaded.
    """
    from omlxd.daemon.manifest_file import read_manifest  # pydantic: only here, 60 ms
    from omlxd.daemon.model_check import check_models, with_file_problems
    from omlxd.daemon.state_file import read_state

    path = _path(context, manifest)
    try:
        found = read_manifest(path)
        limits = _limits(found)
    except ManifestInvalid as error:
        invalid = with_file_problems(error, path)
        if json:
            problems = list(invalid.problems) or [invalid.message]
            output.data_json({"schema": SCHEMA, "manifest": str(path), "problems": problems, "models": []})
        raise invalid from error
    reports = check_models(found, limits.soft_bytes)
    verdict = _verdict(found, reports, limits) or _key_missing(found)
    for warning in limits.warnings:
        output.warn(warning)
    saved, written = read_state(home_of(context).state), str(found.daemon.max_memory)
    kept, origin = saved.max_memory(written), saved.limit_origin(written)
    if json:
        problems = [verdict.message] if verdict else []
        at_run_time = {"saved_limit": kept if origin else None, "saved_pins": saved.changed_pins(found)}
        output.data_json(_as_json(found, reports, limits, problems) | at_run_time)
    else:
        _draw(found, reports, limits)
        if origin:
            output.note(f"the next start keeps the limit `{kept}`, {origin}")
        if pins := saved.pins_origin(found):
            output.note(f"the next start keeps {pins}")
    if verdict is not None:
        raise verdict


def _path(context: typer.Context, manifest: Path | None) -> Path:
    return manifest.expanduser().absolute() if manifest is not None else home_of(context).manifest


def _limits(manifest: Manifest) -> MemoryLimits:
    """The limits that this machine's memory gives; what its device allows is known to the daemon only."""
    from omlxd.daemon.machine import find_machine

    try:
        return manifest.daemon.memory_limits(find_machine())
    except InvalidRequest as error:
        raise ManifestInvalid(
            f"the manifest `{manifest.path}` has 1 problem", problems=[f"daemon: {error.message}"], hint=error.hint
        ) from error


def _verdict(manifest: Manifest, reports: Sequence[ModelReport], limits: MemoryLimits) -> OmlxError | None:
    """The worst of what was found, as the error that the exit status comes from."""
    soft_bytes = limits.soft_bytes
    pinned = [report for report in reports if manifest.models[report.name].pin]
    pinned_bytes = sum(report.weights_bytes or 0 for report in pinned)
    too_large = [report.name for report in reports if 0 < soft_bytes < (report.weights_bytes or 0)]
    numbers = {"pinned_bytes": pinned_bytes, "soft_limit_bytes": soft_bytes}
    if stuck := [report.name for report in pinned if report.name in too_large]:
        return ManifestInvalid(
            f"the pinned model {_names(stuck)} is larger than the limit {format_bytes(soft_bytes)}",
            hint="raise `max_memory` or remove `pin`",
            details=numbers,
        )
    if 0 < soft_bytes < pinned_bytes:
        return DoesNotFit(
            f"the pinned models together take {format_bytes(pinned_bytes)}, more than the limit"
            f" {format_bytes(soft_bytes)} ({limits.set_by})",
            hint="remove a `pin` or raise `max_memory`",
            details=numbers,
        )
    broken = [report.name for report in reports if report.problems and report.name not in too_large]
    if broken:
        return LoadFailed(
            f"{_names(broken)} cannot be loaded", hint="correct what is listed with the models, then `omlxd check`"
        )
    if too_large:
        return DoesNotFit(
            f"{_names(too_large)} can never fit under the limit {format_bytes(soft_bytes)} ({limits.set_by})",
            hint="raise `max_memory` or choose smaller models",
            details=numbers,
        )
    return None


def _key_missing(manifest: Manifest) -> StartFailed | None:
    """What a start says when the file or the variable that it takes the API's key from holds none."""
    from omlxd.daemon.api_key import api_key_of

    try:
        api_key_of(manifest.api)
    except StartFailed as error:
        return error
    return None


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _as_json(
    manifest: Manifest, reports: Sequence[ModelReport], limits: MemoryLimits, problems: list[str]
) -> dict[str, Any]:
    models = [
        {
            "name": report.name,
            "path": report.path,
            "pinned": manifest.models[report.name].pin,
            "weights_bytes": report.weights_bytes,
            "model_type": report.model_type,
            "context_length": report.context_length,
            "problems": list(report.problems),
        }
        for report in reports
    ]
    return {
        "schema": SCHEMA,
        "manifest": manifest.path,
        "soft_limit": limits.soft_bytes,
        "hard_limit": limits.hard_bytes,
        "binding": limits.binding,
        "problems": problems,
        "models": models,
    }


def _draw(manifest: Manifest, reports: Sequence[ModelReport], limits: MemoryLimits) -> None:
    from omlxd.cli.render import check_table, draw  # Rich, only where a table is drawn

    soft = f"limit {format_bytes(limits.soft_bytes)} ({limits.set_by})" if limits.soft_bytes else "no limit"
    output.data(f"{manifest.path}: {soft}")
    if not reports:
        output.note("the manifest has no models yet; `omlxd find` shows what is here, `omlxd add` adds it")
        return
    draw(check_table((report, manifest.models[report.name].pin) for report in reports))
    for report in reports:
        for problem in report.problems:
            output.sentence(f"  {report.name}: {problem}")
