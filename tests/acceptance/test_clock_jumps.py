"""Eight hours pass in an instant, and nothing comes of it: nobody is too late, nothing unused, nothing stuck."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acceptance.harness import Daemon, errors_in, has_text
from tests.acceptance.shifted_daemon import STOPPED_S

pytestmark = pytest.mark.mlx


def test_after_eight_hours_of_sleep_everything_goes_on_where_it_was(
    home_of: Callable[..., Daemon], small: Callable[..., Path]
) -> None:
    models = {"chat": {"path": small(), "ttl": "1h"}, "idle": {"path": small(1), "ttl": "1m"}}
    daemon = home_of(models, daemon={"max_batch": 1, "poll_interval": "1s"}, module="tests.acceptance.shifted_daemon")
    assert daemon.spawn().ready.get("ready"), daemon.ready
    for model in models:
        daemon.control("POST", f"models/{model}/load")
    with (
        daemon.chat_stream("chat", "Go on.", max_tokens=20_000) as running,
        daemon.chat_stream("chat", "And I?", max_tokens=4) as waiting,
    ):
        running.until(has_text)
        before = daemon.status
        daemon.process.send_signal(signal.SIGUSR2)
        paused = daemon.until_event("daemon_paused")
        assert paused["paused_s"] == pytest.approx(STOPPED_S, abs=60)
        daemon.process.send_signal(signal.SIGALRM)  # and the wall clock is set back, by twice as much
        running.until(has_text)
        after = daemon.status
        assert {model["name"]: model["state"] for model in after["models"]} == dict.fromkeys(models, "loaded")
        assert [each["state"] for each in after["requests"]] == [each["state"] for each in before["requests"]]
        assert all(each["age_s"] < 600 for each in after["requests"])
        (idle,) = [model for model in after["models"] if model["name"] == "idle"]
        assert 0 < idle["ttl_left_s"] <= 60
        assert after["state"] == "ready"
        assert (after["stalled_s"] or 0.0) < 60
        assert daemon.ask("GET", "/health").json["status"] == "ok"
        daemon.control("DELETE", f"requests/{after['requests'][0]['id']}")
        assert len(errors_in(list(running))) == 1
        assert not errors_in(list(waiting))
    names = {line["event"] for line in daemon.log()}
    assert not names & {"engine_stalled", "decision", "request_failed", "enforcer_error", "api_error"}
    assert [line["request"] for line in daemon.log("request_aborted")] == [after["requests"][0]["id"]]
