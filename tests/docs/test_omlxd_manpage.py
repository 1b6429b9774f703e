"""omlxd(1) against the code: every command, option, exit status, event, file and variable, and clean mdoc."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from omlxd.cli.main import INTERRUPTED, build
from omlxd.core import errors
from omlxd.core.errors import OmlxError
from omlxd.core.events import EventName
from omlxd.daemon.home import HOME_VARIABLE, Home

PAGE = Path(__file__).parents[2] / "man" / "omlxd.1"
TEXT = PAGE.read_text()
ROOT: Any = typer.main.get_command(build())


def section(title: str) -> str:
    """The source between `.Sh TITLE` and the next section."""
    return TEXT.partition(f".Sh {title}\n")[2].partition("\n.Sh ")[0]


def entry(command: str) -> str:
    """What the page says about a command: from its item to the next item that is one."""
    following = "|".join(re.escape(name) for name in ROOT.commands)
    found = re.search(rf"^\.It Ic {command}\b.*?(?=^\.It Ic (?:{following})\b|^\.S[hs] )", TEXT, re.M | re.S)
    assert found is not None, f"omlxd.1 does not describe `{command}`"
    return found[0]


def _parameters() -> Iterator[tuple[str, str]]:
    """Each option with its command; those of a group's actions are the group's, and each is told once."""
    for name, command in {"": ROOT, **ROOT.commands}.items():
        actions = getattr(command, "commands", {}).values() if name else ()
        parameters = [parameter for each in (command, *actions) for parameter in each.params]
        options = (option for parameter in parameters for option in parameter.opts if option.startswith("-"))
        yield from dict.fromkeys((name, option) for option in options)


@pytest.mark.parametrize("command", ROOT.commands)
def test_every_command_has_an_entry(command: str) -> None:
    assert len(entry(command).splitlines()) >= 2


def test_no_command_is_described_that_does_not_exist() -> None:
    described = re.findall(r"^\.It Ic (\w+)", section("DESCRIPTION"), re.M)
    assert sorted(described) == sorted(ROOT.commands)


def test_every_action_of_a_group_is_described_and_no_other() -> None:
    for name, command in ROOT.commands.items():
        if actions := getattr(command, "commands", {}):
            assert re.findall(r"^\.It Cm (\w+)$", entry(name), re.M) == list(actions)


@pytest.mark.parametrize(("command", "option"), list(_parameters()))
def test_every_option_is_in_its_commands_entry(command: str, option: str) -> None:
    # `ps` is described as being `status`
    text = entry("status" if command == "ps" else command) if command else section("DESCRIPTION")
    assert re.search(rf"(Fl|\|) {re.escape(option[1:])}\b", text)


@pytest.mark.parametrize("command", [name for name in ROOT.commands if name != "ps"])
def test_no_option_is_described_that_does_not_exist(command: str) -> None:
    known = {option for name, option in _parameters() if name == command}
    head = entry(command).partition("\n")[0]
    described = {f"-{name}" for name in re.findall(r"(?:Fl|\|) (-?[\w-]+)", head)}
    assert described <= known


def _kinds(kind: type[OmlxError]) -> list[type[OmlxError]]:
    return [kind, *(each for child in kind.__subclasses__() for each in _kinds(child))]


def test_every_exit_status_is_listed_and_no_other() -> None:
    statuses = {kind.exit_status for kind in _kinds(OmlxError) if kind.__module__ == errors.__name__}
    listed = [int(number) for number in re.findall(r"^\.It (\d+)$", section("EXIT STATUS"), re.M)]
    assert listed == sorted(statuses | {0, INTERRUPTED})


def test_every_event_is_listed_in_order_and_no_other() -> None:
    assert re.findall(r"^\.It Sy (\w+)$", section("EVENTS"), re.M) == [event.value for event in EventName]


def test_every_file_of_a_home_is_listed() -> None:
    home = Home(Path("/home"))
    for path in (home.manifest, home.state, home.socket, home.lock, home.log, home.daemon_err):
        assert f".It Pa {path.relative_to(home.root)}\n" in section("FILES")


def test_the_environment_is_listed() -> None:
    for variable in (HOME_VARIABLE, "NO_COLOR", "COLUMNS", "TERM"):
        assert f".It Ev {variable}\n" in section("ENVIRONMENT")


def test_the_examples_are_commands_that_exist() -> None:
    for command in re.findall(r"^(?:\.Dl )?omlxd (\w+)", section("EXAMPLES"), re.M):
        assert command in ROOT.commands


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="needs mandoc")
def test_the_page_is_clean_mdoc() -> None:
    linted = subprocess.run(["mandoc", "-T", "lint", str(PAGE)], capture_output=True, text=True, timeout=30)
    # Whether the other pages are installed here says nothing about this one.
    elsewhere = ("referenced manual not found", "outdated mandoc.db")
    assert [line for line in linted.stdout.splitlines() if not any(words in line for words in elsewhere)] == []
