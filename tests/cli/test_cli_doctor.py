"""`omlxd doctor` over real homes: what is well, what is wrong, and the exit status."""

from __future__ import annotations

import fcntl
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from omlxd.core.manifest import DaemonSettings
from omlxd.daemon.machine import find_machine
from tests.cli.conftest import Omlxd
from tests.cli.fake_daemon import STATUS, FakeDaemon, as_json, status_json
from tests.fakes.daemon import model_folder

MIB = 2**20


@pytest.fixture
def whole(home: Path, tmp_path: Path) -> Path:
    """A home with a manifest of one model whose folder is whole."""
    folder = model_folder(tmp_path / "chat", 10 * MIB)
    (home / "omlxd.toml").write_text(
        f"""
        [daemon]
        max_memory = "100M"
        [api]
        listen = "127.0.0.1:0"
        [models.chat]
        path = "{folder}"
        pin = true
        """
    )
    return home


def examined(omlxd: Omlxd, *arguments: str, **variables: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit status, and the findings by check; of several of one check the last."""
    done = omlxd("doctor", "--json", *arguments, **variables)
    body = json.loads(done.stdout)
    assert body["ok"] == (done.returncode == 0)
    return done.returncode, {finding["check"]: finding for finding in body["checks"]}


def test_a_home_in_order_has_a_tick_in_each_line(omlxd: Omlxd, whole: Path) -> None:
    done = omlxd("doctor", HOME=str(whole))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    for check in (
        "mlx",
        "mlx-lm",
        "backend",
        "device",
        "manifest",
        "limits",
        "model",
        "pins",
        "api",
        "home",
        "lock",
        "socket",
        "disk",
        "logs",
        "files",
        "clock",
        "daemon",
        "service",
    ):
        assert [line for line in lines if line.startswith(f"✓ {check} ")], done.stdout
    assert omlxd("doctor", HOME=str(whole), LC_ALL="C").stdout.startswith("+ mlx ")


def test_everything_that_is_wrong_is_told_at_once_with_its_remedy(omlxd: Omlxd, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "chat" / "model.safetensors").unlink()
    whole.chmod(0o755)
    (whole / "state.toml.damaged").touch()
    (whole / "omlxd.sock").touch()
    status, found = examined(omlxd)
    assert status == 1
    assert [check for check, finding in found.items() if finding["health"] == "wrong"] == ["model", "home", "socket"]
    assert found["files"]["health"] == "warning"
    assert found["home"]["remedy"] == f"`chmod 700 '{whole}'`"
    assert found["model"]["found"].startswith("`chat`: ")
    assert all(finding["remedy"] for finding in found.values() if finding["health"] != "ok")


def test_a_bad_manifest_and_pins_over_the_limit_are_wrong(omlxd: Omlxd, whole: Path) -> None:
    text = (whole / "omlxd.toml").read_text()
    (whole / "omlxd.toml").write_text(text.replace("100M", "5M"))
    status, found = examined(omlxd)
    assert (status, found["pins"]["health"], found["model"]["health"]) == (1, "wrong", "wrong")
    (whole / "omlxd.toml").write_text("[daemon]\nno_such_key = 1\n")
    status, found = examined(omlxd)
    assert (status, found["manifest"]["health"]) == (1, "wrong")
    assert "no_such_key" in found["manifest"]["found"]


@contextmanager
def at_a_taken_port(home: Path) -> Iterator[str]:
    """The address that the manifest names now, which somebody else has."""
    path = home / "omlxd.toml"
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        path.write_text(path.read_text().replace("127.0.0.1:0", taken))
        yield taken


def test_a_port_that_is_taken_and_a_key_that_is_not_there_are_wrong(omlxd: Omlxd, whole: Path) -> None:
    text = (whole / "omlxd.toml").read_text()
    with at_a_taken_port(whole) as taken:
        status, found = examined(omlxd)
    assert (status, found["api"]["health"]) == (1, "wrong")
    assert taken in found["api"]["found"]
    assert "`api.listen`" in found["api"]["remedy"]
    (whole / "omlxd.toml").write_text(text.replace("[api]", "[api]\napi_key_file = 'nowhere'"))
    status, found = examined(omlxd)
    assert (status, found["api"]["health"]) == (1, "wrong")
    assert "nowhere" in found["api"]["found"]
    checked = omlxd("check", "--json")
    assert checked.returncode == omlxd("start").returncode != 0
    assert "nowhere` cannot be read" in json.loads(checked.stdout)["problems"][0]


def test_what_is_in_the_way_of_each_file_is_told_where_it_is(omlxd: Omlxd, whole: Path) -> None:
    (whole / "omlxd.lock").mkdir()
    (whole / "logs").write_text("")
    status, found = examined(omlxd)
    assert status == 1
    assert {check for check, finding in found.items() if finding["health"] == "wrong"} == {"lock", "logs"}
    assert found["lock"]["remedy"] == "move it away"
    assert str(whole / "logs") in found["logs"]["found"]


def test_a_missing_shard_names_the_file(omlxd: Omlxd, whole: Path, tmp_path: Path) -> None:
    weights = tmp_path / "chat" / "model.safetensors"
    weights.rename(weights.with_name("model-00001-of-00002.safetensors"))
    status, found = examined(omlxd)
    assert (status, found["model"]["health"]) == (1, "wrong")
    assert "model-00002-of-00002.safetensors" in found["model"]["found"]
    assert found["model"]["remedy"] == "the download or copy is not complete; fetch the model again"


def test_each_line_that_is_not_well_ends_with_what_to_do(omlxd: Omlxd, whole: Path) -> None:
    for number in range(2):
        (whole / "logs").mkdir(exist_ok=True)
        (whole / "logs" / f"old-{number}").write_bytes(b"")
        with (whole / "logs" / f"old-{number}").open("ab") as file:
            file.truncate(200 * MIB)
    (whole / "state.toml.new").touch()
    done = omlxd("doctor")
    assert done.returncode == 0, "warnings alone are no failure"
    lines = {line.split()[1]: line for line in done.stdout.splitlines()}
    assert lines["logs"].startswith("! logs ")
    assert lines["logs"].endswith("; remove old files")
    assert lines["files"].endswith("left over: `state.toml.new`; look at them and remove them")


def test_a_limit_that_was_set_at_run_time_is_told_with_where_it_comes_from(omlxd: Omlxd, whole: Path) -> None:
    (whole / "state.toml").write_text('schema = 1\n[limit]\nmax_memory = "150M"\nmanifest_max_memory = "100M"\n')
    _, found = examined(omlxd)
    assert found["limits"]["found"].startswith("soft 150 MiB (omlxd limit), hard ")
    assert found["limits"]["found"].endswith(", set by `omlxd limit`; the manifest says `100M`")


def test_of_a_daemon_that_runs_its_own_manifest_is_looked_at(omlxd: Omlxd, whole: Path, fake: FakeDaemon) -> None:
    (whole / "omlxd.sock").chmod(0o600)
    with (whole / "omlxd.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _, found = examined(omlxd)
        assert "/home/me/.omlxd/omlxd.toml" in found["manifest"]["found"]
        _, found = examined(omlxd, "--manifest", str(whole / "omlxd.toml"))
        assert found["manifest"]["found"] == str(whole / "omlxd.toml")


def test_pins_that_were_set_at_run_time_are_told_with_where_they_come_from(omlxd: Omlxd, whole: Path) -> None:
    assert examined(omlxd)[1]["pins"]["found"] == "10.0 MiB pinned, 0 B more preloaded"
    (whole / "state.toml").write_text("schema = 1\n[pins.chat]\npinned = false\nmanifest_pinned = true\n")
    assert examined(omlxd)[1]["pins"]["found"] == (
        "0 B pinned, 0 B more preloaded, `chat` unpinned by `omlxd unpin`; the manifest says otherwise"
    )


@pytest.fixture
def beside(whole: Path, fake: FakeDaemon) -> Iterator[dict[str, Any]]:
    """The status of a daemon that runs with the manifest of `whole`, at a port that its system gave it."""
    (whole / "omlxd.sock").chmod(0o600)
    status: dict[str, Any] = status_json() | {"manifest": str(whole / "omlxd.toml"), "api": "127.0.0.1:54321"}
    hard_bytes = DaemonSettings(max_memory="100M").memory_limits(find_machine()).hard_bytes
    status["memory"] |= {"soft_limit": 100 * MIB, "hard_limit": hard_bytes, "hard_binding": "ram"}
    fake.routes["GET /v1/control/status"] = lambda body: as_json(status)(body)
    with (whole / "omlxd.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield status


def test_beside_a_daemon_that_keeps_to_its_manifest_all_is_well(omlxd: Omlxd, beside: dict[str, Any]) -> None:
    status, found = examined(omlxd)
    assert (status, found["limits"]["health"], found["api"]["health"]) == (0, "ok", "ok")
    assert found["limits"]["found"].startswith("soft 100 MiB (max_memory), hard ")
    assert found["api"]["found"] == "127.0.0.1:54321, without a key"


def test_a_daemon_that_has_other_limits_than_its_manifest_asks_for_is_told_apart(
    omlxd: Omlxd, whole: Path, beside: dict[str, Any]
) -> None:
    (whole / "omlxd.toml").write_text((whole / "omlxd.toml").read_text().replace("100M", "60M"))
    status, found = examined(omlxd)
    assert (status, found["limits"]["health"], found["limits"]["remedy"]) == (0, "warning", "`omlxd reload`")
    assert found["limits"]["found"].startswith("in force are soft 100 MiB (max_memory), hard ")
    assert ", and the manifest asks for soft 60.0 MiB (max_memory), hard " in found["limits"]["found"]


def test_an_emptied_manifest_is_not_sent_to_a_reload_which_refuses_it(
    omlxd: Omlxd, whole: Path, beside: dict[str, Any]
) -> None:
    (whole / "omlxd.toml").write_text("")
    remedy = "put the models back into the manifest, then `omlxd reload`; if none is meant, `omlxd reload --force`"
    _, found = examined(omlxd)
    assert found["limits"]["remedy"] == found["model"]["remedy"] == remedy
    assert found["model"]["found"] == f"the manifest has none, and the daemon that runs has {len(STATUS.models)}"
    beside["models"] = []
    _, found = examined(omlxd)
    assert found["limits"]["remedy"] == "`omlxd reload`"
    assert found["model"]["found"] == "the manifest has none"


def test_what_the_start_was_told_is_no_difference_to_the_manifest(
    omlxd: Omlxd, whole: Path, beside: dict[str, Any]
) -> None:
    (whole / "state.toml").write_text('schema = 1\n[start]\nmax_memory = "80M"\nhard_limit = "90M"\n')
    beside["memory"] |= {"soft_limit": 80 * MIB, "hard_limit": 90 * MIB, "limit_origin": "command_line"}
    _, found = examined(omlxd)
    assert (found["limits"]["health"], found["limits"]["found"]) == (
        "ok",
        "soft 80.0 MiB (--max-memory), hard 90.0 MiB (hard_limit), set by `--max-memory`; the manifest says `100M`",
    )


def test_beside_a_daemon_another_port_of_the_manifest_is_tried_and_the_daemons_own_is_not(
    omlxd: Omlxd, whole: Path, beside: dict[str, Any]
) -> None:
    text = (whole / "omlxd.toml").read_text()
    with at_a_taken_port(whole) as taken:
        status, found = examined(omlxd)
        assert (status, found["api"]["health"]) == (1, "wrong")
        assert found["api"]["found"] == (
            f"cannot listen on `{taken}`: the port is taken; the daemon that runs listens at 127.0.0.1:54321"
        )
        beside["api"] = taken
        assert examined(omlxd)[1]["api"]["health"] == "ok"
        beside["api"] = None
        assert examined(omlxd)[1]["api"]["found"] == f"cannot listen on `{taken}`: the port is taken"
    status, found = examined(omlxd)
    assert (status, found["api"]["health"], found["api"]["remedy"]) == (0, "warning", "`omlxd restart`")
    assert found["api"]["found"] == f"the daemon listens on the socket alone, by the manifest at {taken}"
    beside["api"] = "127.0.0.1:54321"
    (whole / "omlxd.toml").write_text(text.replace("127.0.0.1:0", "off"))
    _, found = examined(omlxd)
    assert found["api"]["found"] == "the daemon listens at 127.0.0.1:54321, by the manifest on the socket alone"


def test_a_socket_that_a_killed_daemon_left_is_no_fault(omlxd: Omlxd, whole: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(whole / "omlxd.sock"))
    (whole / "omlxd.sock").chmod(0o600)
    status, found = examined(omlxd)
    assert (status, found["daemon"]["found"]) == (0, "not running")
    assert "left by a daemon" in found["socket"]["found"]


def test_a_home_that_does_not_exist_is_a_warning_beside_the_missing_manifest(omlxd: Omlxd, home: Path) -> None:
    status, found = examined(omlxd, OMLXD_HOME=str(home / "none"))
    assert (status, found["home"]["health"], found["manifest"]["health"]) == (1, "warning", "wrong")
    assert found["manifest"]["found"].count("does not exist") == 1
    assert "file:" not in found["manifest"]["found"]
    assert not (home / "none").exists()


def test_the_daemon_that_holds_the_lock_is_asked(omlxd: Omlxd, whole: Path, fake: FakeDaemon) -> None:
    (whole / "omlxd.sock").chmod(0o600)
    with (whole / "omlxd.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, found = examined(omlxd, "--manifest", str(whole / "omlxd.toml"))
        assert (status, found["daemon"]["health"]) == (0, "ok")
        assert found["daemon"]["found"].startswith("omlxd 0.1.0, ")
        fake.close()
        status, found = examined(omlxd, "--manifest", str(whole / "omlxd.toml"))
        assert (status, found["daemon"]["health"]) == (1, "wrong")
