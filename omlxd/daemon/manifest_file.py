"""Reads the manifest: from a TOML file to a checked `Manifest`, or all of its problems at once.

Model folders are not looked at while parsing (a disk may be away, the daemon starts all the same); `check_models`
does that for `omlxd check` and for the start.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from omlxd.core.errors import InvalidRequest, ManifestInvalid, NotPermitted, OmlxError
from omlxd.core.manifest import (
    AUTO,
    NAME_RULE,
    ApiSettings,
    DaemonSettings,
    Manifest,
    ModelSettings,
    is_model_name,
    parse_listen,
)
from omlxd.core.units import format_bytes, parse_size
from omlxd.core.wording import Location, dotted, nearest, shown
from omlxd.daemon.api_key import KEY_VARIABLE
from omlxd.daemon.manifest_schema import Document, ModelTable, findings, keys_of
from omlxd.daemon.model_files import model_folder, read_model_folder

MAX_MANIFEST_BYTES: Final = 2**20
_CORRECT_HINT: Final = "correct the file, then `omlxd check`"

Finding = tuple[Location, str]


def read_manifest(path: str | Path) -> Manifest:
    """The manifest at this path; paths in it are relative to its folder.

    Raises:
        ManifestInvalid: the file is missing, is not TOML, or has problems (`problems` lists all of them).
        NotPermitted: the file may not be read.
    """
    path = Path(path)
    return parse_manifest(read_text(path), path)


def parse_manifest(text: str, path: str | Path) -> Manifest:
    """The manifest in this text, as if it stood in the file at `path`; raises ManifestInvalid."""
    path = Path(path).absolute()
    raw = _toml(text, path)
    found = list(_cross_findings(raw))
    try:
        document = Document.model_validate(raw, context={"folder": path.parent})
    except ValidationError as invalid:
        found += findings(invalid)
        document = None
    if found or document is None:
        raise _invalid(path, _in_file_order(found, _lines_of_keys(text)))
    return _manifest(document, path)


def placed(problems: Iterable[str], path: str | Path) -> list[str]:
    """Problems that were found later, each `key.path: ...`, with the lines that their keys have in this file."""
    try:
        text = read_text(Path(path))
    except OmlxError:  # it has gone away meanwhile
        text = ""
    lines = {dotted(location): line for location, line in _lines_of_keys(text).items()}
    keys = ((problem, problem.partition(": ")[0]) for problem in problems)
    return [f"{problem} (line {lines[key]})" if key in lines else problem for problem, key in keys]


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


def with_file_problems(error: ManifestInvalid, path: Path) -> ManifestInvalid:
    """The error, and beside its problems those of the files of every model whose own table is well."""
    try:
        raw = _toml(read_text(path), path)
    except OmlxError:
        return error
    found = placed(_file_problems(raw, path), path)
    if not found:
        return error
    with_all = _invalid(path, [*error.problems, *found])
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
        yield from (f"{where}: {problem}" for problem in _report(_model(name, table), 0).problems)


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


def read_text(path: Path) -> str:
    """The manifest's text, unchecked; raises what `read_manifest` raises for a file that cannot be read."""
    shown_path = shown(str(path))
    try:
        # A pipe would block the open, so look first.
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
            raise _unreadable(shown_path, f"is {kind}", "name a TOML file, or let `omlxd init` write one")
        with path.open("rb") as file:
            content = file.read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError:
        raise _unreadable(shown_path, "does not exist", "`omlxd init` writes one") from None
    except PermissionError:
        raise NotPermitted(
            f"the manifest `{shown_path}` may not be read", hint="make it readable for the user who runs omlxd"
        ) from None
    except (OSError, ValueError) as failed:  # ValueError: a NUL byte in the path
        reason = getattr(failed, "strerror", None) or str(failed)
        raise _unreadable(shown_path, f"cannot be read: {reason.lower()}", "check the path") from None
    if len(content) > MAX_MANIFEST_BYTES:
        raise _unreadable(shown_path, "is larger than 1 MiB", "name a manifest: a TOML file of a few lines")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as failed:
        line = content.count(b"\n", 0, failed.start) + 1
        raise _invalid(path, [f"line {line}: is not UTF-8 text (byte {failed.start + 1})"]) from None


