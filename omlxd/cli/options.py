"""Options and arguments that several commands share, so that they read and complete the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from omlxd.cli.completion import model_names

Json = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A name or alias of the manifest.", autocompletion=model_names)
]
Models = Annotated[
    list[str],
    typer.Argument(metavar="MODEL...", help="Names or aliases of the manifest.", autocompletion=model_names),
]
Force = Annotated[bool, typer.Option("--force", help="Even when pinned models would be above the limit.")]
# Not `readable`: whoever reads it says what is wrong with it, and with which status.
ManifestFile = Annotated[
    Path | None,
    typer.Option("--manifest", metavar="FILE", readable=False, help="Default: omlxd.toml at home."),
]
