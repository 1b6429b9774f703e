"""What is wrong with a manifest that one value alone does not show."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from omlxd.core.errors import InvalidRequest
from omlxd.core.manifest import AUTO, NAME_RULE, is_model_name, parse_listen
from omlxd.core.units import parse_size
from omlxd.core.wording import nearest, shown
from omlxd.daemon.api_key import KEY_VARIABLE
from omlxd.daemon.manifest_schema import ModelTable, keys_of
from omlxd.daemon.manifest_source import Finding


def cross_findings(raw: Mapping[str, Any]) -> Iterator[Finding]:
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
