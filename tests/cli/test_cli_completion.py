"""Tab in real shells, and what stands behind it: names from the daemon or the manifest, options, nothing heavy."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
import pytest
import typer

from omlxd.cli.command_names import COMMANDS
from omlxd.cli.main import build
from omlxd.cli.shell_completion import FIRST_IS_A_MODEL, VARIABLE, answer
from tests.cli.fake_daemon import STATUS, FakeDaemon, as_json, model_json

Completed = Callable[..., list[str]]
ROOT: Any = typer.main.get_command(build())


@pytest.fixture
def completed(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Completed:
    """What is offered, asked as the script for bash asks: the words a line each."""
    monkeypatch.setenv("OMLXD_HOME", environment["OMLXD_HOME"])

    def offered(*words: str) -> list[str]:
        typed = {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
        assert answer({VARIABLE: "complete_bash", **typed}) == 0
        written = capsys.readouterr()
        assert written.err == ""
        return written.out.splitlines()

    return offered


@pytest.mark.parametrize("command", sorted(FIRST_IS_A_MODEL))
def test_a_command_whose_first_word_is_answered_as_a_model_takes_one(command: str) -> None:
    first = next(each for each in ROOT.commands[command].params if each.param_type_name == "argument")
    assert first.name in ("model", "models", "name")


@pytest.mark.parametrize("words", ["load", "run", "why", "logs --model", "plan chat", "load --pin", "unpin big"])
def test_names_and_aliases_come_from_the_daemon(completed: Completed, fake: FakeDaemon, words: str) -> None:
    assert completed("omlxd", *words.split(), "") == ["[red]broken[/red]", "big", "chat", "default", "small"]
    assert completed("omlxd", *words.split(), "s") == ["small"]


def test_without_a_daemon_they_come_from_the_manifest(completed: Completed, home: Path) -> None:
    (home / "omlxd.toml").write_text('[models.one]\naliases = ["oh"]\n[models.other]\n[models.two]\n')
    assert completed("omlxd", "run", "o") == ["oh", "one", "other"]
    assert completed("omlxd", "--home", str(home), "run", "t") == ["two"]


@pytest.mark.parametrize("text", ["= broken", "models = 3", ""])
def test_a_manifest_that_cannot_be_read_completes_nothing(completed: Completed, home: Path, text: str) -> None:
    (home / "omlxd.toml").write_text(text)
    assert completed("omlxd", "run", "") == []


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["req"], ["requests"]),
        (["--home", "/x", "st"], ["start", "stop", "status"]),
        (["--v"], ["--version"]),
        (["run", "chat", "--t"], ["--temperature", "--top-p"]),
        (["logs", "--level", "w"], ["warning"]),
        (["start", "--policy", ""], ["graceful", "reference"]),
        (["service", "u"], ["uninstall"]),
        (["service", "install", "--e"], ["--env"]),
        (["run", "chat", "--max-tokens", ""], []),
        (["run", "chat", "hello", ""], []),
        (["unload", "chat", "small", "--n"], ["--now"]),
        (["nothing", ""], []),
        (["--home", ""], []),
    ],
    ids=lambda value: " ".join(value),
)
def test_commands_actions_options_and_their_values(completed: Completed, words: list[str], found: list[str]) -> None:
    assert completed("omlxd", *words) == found


def test_every_command_completes_its_options(completed: Completed) -> None:
    for name in ("load", "find", "pull"):
        options = {option for each in ROOT.commands[name].params for option in each.opts if option[:2] == "--"}
        assert set(completed("omlxd", name, "--")) == options | {"--help"}
    assert completed("omlxd", "") == list(COMMANDS)


PROBE = """
import sys
from omlxd.cli.entry import main
try:
    main()
except SystemExit:
    sys.stderr.write(",".join(sys.modules))
"""


@pytest.mark.parametrize(
    ("words", "without"),
    [("omlxd\nr", "typer http"), ("omlxd\nrun\n", "typer"), ("omlxd\nrun\nchat\n--", "omlxd.cli.render")],
)
def test_a_tab_imports_nothing_heavy(fake: FakeDaemon, environment: dict[str, str], words: str, without: str) -> None:
    tab = {"_OMLXD_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count("\n"))}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment | tab, capture_output=True, text=True, timeout=60
    )
    heavy = {"rich", "pydantic", "asyncio", "psutil", "mlx", "prompt_toolkit", "tomlkit", "huggingface_hub"}
    assert done.stdout
    assert not set(done.stderr.split(",")) & (heavy | set(without.split()))


@pytest.fixture
def in_shell(environment: dict[str, str], fake: FakeDaemon, tmp_path: Path) -> dict[str, str]:
    """The environment of a shell that finds `omlxd`, and a daemon that has a model with a colon in its name."""
    views = [model_json(each) for each in STATUS.models if each.name in ("chat", "small")]
    fake.routes["GET /v1/control/models"] = as_json({"schema": 1, "models": [*views, views[0] | {"name": "qwen:8b"}]})
    command = tmp_path / "bin" / "omlxd"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m omlxd "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join([str(command.parent), environment["PATH"]])
    return environment | {"PATH": path, "HOME": str(tmp_path), "TERM": "xterm", "PS1": "$ "}


def _script(shell: str, environment: dict[str, str], folder: Path) -> Path:
    done = subprocess.run(
        ["omlxd", "--show-completion", shell],
        env=environment | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    path = folder / f"omlxd.{shell}"
    path.write_text(done.stdout)
    return path


def _type(shell: Any, text: str, shown: str) -> None:
    shell.send(text + "\t")
    shell.expect(shown)
    shell.sendcontrol("u")


@pytest.mark.parametrize(
    ("shell", "options", "begin"),
    [
        ("bash", ["--norc", "--noprofile", "-i"], "source {script}; PS1='re''ady> '"),
        ("zsh", ["-f", "-i"], "autoload -Uz compinit; compinit -u; source {script}; PS1='re''ady> '"),
    ],
    ids=["bash", "zsh"],
)
def test_tab_completes_in_a_shell_on_a_terminal(
    in_shell: dict[str, str], tmp_path: Path, shell: str, options: list[str], begin: str
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = _script(shell, in_shell, tmp_path)
    terminal = pexpect.spawn(shell, options, env=in_shell, encoding="utf-8", timeout=30, dimensions=(24, 200))
    terminal.sendline(begin.format(script=script))
    terminal.expect("ready> ")
    _type(terminal, "omlxd run sm", "run small")
    _type(terminal, "omlxd resta", "omlxd restart")
    _type(terminal, "omlxd run chat --temp", "--temperature")
    _type(terminal, "omlxd run qw", re.escape("qwen") + r"\\?:8b")
    _type(terminal, "omlxd run qwen:8", re.escape("qwen") + r"\\?:8b")
    terminal.close(force=True)


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_is_offered_names_and_options_with_what_they_mean(in_shell: dict[str, str], tmp_path: Path) -> None:
    script = _script("fish", in_shell, tmp_path)

    def offered(line: str) -> list[str]:
        asked = f"source {script}; complete -C '{line}'"
        done = subprocess.run(
            ["fish", "--no-config", "-c", asked], env=in_shell, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout.splitlines()

    assert offered("omlxd run q") == ["qwen:8b"]
    assert offered("omlxd resta") == ["restart"]
    assert offered("omlxd run chat --se") == ["--seed\tMakes sampling repeatable."]
