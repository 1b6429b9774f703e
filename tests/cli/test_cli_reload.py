"""`omlxd reload`: what it shows of a reload, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omlxd.cli.sentences import event_sentence
from omlxd.core.errors import ManifestInvalid
from tests.cli.conftest import Omlxd
from tests.cli.fake_daemon import FakeDaemon, as_error, as_json, as_lines

PATH = "POST /v1/control/reload"
DONE: dict[str, Any] = {
    "manifest": "/m/omlxd.toml",
    "changes": [
        {"key": "daemon.max_memory", "before": "8G", "after": "6G", "effect": "now"},
        {"key": "daemon.max_batch", "before": "32", "after": "8", "effect": "restart"},
        {"key": "models.chat.path", "before": "/m/a", "after": "/m/b", "effect": "when_idle"},
        {"key": "models.chat.ttl", "before": None, "after": "10 min", "effect": "now"},
        {"key": 'models."qwen3.5"', "before": None, "after": "/m/q", "effect": "now"},
        {"key": "models.big", "before": "org/big", "after": None, "effect": "now"},
    ],
    "added": ["qwen3.5"],
    "removed": ["big"],
    "restart": ["daemon.max_batch"],
    "evicted": ["small"],
    "pending": ["big"],
    "warnings": ["`chat` cannot be loaded: `/m/b` does not exist"],
}
SHOWN = """\
daemon.max_memory 8G → 6G
daemon.max_batch 32 → 8 (after a restart)
models.chat.path /m/a → /m/b (when the model is idle)
models.chat.ttl none → 10 min
models."qwen3.5" added
models.big removed
reloaded `/m/omlxd.toml`: 6 changes; `daemon.max_batch` after `omlxd restart`
"""
TOLD = """\
unloaded `small`
warning: `chat` cannot be loaded: `/m/b` does not exist
`big`: done when the requests have ended
"""
RESULT = {"schema": 1, **DONE}


def test_it_shows_each_difference_and_what_it_leads_to(omlxd: Omlxd, fake: FakeDaemon) -> None:
    fake.routes[PATH] = as_lines({"applied": DONE}, {"result": RESULT})
    done = omlxd("reload")
    assert (done.returncode, done.stdout, done.stderr) == (0, SHOWN, TOLD)
    assert fake.seen == [("POST", "/v1/control/reload", {})]


def test_force_is_passed_on(omlxd: Omlxd, fake: FakeDaemon) -> None:
    fake.routes[PATH] = as_json(RESULT)
    assert omlxd("reload", "--no-wait", "--force").returncode == 0
    assert fake.seen == [("POST", "/v1/control/reload", {"wait": False, "force": True})]


def test_without_waiting_it_shows_the_same(omlxd: Omlxd, fake: FakeDaemon) -> None:
    fake.routes[PATH] = as_json(RESULT)
    done = omlxd("reload", "--no-wait")
    assert (done.returncode, done.stdout, done.stderr) == (0, SHOWN, TOLD)
    assert fake.seen == [("POST", "/v1/control/reload", {"wait": False})]


@pytest.mark.parametrize("options", [[], ["--no-wait"]])
def test_as_json_it_is_what_the_daemon_says(omlxd: Omlxd, fake: FakeDaemon, options: list[str]) -> None:
    fake.routes[PATH] = as_json(RESULT) if options else as_lines({"applied": DONE}, {"result": RESULT})
    done = omlxd("reload", "--json", *options)
    assert (done.returncode, json.loads(done.stdout), done.stderr) == (0, RESULT, "")


def test_nothing_new_is_said_in_a_line(omlxd: Omlxd, fake: FakeDaemon) -> None:
    same = {key: [] for key in DONE} | {"manifest": "/m/omlxd.toml"}
    fake.routes[PATH] = as_lines({"applied": same}, {"result": same})
    assert omlxd("reload").stdout == "nothing has changed in `/m/omlxd.toml`\n"


def test_a_bad_manifest_is_told_with_its_lines(omlxd: Omlxd, fake: FakeDaemon) -> None:
    problems = ["daemon.max_bach: unknown key; did you mean `max_batch`? (line 3)"]
    fake.routes[PATH] = as_error(ManifestInvalid("the manifest has 1 problem", problems=problems, hint="correct it"))
    done = omlxd("reload")
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr == f"error: the manifest has 1 problem\n  {problems[0]}\nhint: correct it\n"


def test_a_daemon_that_ends_in_between_is_no_success(omlxd: Omlxd, fake: FakeDaemon) -> None:
    fake.routes[PATH] = as_lines({"applied": DONE})
    done = omlxd("reload")
    assert (done.returncode, done.stdout) == (69, SHOWN)
    assert "ended before the reload was complete" in done.stderr


def test_without_a_daemon_there_is_nothing_to_reload(omlxd: Omlxd, home: Path) -> None:
    assert omlxd("reload").returncode == 3


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (
            {"event": "manifest_reloaded", "manifest": "/m", "changes": DONE["changes"][:1]},
            "`/m` is in force: daemon.max_memory 8G → 6G",
        ),
        (
            {"event": "manifest_reloaded", "manifest": "/m", "changes": []},
            "`/m` is in force: nothing has changed in it",
        ),
        ({"event": "manifest_reloaded", "changes": 7}, "`?` is in force: nothing has changed in it"),
        (
            {
                "event": "manifest_rejected",
                "manifest": "/m",
                "error": {"message": "it is wrong", "details": {"problems": ["a", 3]}},
            },
            "`/m` changes nothing: it is wrong: a; 3",
        ),
        ({"event": "manifest_rejected", "error": "x"}, "`?` changes nothing: x"),
        (
            {"event": "model_kept", "model": "chat", "error": {"message": "`/b` does not exist"}},
            "`chat` keeps its old weights, since the new ones cannot be loaded: `/b` does not exist",
        ),
    ],
)
def test_its_events_are_sentences(record: dict[str, Any], sentence: str) -> None:
    assert event_sentence(record) == sentence
