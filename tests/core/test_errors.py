"""The tree of errors: every class has a code and a next step of its own, and what hints tell to type exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import omlxd
from omlxd.cli.command_names import COMMANDS
from omlxd.cli.main import build
from omlxd.core import errors
from omlxd.core.errors import OmlxError, from_json
from omlxd.daemon import http_errors

SOURCES = sorted(Path(omlxd.__file__).parent.rglob("*.py"))
ROOT: Any = typer.main.get_command(build())
GLOBAL_OPTIONS = {"--home", "--debug", "--help", "--version"}


def _kinds(kind: type[OmlxError]) -> Iterator[type[OmlxError]]:
    if kind.__module__ in (errors.__name__, http_errors.__name__):
        yield kind
    for child in kind.__subclasses__():
        yield from _kinds(child)


KINDS = list(_kinds(OmlxError))
kind_of = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@kind_of
def test_every_error_says_what_to_do_next_even_when_whoever_raised_it_did_not(kind: type[OmlxError]) -> None:
    error = kind("it is so")
    assert error.hint == kind.remedy
    assert re.search(r"`[^`]+`|\b(send|shorten|try|correct|choose)\b", error.hint)
    assert not error.hint.endswith(".")
    assert kind("it is so", hint="do this").hint == "do this"


@kind_of
def test_every_error_crosses_the_socket_as_it_is(kind: type[OmlxError]) -> None:
    again = from_json(kind("it is so", hint="do this", details={"bytes": 3}).to_json())
    assert (type(again), again.message, again.hint) == (kind, "it is so", "do this")
    assert again.details["bytes"] == 3
    assert from_json(kind("it is so").to_json() | {"hint": None}).hint == kind.remedy


def test_no_two_errors_share_a_code_and_those_of_the_command_line_have_remedies_of_their_own() -> None:
    assert len({kind.code for kind in KINDS}) == len(KINDS)
    own = [kind for kind in KINDS if kind.__module__ == errors.__name__]
    assert all("remedy" in vars(kind) for kind in own)


def _told() -> Iterator[tuple[str, list[str]]]:
    """Each `omlxd ...` in backticks of the sources, in words, with the place."""
    for path in SOURCES:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            for found in re.findall(r"`omlxd (?!answers)([^`]*)`", line):
                words = re.sub(r"\{[^}]*\}", "X", found).replace("'", '"').split()
                yield f"{path.name}:{number}", words


def test_every_command_and_option_that_a_message_tells_to_type_exists() -> None:
    told = list(_told())
    assert len(told) > 100
    for place, words in told:
        words = [word for word in words if word not in GLOBAL_OPTIONS and not word.startswith(("--home", "--ex"))]
        command = next((word for word in words if re.fullmatch(r"[a-z]+", word)), None)
        if command is None:
            continue  # `omlxd X --help`, `omlxd --debug ...`
        assert command in COMMANDS, place
        known = ROOT.commands[command]
        nested = [known, *getattr(known, "commands", {}).values()]
        options = {option for each in nested for parameter in each.params for option in parameter.opts}
        for word in words:
            assert not word.startswith("-") or word.partition("=")[0] in options | {"-"}, (place, word)
