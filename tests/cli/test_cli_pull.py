"""`omlxd pull`: a download from a hub that breaks off, refuses, or is not there."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from omlxd.daemon.manifest_file import read_manifest
from tests.cli.conftest import Omlxd
from tests.cli.fake_hub import FakeHub
from tests.fakes.daemon import model_folder

MIB = 2**20
REPO = "org/some-model-4bit"


@pytest.fixture
def served(home: Path) -> Path:
    """What the hub has."""
    return model_folder(home / "served", 24 * MIB)


@pytest.fixture
def hub(served: Path) -> Iterator[FakeHub]:
    hub = FakeHub(REPO, served)
    yield hub
    hub.close()


@pytest.fixture
def away(home: Path, hub: FakeHub) -> dict[str, str]:
    """The variables that lead to this hub and to a cache of the test's own."""
    return {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(home / "hf"),
        "HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def _snapshot(home: Path) -> Path:
    return home / "hf" / "hub" / f"models--{REPO.replace('/', '--')}" / "snapshots"


def test_pull_fetches_a_model_and_adds_it(omlxd: Omlxd, home: Path, hub: FakeHub, away: dict[str, str]) -> None:
    (home / "served" / "README.md").write_text("# not needed")
    done = omlxd("pull", f"https://huggingface.co/{REPO}/tree/main", "--name", "some", "--ttl", "10m", **away)
    assert done.returncode == 0, done.stderr
    assert f"{REPO} is here: 24.0 MiB in {_snapshot(home)}" in done.stdout
    assert "added `some` (24.0 MiB, fp16, context 4096)" in done.stdout
    assert f"{REPO}: 24.0 MiB of 24.0 MiB in 3 files to fetch" in done.stderr
    assert read_manifest(home / "omlxd.toml").models["some"].repo == REPO
    assert "README.md" not in hub.downloads

    hub.downloads.clear()
    again = omlxd("pull", REPO, **away)
    assert (again.returncode, hub.downloads) == (0, [])
    assert f"{REPO} is here already" in again.stdout
    assert REPO in omlxd("find", **away).stdout


def test_a_broken_connection_is_taken_up_where_it_broke(
    omlxd: Omlxd, home: Path, served: Path, hub: FakeHub, away: dict[str, str]
) -> None:
    hub.break_after, hub.breaks = 12 * MIB, 1  # the client writes 10 MiB at a time
    done = omlxd("pull", REPO, **away)
    assert done.returncode == 0, done.stderr
    assert hub.ranges == [None, f"bytes={10 * MIB}-"]
    fetched = next(_snapshot(home).glob("*/model.safetensors"))
    assert fetched.read_bytes() == (served / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("refuse", "status", "message", "hint"),
    [
        ((404, "RepoNotFound"), 4, f"has no model `{REPO}`", "check the name at"),
        ((401, "RepoNotFound"), 4, f"has no model `{REPO}`", "`hf auth login`"),
        ((403, "GatedRepo"), 77, "shown only to those who accepted its terms", "accept them at"),
        ((500, ""), 1, "answered 500", "goes on with the files that are missing"),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, tuple) else "",
)
def test_what_the_hub_refuses_is_told_with_the_way_out(
    omlxd: Omlxd,
    home: Path,
    hub: FakeHub,
    away: dict[str, str],
    refuse: tuple[int, str],
    status: int,
    message: str,
    hint: str,
) -> None:
    hub.refuse = refuse
    done = omlxd("pull", REPO, "--name", "some", **away)
    assert (done.returncode, done.stdout) == (status, "")
    assert message in done.stderr
    assert f"hint: {hint}" in done.stderr or hint in done.stderr.partition("hint: ")[2]
    assert "Traceback" not in done.stderr
    assert not (home / "omlxd.toml").exists()


def test_offline_and_without_a_network_it_says_so(omlxd_process: Omlxd, away: dict[str, str], hub: FakeHub) -> None:
    offline = omlxd_process("pull", REPO, **away, HF_HUB_OFFLINE="1")
    assert offline.returncode == 1
    assert "`HF_HUB_OFFLINE` forbids" in offline.stderr
    nobody = omlxd_process("pull", REPO, **away | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert nobody.returncode == 1
    assert "error: http://127.0.0.1:9 could not be reached" in nobody.stderr
    assert "hint: check the network" in nobody.stderr


def test_what_cannot_run_is_refused_before_its_weights_come(
    omlxd: Omlxd, home: Path, served: Path, hub: FakeHub, away: dict[str, str]
) -> None:
    (home / "omlxd.toml").write_text('[daemon]\nmax_memory = "2M"\n')
    too_large = omlxd("pull", REPO, **away)
    assert too_large.returncode == 5
    assert "take 24.0 MiB, the limit is 2.00 MiB (max_memory)" in too_large.stderr
    config = json.loads((served / "config.json").read_text())
    (served / "config.json").write_text(json.dumps(config | {"model_type": "telepathy"}))
    unknown = omlxd("pull", REPO, "--force", **away)
    assert unknown.returncode == 1
    assert "model type `telepathy`" in unknown.stderr
    assert hub.ranges == []


@pytest.mark.parametrize("repo", ["model", "org/", "../etc", "org/na me", "https://huggingface.co/"])
def test_what_names_no_repository_is_a_usage_error(omlxd: Omlxd, repo: str) -> None:
    done = omlxd("pull", repo)
    assert done.returncode == 2
    assert "is not the name of a model on the hub" in done.stderr


def test_ctrl_c_ends_a_download_at_once_and_the_next_one_goes_on(
    home: Path, hub: FakeHub, away: dict[str, str], environment: dict[str, str], omlxd: Omlxd
) -> None:
    hub.break_after = MIB
    with subprocess.Popen(
        [sys.executable, "-m", "omlxd", "pull", REPO],
        env=environment | away,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        while "Trying to resume" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert f"`omlxd pull {REPO}` goes on with the files that are missing" in stderr
    assert list(home.glob("hf/hub/models--*/blobs/*.incomplete")) == []
    hub.break_after = None
    hub.downloads.clear()
    assert omlxd("pull", REPO, **away).returncode == 0
    assert "config.json" not in hub.downloads
    assert "model.safetensors" in hub.downloads
