"""Each command against the fake daemon: what it asks, what it prints, and where."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from omlxd.core.errors import DaemonNotRunning, DoesNotFit
from tests.cli.conftest import Omlxd
from tests.cli.fake_daemon import (
    CHAT,
    MEMORY,
    MIB,
    SMALL,
    FakeDaemon,
    as_error,
    as_json,
    as_lines,
    model_json,
    status_json,
)
from tests.fakes.daemon import model_folder

Golden = Callable[[str, str], None]


@pytest.mark.parametrize("command", ["status", "models", "requests"])
def test_what_is_drawn_does_not_change_by_accident(
    omlxd: Omlxd, fake: FakeDaemon, golden: Golden, command: str
) -> None:
    done = omlxd(command)
    assert (done.returncode, done.stderr) == (0, "")
    golden(command, done.stdout)


def test_status_fits_eighty_columns_and_needs_no_utf8(omlxd: Omlxd, fake: FakeDaemon, golden: Golden) -> None:
    done = omlxd("status", COLUMNS="80", LC_ALL="C")
    assert done.stdout.isascii()
    assert max(map(len, done.stdout.splitlines())) <= 80
    golden("status-80-ascii", done.stdout)


def test_ps_is_status(omlxd: Omlxd, fake: FakeDaemon) -> None:
    assert omlxd("ps").stdout == omlxd("status", "--once").stdout


def test_status_says_why_memory_stays_over_the_limit(omlxd: Omlxd, fake: FakeDaemon) -> None:
    body = status_json()
    body["enforcer"] |= {"level": "exhausted", "reason": "all 2 loaded models are pinned"}
    fake.routes["GET /v1/control/status"] = as_json(body)
    assert "all 2 loaded models are pinned" in omlxd("status").stdout


def test_status_draws_what_the_policy_compares_and_names_the_rest_apart(omlxd: Omlxd, fake: FakeDaemon) -> None:
    body = status_json()
    body["memory"] |= {"active": 100 * MIB, "used": 309 * MIB, "soft_limit": 200 * MIB}
    fake.routes["GET /v1/control/status"] = as_json(body)
    line = next(line for line in omlxd("status", COLUMNS="140").stdout.splitlines() if line.startswith("memory"))
    assert "100 MiB of 200 MiB (50 %)" in line
    assert "209 MiB more outside MLX" in line


def test_status_tells_what_belongs_to_nobody_where_it_is_worth_telling(omlxd: Omlxd, fake: FakeDaemon) -> None:
    body = status_json()
    for unaccounted, soft, told in (
        (15, 4000, False),
        (16, 4000, True),
        (3, 400, False),
        (5, 400, True),
        (3, 0, False),
    ):
        body["memory"] |= {"unaccounted": unaccounted * MIB, "soft_limit": soft * MIB}
        fake.routes["GET /v1/control/status"] = as_json(body)
        (line,) = (line for line in omlxd("status").stdout.splitlines() if line.startswith("used"))
        assert line.startswith("used    263 MiB · committed 311 MiB")
        assert (f"unaccounted {unaccounted}" in line) is told


def test_status_says_what_loads_and_requests_wait_for(omlxd: Omlxd, fake: FakeDaemon) -> None:
    body = status_json()
    body["models"][1]["waits_for"] = "waiting for `chat` to finish, 1.20 GiB short"
    body["requests"][0].update(state="waiting", waits_for="waiting for `small` to be loaded")
    fake.routes["GET /v1/control/status"] = as_json(body)
    lines = omlxd("status").stdout.splitlines()
    assert "small: waiting for `chat` to finish, 1.20 GiB short" in lines
    assert "r7: waiting for `small` to be loaded" in lines


def test_status_names_each_model_s_prefix_cache_where_there_is_one(omlxd: Omlxd, fake: FakeDaemon) -> None:
    assert "prefix caches:" not in omlxd("status").stdout
    body = status_json()
    body["models"][0]["prefix_cache_bytes"] = 32 * MIB
    body["models"][1]["prefix_cache_bytes"] = 2 * MIB
    fake.routes["GET /v1/control/status"] = as_json(body)
    assert "prefix caches: chat 32.0 MiB, small 2.00 MiB" in omlxd("status").stdout.splitlines()


def test_status_tells_what_prefix_caches_hold_where_they_hold_something(omlxd: Omlxd, fake: FakeDaemon) -> None:
    body = status_json()
    for held_bytes, told in ((0, False), (32 * MIB, True)):
        body["memory"] |= {"prefix_cache": held_bytes}
        fake.routes["GET /v1/control/status"] = as_json(body)
        line = next(line for line in omlxd("status", COLUMNS="140").stdout.splitlines() if line.startswith("memory"))
        assert ("32.0 MiB of it prefix caches" in line) is told


def test_status_of_a_daemon_without_limit_or_models(omlxd: Omlxd, fake: FakeDaemon, golden: Golden) -> None:
    body = status_json() | {"models": [], "requests": [], "recent_decisions": [], "backend": None, "api": None}
    body["memory"] |= {"soft_limit": 0, "hard_limit": 0}
    fake.routes["GET /v1/control/status"] = as_json(body)
    golden("status-empty", omlxd("status").stdout)


@pytest.mark.parametrize(
    ("command", "path"),
    [("status", "/v1/control/status"), ("models", "/v1/control/models"), ("requests", "/v1/control/requests")],
)
def test_json_is_what_the_daemon_said(omlxd: Omlxd, fake: FakeDaemon, command: str, path: str) -> None:
    said = {"schema": 1, "new_field": "ä", "bytes": 2**40}
    fake.routes[f"GET {path}"] = as_json(said)
    done = omlxd(command, "--json")
    assert json.loads(done.stdout) == said
    assert done.stderr == ""


def test_a_table_on_a_pipe_cuts_nothing_off(omlxd: Omlxd, fake: FakeDaemon) -> None:
    long = model_json(CHAT) | {"name": "n" * 100}
    fake.routes["GET /v1/control/models"] = as_json({"schema": 1, "models": [long]})
    assert "n" * 100 in omlxd("models", COLUMNS="").stdout


def test_nothing_in_flight_is_said_beside_the_data(omlxd: Omlxd, fake: FakeDaemon) -> None:
    fake.routes["GET /v1/control/requests"] = as_json({"schema": 1, "requests": []})
    done = omlxd("requests")
    assert (done.stdout, done.stderr) == ("", "no requests in flight\n")


def test_abort_names_the_request(omlxd: Omlxd, fake: FakeDaemon) -> None:
    done = omlxd("abort", "r7")
    assert (done.returncode, done.stderr) == (0, "request `r7` aborted\n")
    assert fake.seen == [("DELETE", "/v1/control/requests/r7", None)]


def test_load_waits_for_the_result_and_tells_who_had_to_go(omlxd: Omlxd, fake: FakeDaemon) -> None:
    progress = {"progress": {"model": "chat", "state": "loading", "done_bytes": 1, "total_bytes": 2, "note": None}}
    result = {"schema": 1, "model": model_json(CHAT), "load_s": 0.53, "evicted": ["small"]}
    fake.routes["POST /v1/control/models/default/load"] = as_lines(progress, {"result": result})
    done = omlxd("load", "default", "--pin")
    assert done.stdout == "loaded `chat` in 530 ms (257 MiB, pinned)\n"
    assert done.stderr == "unloaded `small` to make room\n"
    assert fake.seen[0][2] == {"wait": True, "pin": True}


def test_load_of_a_loaded_model_says_so(omlxd: Omlxd, fake: FakeDaemon) -> None:
    result = {"schema": 1, "model": model_json(CHAT), "load_s": None, "evicted": []}
    fake.routes["POST /v1/control/models/chat/load"] = as_lines({"result": result})
    assert omlxd("load", "chat").stdout == "`chat` is loaded already (257 MiB, pinned)\n"
    assert json.loads(omlxd("load", "chat", "--json").stdout) == result


@pytest.mark.parametrize(
    ("was", "said"),
    [
        ("loaded", "unloaded `small` (48.0 MiB freed)\n"),
        ("loading", "cancelled the load of `small` (48.0 MiB freed)\n"),
        ("unloaded", "`small` was not loaded\n"),
    ],
)
def test_unload_says_what_it_undid(omlxd: Omlxd, fake: FakeDaemon, was: str, said: str) -> None:
    answer = {"schema": 1, "model": model_json(SMALL), "freed_bytes": 48 * MIB, "was": was}
    fake.routes["POST /v1/control/models/small/unload"] = as_json(answer)
    assert omlxd("unload", "small", "--now").stdout == said
    assert fake.seen[0][2]["now"] is True


@pytest.mark.parametrize("command", ["pin chat", "unpin chat", "load chat --pin"])
def test_what_is_in_force_and_not_saved_is_a_warning(omlxd: Omlxd, fake: FakeDaemon, command: str) -> None:
    warning = "in force, but not saved: No space left on device"
    answer = {"model": model_json(CHAT), "load_s": None, "evicted": [], "warnings": [warning]}
    verb = command.split()[0]
    route = as_lines({"result": answer}) if verb == "load" else as_json(answer)
    fake.routes[f"POST /v1/control/models/chat/{verb}"] = route
    done = omlxd(*command.split())
    assert (done.returncode, done.stderr) == (0, f"warning: {warning}\n")


def test_pin_and_unpin(omlxd: Omlxd, fake: FakeDaemon) -> None:
    for verb in ("pin", "unpin"):
        fake.routes[f"POST /v1/control/models/small/{verb}"] = as_json({"model": model_json(SMALL)})
    pinned = omlxd("pin", "small", "--force")
    assert pinned.stdout == "pinned `small`\n"
    assert pinned.stderr == "`small` is not loaded; `omlxd load small` loads it\n"
    assert fake.seen[0][2] == {"force": True}
    assert omlxd("unpin", "small").stdout == "unpinned `small`\n"


def test_unpin_says_that_the_manifest_does_not(omlxd: Omlxd, fake: FakeDaemon) -> None:
    route = "POST /v1/control/models/small/unpin"
    fake.routes[route] = as_json({"model": model_json(SMALL), "manifest_pin": True})
    told = "the manifest pins `small`; this holds all the same, over restarts too, until that is changed\n"
    assert omlxd("unpin", "small").stderr == told
    fake.routes[route] = as_json({"model": model_json(SMALL), "manifest_pin": False})
    assert omlxd("unpin", "small").stderr == ""


@pytest.mark.parametrize("verb", ["load", "unload", "pin", "unpin"])
def test_of_several_models_each_has_its_line_and_the_first_that_fails_gives_the_status(
    omlxd: Omlxd, fake: FakeDaemon, verb: str
) -> None:
    for model in (CHAT, SMALL):
        done = {"model": model_json(model), "freed_bytes": 0, "was": "loaded", "load_s": None, "evicted": []}
        route = as_lines({"result": done}) if verb == "load" else as_json(done)
        fake.routes[f"POST /v1/control/models/{model.name}/{verb}"] = route
    fake.routes[f"POST /v1/control/models/big/{verb}"] = as_error(DoesNotFit("`big` does not fit", hint="unpin one"))
    done_all = omlxd(verb, "chat", "small", "chat")
    assert (done_all.returncode, len(done_all.stdout.splitlines())) == (0, 2)
    done_some = omlxd(verb, "chat", "big", "gone", "small")
    assert (done_some.returncode, done_some.stdout) == (DoesNotFit.exit_status, done_all.stdout)
    assert "error: `big` does not fit\nhint: unpin one\nerror: there is no model `gone`" in done_some.stderr
    if verb in ("load", "unload"):
        lines = omlxd(verb, "chat", "small", "--json").stdout.splitlines()
        assert [json.loads(line)["model"]["name"] for line in lines] == ["chat", "small"]


def test_of_several_models_none_is_tried_where_no_daemon_runs(omlxd: Omlxd) -> None:
    done = omlxd("unload", "a", "b")
    assert (done.returncode, done.stderr.count("error:")) == (DaemonNotRunning.exit_status, 1)


def test_a_name_with_a_slash_stays_one_part_of_the_path(omlxd: Omlxd, fake: FakeDaemon) -> None:
    assert omlxd("unpin", "../stop?x").returncode == 4
    assert fake.seen[0][1] == "/v1/control/models/..%2Fstop%3Fx/unpin"


def test_models_come_from_the_manifest_where_no_daemon_runs(omlxd: Omlxd, home: Path) -> None:
    (home / "omlxd.toml").write_text(
        '[models.one]\npath = "one"\npin = true\naliases = ["uno"]\n[models.gone]\npath = "gone"\n'
    )
    model_folder(home / "one", 3 * MIB)
    done = omlxd("models")
    assert done.returncode == 0
    assert done.stderr == "the daemon is not running; `omlxd start` starts it, and then there is a state\n"
    heading, one, gone = done.stdout.splitlines()
    assert heading.split()[:2] == ["MODEL", "STATE"]
    assert one.split()[:2] == ["one", "-"]
    assert "3.00 MiB" in one
    assert "pinned" in one
    assert gone.split()[:3] == ["gone", "-", "-"]
    done = omlxd("models", "--json")
    assert done.returncode == 0
    assert done.stderr.startswith("the daemon is not running")
    first, second = json.loads(done.stdout)["models"]
    assert set(first) == set(asdict(CHAT))  # as a daemon has it
    assert (first["name"], first["state"], first["pinned"], first["aliases"]) == ("one", None, True, ["uno"])
    assert "does not exist" in second["error"]


def test_limit_without_a_size_shows_the_limits(omlxd: Omlxd, fake: FakeDaemon) -> None:
    assert omlxd("limit").stdout == "limit 400 MiB (max_memory), hard limit 420 MiB, 263 MiB used\n"
    assert json.loads(omlxd("limit", "--json").stdout)["memory"]["soft_limit"] == MEMORY.soft_limit


@pytest.mark.parametrize(
    ("origin", "binding", "shown"),
    [
        ("limit", "max_memory", "omlxd limit"),
        ("command_line", "max_memory", "--max-memory"),
        ("manifest", "max_memory", "max_memory"),
        ("limit", "metal", "metal"),
        (None, "max_memory", "max_memory"),
    ],
    ids=["run time", "command line", "manifest", "capped", "an older daemon"],
)
def test_a_limit_is_shown_with_who_said_it(
    omlxd: Omlxd, fake: FakeDaemon, origin: str | None, binding: str, shown: str
) -> None:
    status: dict[str, Any] = status_json()
    status["memory"]["binding"], status["memory"]["limit_origin"] = binding, origin
    fake.routes["GET /v1/control/status"] = as_json(status)
    assert omlxd("limit").stdout.startswith(f"limit 400 MiB ({shown}), hard limit 420 MiB")
    assert f"limit   400 MiB ({shown}) · hard 420 MiB" in omlxd("status").stdout


def test_limit_sends_what_was_written_and_tells_who_had_to_go(omlxd: Omlxd, fake: FakeDaemon) -> None:
    memory: dict[str, Any] = status_json()["memory"]
    answer = {"schema": 1, "memory": memory, "evicted": ["small"], "warnings": ["too high"], "level": "over"}
    fake.routes["PATCH /v1/control/limits"] = as_json(answer)
    done = omlxd("limit", "75%")
    assert fake.seen[0][2] == {"max_memory": "75%", "force": False}
    assert done.stdout.startswith("limit 400 MiB")
    assert done.stderr.splitlines() == [
        "warning: too high",
        "unloaded `small`",
    ]  # and not a second time that memory is over it
    assert json.loads(omlxd("limit", "auto", "--json").stdout) == answer


def test_limit_names_each_request_and_load_that_it_cost(omlxd: Omlxd, fake: FakeDaemon) -> None:
    answer = {
        "memory": status_json()["memory"],
        "evicted": ["small"],
        "parked": {"chat": ["r7"], "big": ["r9", "r8"]},
        "aborted": {"chat": ["r5"]},
        "postponed": ["huge"],
        "cancelled": ["other"],
    }
    fake.routes["PATCH /v1/control/limits"] = as_json(answer)
    assert omlxd("limit", "1G").stderr.splitlines() == [
        "unloaded `small`",
        "parked `r7` of `chat`, which goes on when there is memory for it",
        "parked `r9`, `r8` of `big`, which go on when there is memory for them",
        "aborted `r5` of `chat`",
        "stopped the load of `huge`, which is tried again",
        "cancelled the load of `other`",
    ]


def test_limit_says_that_memory_is_over_it_when_the_daemon_gives_no_reason(omlxd: Omlxd, fake: FakeDaemon) -> None:
    answer = {"schema": 1, "memory": status_json()["memory"], "evicted": [], "warnings": [], "level": "over"}
    fake.routes["PATCH /v1/control/limits"] = as_json(answer)
    assert omlxd("limit", "75%").stderr == "warning: memory is still over the limit; `omlxd status` says why\n"


@pytest.mark.parametrize(
    ("hard_bytes", "line", "of_status"),
    [
        (
            420 * MIB,
            "no soft limit; hard limit 420 MiB (ram), 263 MiB used\n",
            "limit   none · hard 420 MiB (ram) · ok",
        ),
        (0, "no limit, 263 MiB used\n", "limit   none · ok"),
    ],
)
def test_without_a_soft_limit_the_hard_one_is_told(
    omlxd: Omlxd, fake: FakeDaemon, hard_bytes: int, line: str, of_status: str
) -> None:
    status = status_json()
    status["memory"] |= {"soft_limit": 0, "hard_limit": hard_bytes, "hard_binding": "ram"}
    fake.routes["GET /v1/control/status"] = as_json(status)
    assert omlxd("limit").stdout == line
    assert of_status in omlxd("status", COLUMNS="80").stdout


def test_status_says_what_a_starting_daemon_does(omlxd: Omlxd, fake: FakeDaemon) -> None:
    fake.routes["GET /v1/control/status"] = as_json(status_json() | {"state": "starting"})
    assert omlxd("status").stdout.startswith("omlxd 0.1.0 starting (loading models) · pid ")
