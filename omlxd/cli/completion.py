"""Completion of model names: the daemon is asked, briefly; else the manifest is read, unchecked."""

from __future__ import annotations

import tomllib
from typing import Final

import typer

from omlxd.cli.client import Client
from omlxd.cli.invocation import home_of
from omlxd.core.errors import OmlxError

LONGEST_WAIT_S: Final = 0.15


def model_names(context: typer.Context, incomplete: str) -> list[str]:
    """Names and aliases that begin with what was typed; never an error."""
    home = home_of(context)
    try:
        answer = Client(home.socket).get("/v1/control/models", timeout_s=LONGEST_WAIT_S)
        names = [name for model in answer["models"] for name in (model["name"], *model["aliases"])]
    except (OmlxError, KeyError, OSError):
        try:
            models = tomllib.loads(home.manifest.read_text("utf-8")).get("models")
        except (OSError, ValueError):
            models = None
        names = list(models) if isinstance(models, dict) else []
    return sorted(name for name in names if name.startswith(incomplete))
