"""A list of things to run by name: what `--list` says of it, and what the names on a command line choose."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import Protocol, TypeVar


class Named(Protocol):
    """One thing to run."""

    @property
    def name(self) -> str:
        """How it is asked for."""
        ...

    @property
    def what(self) -> str:
        """What it is, in one line."""
        ...


_N = TypeVar("_N", bound=Named)


def chosen(listed: Sequence[_N], names: Sequence[str]) -> list[_N]:
    """Those of these names in the list's order, all when there are none; KeyError for an unknown one.

    `this` stands for all whose names begin with `this-`, too.
    """
    wanted: set[str] = set()
    for name in names:
        these = {each.name for each in listed if each.name == name or each.name.startswith(f"{name}-")}
        if not these:
            raise KeyError(name)
        wanted |= these
    return [each for each in listed if each.name in wanted or not names]


def ask(parser: argparse.ArgumentParser, listed: Sequence[_N], kind: str) -> tuple[argparse.Namespace, list[_N]]:
    """Read the command line, and from now on end at SIGTERM like at an exception: daemons and models go, too.

    Exits after `--list`, and when there is no such `kind` of thing.
    """
    parser.add_argument("names", nargs="*", metavar="NAME", help="one of those that --list names; all by default")
    parser.add_argument("--list", action="store_true", help="say what there is")
    arguments = parser.parse_args()
    if arguments.list:
        for each in listed:
            print(f"{each.name:<16}{each.what}")
        sys.exit(0)
    try:
        wanted = chosen(listed, arguments.names)
    except KeyError as unknown:
        parser.error(f"there is no {kind} {unknown}; --list says what there is")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return arguments, wanted
