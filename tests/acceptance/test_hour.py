"""A crowd under a limit that moves: every client that stays gets its whole answer, and nothing is left afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acceptance.harness import MIB, Daemon, weights_bytes
from tests.bench.crowd import Crowd, Habits

CAP_MODELS, WIDE_MODELS = 1.5, 2.5


@pytest.mark.slow
@pytest.mark.mlx
@pytest.mark.timeout(300)
def test_a_crowd_under_a_moving_limit_loses_nothing_and_leaves_nothing(
    daemon_of: Callable[..., Daemon], small: Callable[..., Path]
) -> None:
    models = {"often": small(1), "sometimes": small(2), "seldom": small(3)}
    weights = max(weights_bytes(folder) for folder in models.values())
    soft = int(CAP_MODELS * weights)
    daemon = daemon_of(
        {**models, "seldom": {"path": models["seldom"], "ttl": "1s"}},
        daemon={
            "max_memory": soft,
            "hard_limit": int(WIDE_MODELS * weights) + 20 * MIB,
            "poll_interval": "1s",
            "load_timeout": "5m",
        },
    )
    crowd = Crowd(Habits(tuple(models), asks=3), daemon.connection).start()
    for limit in (int(WIDE_MODELS * weights), soft):
        daemon.until_event("load_finished", model="sometimes")
        daemon.control("PATCH", "limits", {"max_memory": limit})
    crowd.join()

    counts = crowd.counts()
    assert set(counts) <= {"whole", "vanished"}, counts
    assert counts["whole"] > counts["vanished"] > 0
    daemon.until_idle()
    status = daemon.status
    assert status["memory"]["over_hard_samples"] == 0
    assert [model["parked"] for model in status["models"]] == [0, 0, 0]
    assert status["requests"] == []
    loaded = [model for model in status["models"] if model["state"] == "loaded"]
    held = sum(model["weights_bytes"] + model["prefix_cache_bytes"] for model in loaded)
    assert status["memory"]["active"] == pytest.approx(held, abs=MIB // 4)

    stayed = [event["error"]["message"] for event in daemon.log("request_aborted", "request_failed")]
    assert all("went away" in message for message in stayed), stayed
    for decision in daemon.log("decision"):
        assert decision["reason"]
        if decision["action"] == "unload" and decision["trigger"] != "ttl":
            assert [each["model"] for each in decision["candidates"] if each["chosen"]] == [decision["victim"]]
        explained = daemon.cli("why", decision["decision"])
        assert explained.returncode == 0, explained.stderr
        assert decision["reason"] in " ".join(explained.stdout.split())