def _unreadable(shown_path: str, what: str, hint: str) -> ManifestInvalid:
    return ManifestInvalid(f"the manifest `{shown_path}` {what}", problems=[f"file: {what}"], hint=hint)


def _invalid(path: Path, problems: list[str]) -> ManifestInvalid:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return ManifestInvalid(f"the manifest `{shown(str(path))}` has {count}", problems=problems, hint=_CORRECT_HINT)


def _toml(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise _invalid(path, ["file: is nested too deeply"]) from None
    except ValueError as failed:  # TOMLDecodeError, and numbers of thousands of digits
        message = str(failed)
        where = re.search(r" \((?:at (line \d+, column \d+)|at end of document)\)$", message)
        if where is None:
            raise _invalid(path, [f"file: {shown(message)}"]) from None
        place = where[1] or "end of file"
        raise _invalid(path, [f"{place}: {message[: where.start()]}"]) from None


def _cross_findings(raw: Mapping[str, Any]) -> Iterator[Finding]:
    """What concerns more than one value; looks at the raw tables, so that one problem does not hide another."""
    daemon, api, models = (
        table if isinstance(table := raw.get(key), dict) else {} for key in ("daemon", "api", "models")
    )
    yield from _limits_findings(daemon)
    yield from _listen_findings(api)
    yield from _alias_findings(models)
    for name, model in models.items():
        if not is_model_name(name):
            yield ("models", name), f"`{shown(name)}` is not a model name: {NAME_RULE}"
        if isinstance(model, dict):
            yield from _source_findings(name, model)


def _limits_findings(daemon: Mapping[str, Any]) -> Iterator[Finding]:
    soft, hard = daemon.get("max_memory", AUTO), daemon.get("hard_limit")
    try:
        # Without `ram_bytes` a percentage is refused: only the machine can compare those.
        if hard is not None and parse_size(hard) < parse_size(soft):
            yield ("daemon", "hard_limit"), f"is below `max_memory` ({shown(str(soft))}); raise it or leave it out"
    except InvalidRequest:
        return


def _listen_findings(api: Mapping[str, Any]) -> Iterator[Finding]:
    listen = api.get("listen", "off")
    try:
        address = parse_listen(listen) if isinstance(listen, str) else None
    except InvalidRequest:
        return
    if "api_key" in api and "api_key_file" in api:
        yield ("api", "api_key_file"), "stands beside `api_key`; keep one"
    if address and not address.is_loopback and not (api.keys() & _KEY_SOURCES or os.environ.get(KEY_VARIABLE)):
        yield (
            ("api", "listen"),
            f"`{shown(listen)}` can be reached from other machines; set `api_key`, or listen on `127.0.0.1`",
        )


_KEY_SOURCES = {"api_key", "api_key_file"}


def _source_findings(name: str, model: Mapping[str, Any]) -> Iterator[Finding]:
    if "path" in model and "repo" in model:
        yield ("models", name), "has both `path` and `repo`; keep one"
    if "path" in model or "repo" in model:
        return
    unknown = [key for key in model if key not in ModelTable.model_fields]
    # A misspelt `path`, or a name with a dot in it, is reported as the unknown key that it is.
    if not any(isinstance(model[key], dict) or nearest(key, keys_of(("models", name))) for key in unknown):
        yield ("models", name), 'needs `path = "FOLDER"` or `repo = "organisation/name"`'


def _alias_findings(models: Mapping[str, Any]) -> Iterator[Finding]:
    taken = {name: f"the model `{shown(name)}`" for name in models}
    for name, model in models.items():
        aliases = model.get("aliases", []) if isinstance(model, dict) else []
        for position, alias in enumerate(aliases if isinstance(aliases, list) else []):
            if not isinstance(alias, str):
                continue
            if alias in taken:
                yield ("models", name, "aliases", position), f"`{shown(alias)}` is already {taken[alias]}"
            taken.setdefault(alias, f"an alias of `{shown(name)}`")


def _in_file_order(found: Iterable[Finding], lines: Mapping[Location, int]) -> list[str]:
    placed = []
    for location, sentence in found:
        known = next((location[:n] for n in range(len(location), 0, -1) if location[:n] in lines), None)
        line = lines[known] if known else 0
        placed.append((line or 2**31, f"{dotted(location)}: {sentence}" + (f" (line {line})" if line else "")))
    return [text for _, text in sorted(placed, key=lambda entry: entry[0])]


_KEY: Final = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')"""
_KEYS: Final = rf"{_KEY}(?:\s*\.\s*{_KEY})*"
_HEADER = re.compile(rf"\s*\[\[?\s*({_KEYS})\s*\]")
_ASSIGNMENT = re.compile(rf"\s*({_KEYS})\s*=")


def _lines_of_keys(text: str) -> dict[Location, int]:
    """The line on which each key or table first appears; good enough for messages (long strings may fool it)."""
    lines: dict[Location, int] = {}
    table: Location = ()
    for number, line in enumerate(text.split("\n"), start=1):
        if header := _HEADER.match(line):
            table = _parts(header[1])
            for length in range(1, len(table) + 1):
                lines.setdefault(table[:length], number)
        elif assignment := _ASSIGNMENT.match(line):
            lines.setdefault(table + _parts(assignment[1]), number)
    return lines


def _parts(written: str) -> Location:
    """`models."qwen3.5".path` as its parts."""
    try:
        level: Any = tomllib.loads(f"{written} = 0")
    except ValueError:
        return (written,)
    parts: list[str] = []
    while isinstance(level, dict):
        (key, level), *_ = level.items()
        parts.append(key)
    return tuple(parts)


def _manifest(document: Document, path: Path) -> Manifest:
    daemon, api = document.daemon, document.api
    return Manifest(
        daemon=DaemonSettings(
            max_memory=daemon.max_memory,
            hard_limit=daemon.hard_limit,
            min_available=daemon.min_available,
            poll_interval_s=daemon.poll_interval,
            policy=daemon.policy,
            prefill_memory_guard=daemon.prefill_memory_guard,
            drain_timeout_s=daemon.drain_timeout,
            load_timeout_s=daemon.load_timeout,
            park_deadline_s=daemon.park_deadline,
            fair_wait_s=daemon.fair_wait,
            stall_timeout_s=daemon.stall_timeout,
            prefill_chunk_tokens=daemon.prefill_chunk,
            max_batch=daemon.max_batch,
            max_waiting=daemon.max_waiting,
            prefix_cache=daemon.prefix_cache,
            restore=daemon.restore,
            keep_awake=daemon.keep_awake,
            log_level=daemon.log_level,
            log_max_size_bytes=daemon.log_max_size,
            log_backups=daemon.log_backups,
        ),
        api=ApiSettings(
            listen=api.listen,
            api_key=api.api_key,
            api_key_file=api.api_key_file,
            allow_origins=tuple(api.allow_origins),
            max_keep_alive_s=api.max_keep_alive,
        ),
        models={name: _model(name, table) for name, table in document.models.items()},
        path=str(path),
    )


def _model(name: str, table: ModelTable) -> ModelSettings:
    return ModelSettings(
        name=name,
        path=table.path,
        repo=table.repo,
        pin=table.pin,
        preload=table.preload,
        aliases=tuple(table.aliases),
        ttl_s=table.ttl,
        max_context=table.max_context,
    )
