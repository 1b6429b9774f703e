"""The commands by name, and where in a command line theirs stands; imports nothing, because each Tab asks it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

COMMANDS: Final = {
    "start": "daemon",
    "stop": "daemon",
    "restart": "daemon",
    "reload": "reload",
    "status": "status",
    "ps": "status",
    "models": "models",
    "find": "find",
    "add": "entries",
    "rm": "entries",
    "pull": "pull",
    "load": "models",
    "unload": "models",
    "pin": "models",
    "unpin": "models",
    "limit": "limit",
    "plan": "plan",
    "bench": "bench",
    "run": "run",
    "requests": "requests",
    "abort": "requests",
    "logs": "logs",
    "events": "events",
    "why": "why",
    "service": "service",
    "init": "manifest",
    "check": "manifest",
    "doctor": "doctor",
    "demo": "demo",
}
"""Each command and the module of `omlxd.cli` that has it: a function, or a group of commands, of the same name."""


def command_at(arguments: Sequence[str]) -> int:
    """Where the command stands: at the first word that is neither a global option nor the value of `--home`."""
    at = 0
    while at < len(arguments) and arguments[at].startswith("-"):
        at += 2 if arguments[at] == "--home" else 1
    return min(at, len(arguments))


def home_in(options: Sequence[str]) -> str | None:
    """The home that these global options name."""
    found = None
    for at, option in enumerate(options):
        if option == "--home":
            found = next(iter(options[at + 1 : at + 2]), found)
        elif option.startswith("--home="):
            found = option.removeprefix("--home=")
    return found
