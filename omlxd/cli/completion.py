"""Completion of model names, as Typer asks for it."""

from __future__ import annotations

import typer

from omlxd.cli.invocation import home_of
from omlxd.cli.known_models import known_names


def model_names(context: typer.Context, incomplete: str) -> list[str]:
    """Names and aliases that begin with what was typed; never an error."""
    return [name for name in known_names(home_of(context)) if name.startswith(incomplete)]
