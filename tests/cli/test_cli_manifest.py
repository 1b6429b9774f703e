"""`omlxd init` and `omlxd check`."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from omlxd.core.manifest_template import default_manifest_text
from tests.cli.conftest import Omlxd


def _write(home: Path, *models: tuple[str, Path, str], max_memory: str = '"8G"') -> None:
    tables = [f'[models.{name}]\npath = "{path}"\n{more}\n' for name, path, more in models]
    (home / "omlxd.toml").write_text(f"[daemon]\nmax_memory = {max_memory}\n" + "\n".join(tables))


def test_init_writes_a_private_manifest_that_check_accepts(omlxd: Omlxd, home: Path) -> None:
    done = omlxd("init")
    assert (done.returncode, done.stdout) == (0, f"wrote {home / 'omlxd.toml'}\n")
    assert (home / "omlxd.toml").read_text() == default_manifest_text()
    assert stat.S_IMODE((home / "omlxd.toml").stat().st_mode) == 0o600
    assert omlxd("check").returncode == 0


def test_init_makes_the_home(omlxd: Omlxd, home: Path) -> None:
    assert omlxd("init", OMLXD_HOME=str(home / "new" / "home")).returncode == 0
    assert stat.S_IMODE((home / "new" / "home").stat().st_mode) == 0o700


def test_init_never_overwrites_unless_told_to(omlxd: Omlxd, home: Path) -> None:
    (home / "omlxd.toml").write_text("mine")
    refused = omlxd("init")
    assert refused.returncode == 2
    assert "is there already" in refused.stderr
    assert (home / "omlxd.toml").read_text() == "mine"
    assert omlxd("init", "--force").returncode == 0
    assert (home / "omlxd.toml").read_text() == default_manifest_text()


def test_init_where_nothing_can_be_written_says_so(omlxd: Omlxd, home: Path) -> None:
    done = omlxd("init", "--manifest", str(home / "missing" / "omlxd.toml"))
    assert done.returncode == 1
    assert "cannot be written" in done.stderr


def test_check_without_a_manifest_points_to_init(omlxd: Omlxd, home: Path) -> None:
    done = omlxd("check")
    assert done.returncode == 78
    path = home / "omlxd.toml"
    assert done.stderr == f"error: the manifest `{path}` does not exist\nhint: `omlxd init` writes one\n"
    told = json.loads(omlxd("check", "--json").stdout)
    assert told["problems"] == [f"the manifest `{path}` does not exist"]


def test_check_lists_all_problems_at_once(omlxd: Omlxd, home: Path) -> None:
    (home / "omlxd.toml").write_text('[daemon]\nmax_memroy = "8G"\npoll_interval = "soon"\n[models.a]\npin = 3\n')
    done = omlxd("check")
    assert (done.returncode, done.stdout) == (78, "")
    for key in ("max_memroy", "poll_interval", "models.a"):
        assert f"  {'daemon.' if key[0] != 'm' or 'memroy' in key else ''}{key}" in done.stderr
    as_json = omlxd("check", "--json")
    assert as_json.returncode == 78
    assert len(json.loads(as_json.stdout)["problems"]) >= 3


def test_check_looks_at_the_files_of_the_tables_that_are_well_beside_those_that_are_not(
    omlxd: Omlxd, home: Path, tiny_model: Callable[..., Path]
) -> None:
    _write(home, ("t1", tiny_model(), "pin = 3"), ("t2", Path("/nonexistent"), ""), ("t3", tiny_model(), ""))
    done = omlxd("check")
    assert done.returncode == 78
    assert "has 2 problems" in done.stderr
    assert "models.t1.pin: must be `true` or `false`" in done.stderr
    assert "models.t2.path: " in done.stderr
    assert "/nonexistent" in done.stderr
    assert "(line 8)" in done.stderr
    assert "t3" not in done.stderr
    assert len(json.loads(omlxd("check", "--json").stdout)["problems"]) == 2


def test_check_tells_what_each_model_is(omlxd: Omlxd, home: Path, tiny_model: Callable[..., Path]) -> None:
    _write(home, ("tiny", tiny_model(), "pin = true"))
    done = omlxd("check", COLUMNS="200")
    assert (done.returncode, done.stderr) == (0, "")
    row = done.stdout.splitlines()[2].split()
    assert row[:2] == ["tiny", "ok"]
    assert {"llama", "32768", "pinned"} <= set(row)
    model = json.loads(omlxd("check", "--json").stdout)["models"][0]
    assert (model["name"], model["pinned"], model["model_type"], model["problems"]) == ("tiny", True, "llama", [])
    assert 900_000 < model["weights_bytes"] < 1_100_000


def test_check_finds_the_folder_that_is_missing(omlxd: Omlxd, home: Path, tiny_model: Callable[..., Path]) -> None:
    _write(home, ("gone", home / "nowhere", ""), ("tiny", tiny_model(), ""))
    done = omlxd("check")
    assert done.returncode == 1
    assert "error: `gone` cannot be loaded" in done.stderr
    assert "  gone: " in done.stdout


@pytest.mark.parametrize(
    ("first", "second", "limit_bytes", "status", "said"),
    [
        ("pin = true", "", 500_000, 78, "the pinned model `a` is larger than the limit"),
        ("pin = true", "pin = true", 1_500_000, 5, "the pinned models together take"),
        ("", "", 500_000, 5, "can never fit"),
        ("pin = true", "", 1_500_000, 0, ""),
        ("pin = true", "pin = true", 0, 0, ""),
    ],
    ids=["pin-alone-too-large", "pins-together-too-large", "never-fits", "fits-one-at-a-time", "no-limit"],
)
def test_check_holds_the_models_against_the_limit(
    omlxd: Omlxd,
    home: Path,
    tiny_model: Callable[..., Path],
    first: str,
    second: str,
    limit_bytes: int,
    status: int,
    said: str,
) -> None:
    _write(home, ("a", tiny_model(), first), ("b", tiny_model(), second), max_memory=f'"{limit_bytes}B"')
    done = omlxd("check")
    assert done.returncode == status
    assert said in done.stderr


@pytest.mark.parametrize("manifest_said", ["200M", "300M"], ids=["holds", "outdated"])
def test_check_tells_of_the_limit_that_holds_instead_of_the_manifests(
    omlxd: Omlxd, home: Path, tiny_model: Callable[..., Path], manifest_said: str
) -> None:
    _write(home, ("a", tiny_model(), ""), max_memory='"200M"')
    saved = f'schema = 1\n[limit]\nmax_memory = "150M"\nmanifest_max_memory = "{manifest_said}"\n'
    (home / "state.toml").write_text(saved)
    told = "the next start keeps the limit `150M`, set by `omlxd limit`; the manifest says `200M`\n"
    assert (told in omlxd("check").stderr) is (manifest_said == "200M")
    assert json.loads(omlxd("check", "--json").stdout)["saved_limit"] == ("150M" if manifest_said == "200M" else None)


@pytest.mark.parametrize("outdated", [False, True])
def test_check_tells_of_the_pins_that_hold_instead_of_the_manifests(
    omlxd: Omlxd, home: Path, tiny_model: Callable[..., Path], outdated: bool
) -> None:
    folder = tiny_model()
    _write(home, ("a", folder, "pin = true"), ("b", folder, ""), max_memory='"200M"')
    pins = {"a": (False, not outdated), "b": (True, outdated)}
    tables = [f"[pins.{name}]\npinned = {now}\nmanifest_pinned = {then}\n" for name, (now, then) in pins.items()]
    (home / "state.toml").write_text("schema = 1\n" + "".join(tables).lower())
    told = (
        "the next start keeps `a` unpinned by `omlxd unpin`, `b` pinned by `omlxd pin`; the manifest says otherwise\n"
    )
    assert omlxd("check").stderr == ("" if outdated else told)
    assert json.loads(omlxd("check", "--json").stdout)["saved_pins"] == ({} if outdated else {"a": False, "b": True})
