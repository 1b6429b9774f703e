"""The models that can be named, from the daemon or the manifest: unchecked, for completion and without a daemon."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from typing import Final

from omlxd.core.errors import OmlxError, UnknownModel
from omlxd.core.wording import nearest, shown
from omlxd.daemon.home import Home

LONGEST_WAIT_S: Final = 0.15


def known_names(home: Home) -> list[str]:
    """Names and aliases to choose from, in order: the daemon's, asked briefly, else the manifest's; never an error."""
    from omlxd.cli.client import Client  # 10 ms of h11, which options' completion does not need

    try:
        answer = Client(home.socket).get("/v1/control/models", timeout_s=LONGEST_WAIT_S)
        return sorted(name for model in answer["models"] for name in (model["name"], *model["aliases"]))
    except (OmlxError, KeyError, TypeError, OSError):
        return sorted(names_by_alias(home))


def names_by_alias(home: Home) -> dict[str, str]:
    """Each name and alias of the manifest with the model's name; empty when it cannot be read."""
    try:
        models = tomllib.loads(home.manifest.read_text("utf-8")).get("models")
    except (OSError, ValueError):
        return {}
    found: dict[str, str] = {}
    for name, settings in models.items() if isinstance(models, dict) else ():
        aliases = settings.get("aliases") if isinstance(settings, dict) else None
        found |= {alias: name for alias in aliases if isinstance(alias, str)} if isinstance(aliases, list) else {}
        found[name] = name
    return found


def resolve_model(home: Home, name: str) -> str:
    """The model's own name for a name or alias; one that the manifest does not have is taken as it is."""
    return names_by_alias(home).get(name, name)


def unknown_model(name: str, known: Iterable[str]) -> UnknownModel:
    """Neither the manifest nor the log has such a model; the hint is the nearest name."""
    near = nearest(name, known)
    hint = f"did you mean `{near}`?" if near else "`omlxd models` lists the models"
    if name.isdecimal():
        hint = f"did you mean the request `r{name}` or the decision `d{name}`?"
    return UnknownModel(f"neither the manifest nor the log has a model `{shown(name)}`", hint=hint)
