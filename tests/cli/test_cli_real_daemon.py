"""The command line and the real daemon together: a first session with a tiny model, and the demo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from omlxd.cli.holder import is_held
from tests.cli.conftest import Omlxd


@pytest.fixture
def manifest(home: Path, omlxd_process: Omlxd, tiny_model: Callable[..., Path]) -> Iterator[Path]:
    """A manifest with two tiny models; whatever daemon the test starts ends with it."""
    path = home / "omlxd.toml"
    folder = tiny_model()
    path.write_text(
        f'[api]\nlisten = "off"\n[models.tiny]\npath = "{folder}"\naliases = ["t"]\n[models.other]\npath = "{folder}"\n'
    )
    yield path
    if is_held(home / "omlxd.lock"):
        omlxd_process("stop", "--now")
    assert not is_held(home / "omlxd.lock")


@pytest.mark.mlx
def test_a_first_session(omlxd_process: Omlxd, manifest: Path) -> None:
    started = omlxd_process("start", "--max-memory", "512M")
    assert (started.returncode, started.stderr) == (0, "")
    assert started.stdout.startswith("omlxd answers: pid ")
    assert "limit 512 MiB" in started.stdout

    again = omlxd_process("start")
    assert again.returncode == 1
    assert "is already running" in again.stderr

    answer = omlxd_process("run", "t", "hello", "--max-tokens", "8", "--json")
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert (found["model"], found["finish_reason"], found["generated_tokens"]) == ("tiny", "length", 8)
    assert omlxd_process("run", "tiny", "hello", "--max-tokens", "8").stdout == found["text"] + "\n"

    assert omlxd_process("load", "other", "--pin").stdout.startswith("loaded `other` in ")
    assert {"tiny", "other", "loaded", "pinned"} <= set(omlxd_process("status").stdout.split())
    status = json.loads(omlxd_process("status", "--json").stdout)
    assert [model["state"] for model in status["models"]] == ["loaded", "loaded"]

    refused = omlxd_process("limit", "500K")
    assert (refused.returncode, refused.stdout) == (5, "")
    lowered = omlxd_process("limit", "1500K")
    assert (lowered.returncode, lowered.stderr) == (0, "unloaded `tiny`\n")
    assert lowered.stdout.startswith("limit 1.46 MiB (omlxd limit)")
    assert "unloaded `tiny`" in omlxd_process("logs").stdout

    assert omlxd_process("run", "tyni", "hello").returncode == 4
    assert omlxd_process("unload", "other").stdout.startswith("unloaded `other` (")
    stopped = omlxd_process("stop")
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert omlxd_process("status").returncode == 3


@pytest.mark.mlx
@pytest.mark.slow
def test_why_says_who_evicted_a_model_for_whom_and_events_go_on_also_after_a_kill_and_a_restart(
    omlxd_process: Omlxd, home: Path, manifest: Path, environment: dict[str, str]
) -> None:
    text = manifest.read_text()
    manifest.write_text(f'[daemon]\nmax_memory = "2M"\n{text}')  # room for one of the two
    assert omlxd_process("start").returncode == 0
    with subprocess.Popen(
        [sys.executable, "-m", "omlxd", "events", "--json", "-n", "1000"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as events:
        assert events.stdout is not None
        names = [json.loads(events.stdout.readline())["event"]]
        assert omlxd_process("run", "tiny", "hello", "--max-tokens", "4").returncode == 0
        assert omlxd_process("run", "other", "hello", "--max-tokens", "4").returncode == 0

        said = " ".join(omlxd_process("why", "tiny").stdout.split())
        assert said.startswith("`tiny` is not loaded: it was unloaded at ")
        assert "by d1 to make room for `other`, for r2" in said
        assert "chosen: idle and least recently used" in said
        assert "no request was ended" in said

        os.kill(int((home / "omlxd.lock").read_text()), signal.SIGKILL)
        assert omlxd_process("start").returncode == 0
        while names.count("daemon_ready") < 2:
            names.append(json.loads(events.stdout.readline())["event"])
        events.terminate()
        events.communicate(timeout=30)
    assert names[0] == "daemon_starting"
    assert names[names.index("gap") + 1] == "daemon_starting"

    again = " ".join(omlxd_process("why", "tiny").stdout.split())
    assert again.startswith("`tiny` has not been loaded since the daemon started at ")
    assert "ended without a word" in again
    assert "by d1 to make room for `other`, for r2" in again
    assert "to `other` ended well" in omlxd_process("why", "r2").stdout


@pytest.mark.mlx
def test_restart_is_another_process(omlxd_process: Omlxd, manifest: Path) -> None:
    omlxd_process("start")
    first = json.loads(omlxd_process("status", "--json").stdout)["pid"]
    done = omlxd_process("restart", "--now", "--max-memory", "1G")
    assert "limit 1.00 GiB" in done.stdout
    assert json.loads(omlxd_process("status", "--json").stdout)["pid"] != first


def test_a_bad_manifest_is_told_by_start_with_all_its_problems(omlxd_process: Omlxd, manifest: Path) -> None:
    manifest.write_text('[daemon]\nmax_memroy = "8G"\n[models.a]\npin = 3\n')
    done = omlxd_process("start")
    assert (done.returncode, done.stdout) == (78, "")
    assert "max_memroy" in done.stderr
    assert "models.a" in done.stderr


def test_the_demo_without_mlx_says_what_to_install(
    omlxd_process: Omlxd, home: Path, environment: dict[str, str]
) -> None:
    (home / "shadow" / "mlx").mkdir(parents=True)
    (home / "shadow" / "mlx" / "__init__.py").touch()
    path = os.pathsep.join(filter(None, [str(home / "shadow"), environment.get("PYTHONPATH")]))
    done = omlxd_process("demo", PYTHONPATH=path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: MLX cannot be imported")
    assert "pip install 'omlxd[cpu]'" in done.stderr
    assert not (home / "demo").exists()


@pytest.fixture
def demo_home(home: Path, smollm2_path: Path) -> Path:
    """A home that has the model already, as after the first demo."""
    models = home / "models"
    models.mkdir()
    (models / smollm2_path.name).symlink_to(smollm2_path)
    return home


@pytest.mark.mlx
@pytest.mark.slow
@pytest.mark.real_model
def test_the_demo_shows_a_real_eviction_and_leaves_nothing_behind(omlxd_process: Omlxd, demo_home: Path) -> None:
    done = omlxd_process("demo", HF_HUB_OFFLINE="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Paris" in done.stdout
    assert "unloaded `tiny-a` (" in done.stdout
    assert "unloaded `tiny-b` (" in done.stdout
    assert "Rome" in done.stdout
    assert "\x1b" not in done.stdout
    assert [path.name for path in demo_home.iterdir()] == ["models"]
    told = next(line for line in done.stdout.splitlines() if line.startswith("    omlxd add chat "))
    assert omlxd_process(*told.split()[1:]).returncode == 0
    assert omlxd_process("check").returncode == 0


@pytest.mark.mlx
@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_takes_its_daemon_with_it(
    demo_home: Path, environment: dict[str, str], number: signal.Signals
) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "omlxd", "demo"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        ready = next(line for line in process.stdout if "omlxd answers: pid " in line)
        pid = int(ready.partition("pid ")[2].partition(",")[0])
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert stderr == ""
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert [path.name for path in demo_home.iterdir()] == ["models"]
