"""`omlxd plan` and `load --estimate-only`: with and without a daemon, from files alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Omlxd
from tests.cli.fake_daemon import FakeDaemon, as_json, status_json
from tests.cli.hollow_model import hollow_model

MIB = 2**20


@pytest.fixture
def manifest(home: Path) -> Path:
    chat, small = hollow_model(home / "chat", 300), hollow_model(home / "small", 50)
    text = f'[daemon]\nmax_memory = "400M"\n[models.chat]\npath = "{chat}"\npin = true\n'
    (home / "omlxd.toml").write_text(f'{text}[models.small]\npath = "{small}"\n')
    return home / "omlxd.toml"


def _plan(omlxd: Omlxd, *arguments: str) -> dict[str, Any]:
    return dict(json.loads(omlxd("plan", "--json", *arguments).stdout))


def test_without_a_daemon_pinned_models_count_as_loaded(omlxd: Omlxd, manifest: Path) -> None:
    plan = _plan(omlxd)
    chat, small = plan["models"]
    assert (plan["schema"], plan["daemon"], plan["together"]) == (1, False, None)
    assert (chat["weights_bytes"], small["weights_bytes"]) == (300 * MIB, 50 * MIB)
    assert (small["beside"], small["beside_bytes"]) == (["chat"], 300 * MIB)
    assert small["fits"]
    assert small["kv_bytes"] == 4096 * 4 * 2 * 2 * 64 * 4
    assert small["max_context"] == 8192


def test_a_plan_that_does_not_fit_ends_in_5_and_says_what_would(omlxd: Omlxd, manifest: Path) -> None:
    done = omlxd("plan", "small", "--max-memory", "360M")
    assert done.returncode == 5
    assert "small" in done.stdout
    assert "`--context " in done.stderr
    fitting = done.stderr.rpartition("`--context ")[2].partition("`")[0]
    assert omlxd("plan", "small", "--max-memory", "360M", "--context", fitting).returncode == 0


def test_several_models_are_judged_by_themselves_and_together(omlxd: Omlxd, manifest: Path) -> None:
    plan = _plan(omlxd, "chat", "small", "--max-memory", "380M")
    assert [model["fits"] for model in plan["models"]] == [True, True]
    assert plan["together"]["names"] == ["chat", "small"]
    assert plan["together"]["weights_bytes"] == 350 * MIB
    assert not plan["together"]["fits"]


def _beside_chat(fake: FakeDaemon, manifest: Path, *, running: int) -> dict[str, Any]:
    """The status of a daemon whose `chat` holds 80 of 120 MiB, with so many requests."""
    status = status_json() | {"manifest": str(manifest)}
    status["memory"] |= {"soft_limit": 120 * MIB, "hard_limit": 400 * MIB, "unaccounted": 0}
    loaded = {"state": "loaded", "pinned": False, "running": running, "waiting": 0, "last_used_s": 60.0}
    chat = next(model for model in status["models"] if model["name"] == "chat")
    status["models"] = [chat | loaded | {"committed_bytes": 80 * MIB}]
    fake.routes["GET /v1/control/status"] = as_json(status)
    return status


def test_with_a_daemon_its_limits_and_its_idle_models_count(omlxd: Omlxd, manifest: Path, fake: FakeDaemon) -> None:
    status = _beside_chat(fake, manifest, running=0)
    assert "; unloads `chat`" in omlxd("plan", "small", "--context", "1024", COLUMNS="80").stdout
    plan = _plan(omlxd, "small", "--context", "1024")
    assert (plan["daemon"], plan["soft_limit"]) == (True, 120 * MIB)
    assert plan["models"][0]["fits"]
    assert plan["models"][0]["evict"] == ["chat"]
    status["memory"]["limit_origin"] = "limit"
    fake.routes["GET /v1/control/status"] = as_json(status)
    told = omlxd("plan", "small", "--context", "1024", COLUMNS="200").stdout
    assert told.startswith("limit 120 MiB (omlxd limit), hard limit 400 MiB; as the daemon has it now")
    assert "are left below the soft limit 120 MiB (omlxd limit)" in " ".join(told.split())
    assert "(--max-memory)" in omlxd("plan", "small", "--max-memory", "1G").stdout


def test_a_busy_model_in_the_way_is_said_to_be_waited_for(omlxd: Omlxd, manifest: Path, fake: FakeDaemon) -> None:
    _beside_chat(fake, manifest, running=1)
    done = omlxd("plan", "small")
    assert done.returncode == 5
    assert "beside 80.0 MiB of `chat` (busy)" in done.stdout
    assert "a request waits until it is idle, or its requests are parked for it" in done.stdout
    assert "hint: ask all the same, it waits its turn; `omlxd status` shows when `chat` is idle" in done.stderr
    (small,) = _plan(omlxd, "small")["models"]
    assert (small["fits"], small["beside"], small["waits_for"]) == (False, ["chat"], ["chat"])


def test_load_estimate_only_loads_nothing_and_shows_the_plan(omlxd: Omlxd, manifest: Path) -> None:
    done = omlxd("load", "small", "--estimate-only")
    assert done.returncode == 0
    assert done.stdout == omlxd("plan", "small").stdout
    assert "the daemon is not running" in done.stdout


def test_a_narrow_terminal_has_the_sums_and_cuts_no_heading(omlxd: Omlxd, manifest: Path) -> None:
    wide, narrow = (omlxd("plan", COLUMNS=columns).stdout.splitlines() for columns in ("140", "80"))
    assert wide[1].split()[2:6] == ["WEIGHTS", "KV", "GROWTH", "TRANSIENT"]
    headings = ["MODEL", "FITS", "STAYS", "PEAK", "CONTEXT", "MAX CTX", "REQ", "MAX REQ", "BINDS"]
    assert re.split(r"\s{2,}", narrow[1].strip()) == headings
    assert [each for each in headings if each.startswith("MAX")] == re.findall(r"MAX \w+", wide[1])
    assert max(map(len, narrow[1:4])) <= 80
    assert narrow[2].split()[0] == "chat"


def test_a_bad_model_is_named_and_the_others_are_judged(omlxd: Omlxd, manifest: Path) -> None:
    gone = '[models.gone]\npath = "/nowhere/gone"\npin = true\n[models.empty]\npath = "/dev"\n'
    manifest.write_text(manifest.read_text() + gone)
    done = omlxd("plan")
    assert done.returncode == 1
    assert [line.split()[0] for line in done.stdout.splitlines()[2:4]] == ["chat", "small"]
    assert done.stderr.splitlines() == [
        "warning: `gone` is left out: `/nowhere/gone` does not exist; check `path` in the manifest",
        "warning: `empty` is left out: `/dev` has no config.json; name the folder of an mlx-lm model",
        "error: `gone`, `empty` are left out",
        "hint: `omlxd check` looks at the files of all models",
    ]
    plan = _plan(omlxd)
    assert [model["names"] for model in plan["models"]] == [["chat"], ["small"]]
    assert [(each["name"], each["problem"]) for each in plan["left_out"]][:1] == [
        ("gone", "`/nowhere/gone` does not exist")
    ]
    named = omlxd("plan", "small", "gone")
    assert (named.returncode, named.stdout) == (1, "")
    assert "error: `/nowhere/gone` does not exist" in named.stderr


def test_where_one_does_not_fit_that_is_the_status_and_the_bad_ones_are_named_too(omlxd: Omlxd, manifest: Path) -> None:
    manifest.write_text(manifest.read_text() + '[models.gone]\npath = "/nowhere/gone"\n')
    done = omlxd("plan", "--max-memory", "320M")
    assert done.returncode == 5
    assert "warning: `gone` is left out" in done.stderr


def test_without_any_good_model_each_is_named(omlxd: Omlxd, home: Path) -> None:
    (home / "omlxd.toml").write_text("".join(f'[models.{name}]\npath = "/nowhere/{name}"\n' for name in "abc"))
    done = omlxd("plan")
    assert (done.returncode, done.stdout) == (1, "")
    assert [line[:20] for line in done.stderr.splitlines()[:3]] == [f"warning: `{name}` is left" for name in "abc"]


def test_a_context_beyond_one_models_own_leaves_the_others_judged(omlxd: Omlxd, manifest: Path) -> None:
    manifest.write_text(manifest.read_text() + "max_context = 2048\n")
    done = omlxd("plan", "--context", "4096")
    assert done.returncode == 2
    assert "chat" in done.stdout
    assert "warning: `small` is left out: `small` has a context of 2048 tokens, not 4096" in done.stderr


@pytest.mark.parametrize("names", [["small"], []])
def test_a_context_beyond_the_models_own_is_a_usage_error(omlxd: Omlxd, manifest: Path, names: list[str]) -> None:
    done = omlxd("plan", *names, "--context", "9000")
    assert (done.returncode, done.stdout) == (2, "")
    assert "hint: `--context 8192`" in done.stderr


def test_an_unknown_model_ends_in_4(omlxd: Omlxd, manifest: Path) -> None:
    assert omlxd("plan", "smal").returncode == 4
