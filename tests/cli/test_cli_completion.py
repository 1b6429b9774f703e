"""Completion of model names: from the daemon, else from the manifest, else nothing; never an error on the prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Omlxd
from tests.cli.fake_daemon import FakeDaemon


def _completed(omlxd: Omlxd, words: str) -> list[str]:
    done = omlxd(_OMLXD_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(len(words.split(" ")) - 1))
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize("command", ["load", "unload", "pin", "unpin", "run", "why", "logs --model"])
def test_names_and_aliases_come_from_the_daemon(omlxd: Omlxd, fake: FakeDaemon, command: str) -> None:
    assert _completed(omlxd, f"omlxd {command} ") == ["[red]broken[/red]", "big", "chat", "default", "small"]
    assert _completed(omlxd, f"omlxd {command} s") == ["small"]


def test_without_a_daemon_they_come_from_the_manifest(omlxd: Omlxd, home: Path) -> None:
    (home / "omlxd.toml").write_text("[models.one]\n[models.other]\n[models.two]\n")
    assert _completed(omlxd, "omlxd run o") == ["one", "other"]
    assert _completed(omlxd, f"omlxd --home {home} run t") == ["two"]


@pytest.mark.parametrize("text", ["= broken", "models = 3", ""])
def test_a_manifest_that_cannot_be_read_completes_nothing(omlxd: Omlxd, home: Path, text: str) -> None:
    (home / "omlxd.toml").write_text(text)
    assert _completed(omlxd, "omlxd run ") == []
