"""`omlxd bench` and the real daemon with tiny models: what it measures, what it refuses, what it leaves as it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.harness import OMLXD, Daemon, has_text, weights_bytes

pytestmark = pytest.mark.mlx

SIZES = ("--prompt", "300", "--generate", "30", "--rounds", "2", "--concurrency", "1,2")
QUICK = ("--prompt", "20", "--generate", "2", "--rounds", "1", "--concurrency", "1")


@pytest.fixture(scope="module")
def folders(tiny_model: Callable[..., Path]) -> dict[str, Path]:
    return {"tiny": tiny_model(), "slow": tiny_model("llama", 5_000_000)}


@pytest.fixture(scope="module")
def daemon(folders: dict[str, Path]) -> Iterator[Daemon]:
    """One for all tests here; each leaves it without a loaded model."""
    models = {"tiny": {"path": folders["tiny"], "aliases": ["t"]}, "slow": folders["slow"]}
    made = Daemon(models, daemon={"max_memory": "64M", "hard_limit": "96M"}, api={"listen": "off"}).spawn()
    assert made.ready.get("ready"), made.ready
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _nothing_is_left(daemon: Daemon) -> Iterator[None]:
    yield
    assert daemon.requests == []
    for name, state in daemon.states.items():
        if state != "unloaded":
            daemon.control("POST", f"models/{name}/unload", {"now": True})


def memory(report: dict[str, Any], what: str, streams: int = 1) -> dict[str, Any]:
    return next(each for each in report["memory"] if (each["what"], each["streams"]) == (what, streams))


def test_speeds_load_and_memory_are_told_for_scripts(daemon: Daemon, folders: dict[str, Path]) -> None:
    report = daemon.cli_json("bench", "t", *SIZES, "--context", "700")
    assert (report["schema"], report["model"], report["backend"]) == (1, "tiny", daemon.status["backend"])
    assert [row["streams"] for row in report["speed"]] == [1, 2]
    for row in report["speed"]:
        assert len(row["rounds"]) == 2
        for figure in ("prefill_tokens_per_s", "first_token_s", "decode_tokens_per_s", "gap_p99_s"):
            assert 0 < row[figure]["min"] <= row[figure]["median"] <= row[figure]["max"]
    assert report["load"]["measured_now"]
    assert report["load"]["bytes_per_s"] == pytest.approx(report["load"]["weights_bytes"] / report["load"]["load_s"])
    assert memory(report, "weights")["measured_bytes"] == pytest.approx(weights_bytes(folders["tiny"]), rel=0.05)
    assert abs(memory(report, "weights")["error"]) <= 0.01
    assert [each["tokens"] for each in report["memory"] if each["what"] == "prompt_kv"] == [299, 699]
    assert [each["tokens"] for each in report["memory"] if each["what"] == "kv"] == [330, 330]
    kv = [each for each in report["memory"] if each["what"] in ("prompt_kv", "kv")]
    assert all(abs(each["error"]) <= 0.02 for each in kv if each["streams"] == 1), kv
    assert all(each["measured_bytes"] <= (each["reserved_bytes"] or each["predicted_bytes"]) for each in kv), kv
    assert memory(report, "peak")["measured_bytes"] > memory(report, "weights")["measured_bytes"]
    assert report["disturbances"] == [] or "other programs" in report["disturbances"][0]
    ended = daemon.log("request_finished")[-7:]  # one to warm up and two that count, of one and of two; one more prompt
    assert {(each["prompt_tokens"], each["generated_tokens"]) for each in ended} == {(300, 30), (700, 1)}
    assert daemon.states["tiny"] == "unloaded"
    assert daemon.memory["prefix_cache"] == 0


def test_a_table_is_drawn_and_compared_with_an_earlier_one(daemon: Daemon, tmp_path: Path) -> None:
    daemon.control("POST", "models/tiny/load", {})
    load_s = daemon.control("GET", "models")["models"][0]["load_s"]
    before = tmp_path / "before.json"
    report = daemon.cli_json("bench", "tiny", *SIZES)
    assert (report["load"]["measured_now"], report["load"]["load_s"]) == (False, load_s)
    report["speed"][0]["first_token_s"]["median"] *= 1e-6  # as if it had been a million times faster
    before.write_text(json.dumps(report))
    done = daemon.cli("bench", "tiny", *SIZES[:-1], "1", "--compare", str(before))
    assert done.returncode == 0, done.stderr
    heads = [line.split()[0] for line in done.stdout.splitlines() if line]
    assert heads[:4] == ["tiny", "STREAMS", "1", "before"]
    assert "MEMORY" in heads
    (line,) = [line for line in done.stdout.splitlines() if line.lstrip().startswith("before")]
    prefill, first_token = line.split()[2:5:2]
    assert 0.01 < float(prefill) < 100
    assert float(first_token) > 10_000
    assert "KV cache of a prompt of 299 tokens" in done.stdout
    assert "when it was loaded last" in done.stdout
    assert "other settings" not in done.stderr
    other = daemon.cli("bench", "tiny", *QUICK, "--compare", str(before))
    assert "other settings: prompt tokens `300` instead of `20`" in other.stderr
    assert "too short for a decode speed" in other.stderr
    assert daemon.states["tiny"] == "loaded"


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("tinny",), 4, "did you mean `tiny`?"),
        (
            ("tiny", "--context", "32768"),
            2,
            "one more are more than the model's context of 32768 tokens\nhint: `--context 32767`",
        ),
        (("tiny", "--prompt", "32768", "--generate", "9"), 2, "hint: `--prompt` and `--generate`: 32768 together"),
        (("slow", "--prompt", "8000", "--concurrency", "16"), 5, "hint: prompts and answers of "),
        (("tiny", "--concurrency", "1,two"), 2, "`--concurrency` takes whole numbers above 0"),
        (("tiny", "--concurrency", "100"), 2, "`max_batch`"),
        (("tiny", "--compare", "/nowhere/at.json"), 2, "cannot compare with `/nowhere/at.json`: No such file"),
    ],
)
def test_what_cannot_be_measured_is_told_before_anything_is_loaded(
    arguments: tuple[str, ...], status: int, says: str, daemon: Daemon
) -> None:
    loads = len(daemon.log("load_started"))
    done = daemon.cli("bench", *arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert says in done.stderr
    assert len(daemon.log("load_started")) == loads


def test_a_folder_is_told_how_to_become_a_model(daemon: Daemon, folders: dict[str, Path]) -> None:
    done = daemon.cli("bench", str(folders["tiny"]))
    assert done.returncode == 4
    assert f"`omlxd add NAME {folders['tiny']}`" in done.stderr


def test_others_requests_make_the_figures_doubtful_and_forbid_a_reload(daemon: Daemon) -> None:
    with daemon.chat_stream("tiny", "hello", max_tokens=200_000) as other:
        other.until(has_text)
        refused = daemon.cli("bench", "tiny", *QUICK, "--reload")
        assert refused.returncode == 75
        assert "is in use" in refused.stderr
        report = daemon.cli("bench", "tiny", *QUICK, "--json")
        assert report.returncode == 0, report.stderr
    assert "the figures are not to be trusted: 1 other request to `tiny` ran meanwhile" in report.stderr
    assert json.loads(report.stdout)["disturbances"][0] == "1 other request to `tiny` ran"
    daemon.until_idle()


def test_a_reload_measures_the_load_of_a_loaded_model_and_leaves_it_loaded(daemon: Daemon) -> None:
    daemon.control("POST", "models/tiny/load", {})
    report = daemon.cli_json("bench", "tiny", *QUICK, "--reload")
    assert report["load"]["measured_now"]
    assert daemon.states["tiny"] == "loaded"


def test_an_interrupted_benchmark_leaves_nothing_behind(daemon: Daemon) -> None:
    environment = {**os.environ, "OMLXD_HOME": str(daemon.home)}
    with (
        daemon.events(since=daemon.log()[-1]["seq"]) as events,
        subprocess.Popen(
            [*OMLXD, "bench", "slow", "--generate", "6000", "--prompt", "100", "--concurrency", "1"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as running,
    ):
        events.until(lambda event: event["event"] == "request_started")
        running.send_signal(signal.SIGINT)
        out, _ = running.communicate(timeout=60)
        assert (running.returncode, out) == (130, b"")
    assert daemon.requests == []
    assert daemon.states["slow"] == "unloaded"
    assert daemon.memory["active"] < 1_000_000
