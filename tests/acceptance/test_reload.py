"""Another manifest on the real thing: streams of a model that goes or changes, and what a restart brings back."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acceptance.harness import CHAT, Daemon, chat_body, errors_in, has_text, in_thread, manifest, text_of
from tests.fakes.wire import ask

pytestmark = pytest.mark.mlx

TOKENS = 150


def written(daemon: Daemon, **models: Path) -> None:
    (daemon.home / "omlxd.toml").write_text(manifest(models))


def text(daemon: Daemon, model: str) -> str:
    answer = daemon.chat(model, "Go on.", max_tokens=TOKENS)
    assert answer.status == 200, answer.body
    return str(answer.json["choices"][0]["message"]["content"])


def test_streams_of_models_that_go_and_change_end_with_their_own_text_and_the_drain_tells_everybody(
    daemon_of: Callable[..., Daemon], small: Callable[..., Path]
) -> None:
    one, other = small(0), small(1)
    daemon = daemon_of({"chat": one, "other": other, "third": one})
    texts = {name: text(daemon, name) for name in ("chat", "other")}
    assert texts["chat"] != texts["other"]

    streams = [daemon.chat_stream(name, "Go on.", max_tokens=TOKENS) for name in ("chat", "other")]
    with streams[0], streams[1]:
        begun = [stream.until(has_text) for stream in streams]
        for number in range(10):
            written(daemon, chat=other, **{f"m{number}": one})
            daemon.process.send_signal(signal.SIGHUP)  # type: ignore[union-attr]
        while daemon.states.keys() - {"other"} != {"chat", "m9"}:
            pass
        assert daemon.chat("other", "Go on.").status == 404
        frames = [[first, *stream] for first, stream in zip(begun, streams, strict=True)]
    assert not errors_in([*frames[0], *frames[1]])
    assert [text_of(each) for each in frames] == [texts["chat"], texts["other"]]

    reloaded = daemon.cli("reload")
    assert (reloaded.returncode, reloaded.stderr) == (0, "")
    assert reloaded.stdout == f"nothing has changed in `{daemon.home}/omlxd.toml`\n"
    assert text(daemon, "chat") == texts["other"], "the same name answers with the new weights"
    assert daemon.states == {"chat": "loaded", "m9": "unloaded"}
    assert "because the manifest was reloaded" in daemon.cli("why", "chat").stdout

    host, _, port = str(daemon.ready["api"]).rpartition(":")
    with daemon.chat_stream("chat", "Go on.", max_tokens=100_000) as stream:
        stream.until(has_text)
        daemon.process.terminate()  # type: ignore[union-attr]
        daemon.until_event("daemon_draining")
        refused = ask((host, int(port)), "POST", CHAT, chat_body("chat", "Hello."))
        assert (refused.status, refused.json["error"]["code"]) == (503, "shutting_down")
        assert int(refused.headers["retry-after"]) >= 1
        daemon.process.terminate()  # type: ignore[union-attr]
        assert len(errors_in(list(stream))) == 1
    assert daemon.wait() == 1, "the second signal cut it short"


def test_a_reload_names_the_models_that_come_for_it_and_those_that_make_room(
    daemon_of: Callable[..., Daemon], small: Callable[..., Path]
) -> None:
    models = {"chat": small(0), "other": small(1)}
    size_bytes = sum(file.stat().st_size for file in models["chat"].glob("*.safetensors"))
    limits = {"max_memory": size_bytes * 3 // 2}
    daemon = daemon_of(models, daemon=limits)
    daemon.control("POST", "models/chat/load")
    pinned = models | {"other": {"path": models["other"], "pin": True}}
    (daemon.home / "omlxd.toml").write_text(manifest(pinned, daemon=limits))
    reloaded = daemon.cli("reload")
    assert (reloaded.returncode, reloaded.stderr) == (0, "loaded `other`\nunloaded `chat`\n")
    assert daemon.states == {"chat": "unloaded", "other": "loaded"}
    written(daemon, chat=models["chat"])
    reloaded = daemon.cli("reload")
    assert (reloaded.returncode, reloaded.stderr) == (0, "unloaded `other`\n"), "nobody used it"
    assert "models.other removed" in reloaded.stdout


@pytest.mark.slow
def test_a_restart_keeps_the_limit_the_pins_and_what_was_loaded_and_a_kill_in_the_middle_loses_nothing(
    home_of: Callable[..., Daemon], small: Callable[..., Path], medium: Callable[..., Path]
) -> None:
    daemon = home_of({"chat": small(), "big": medium(), "idle": small(1)})
    assert daemon.start("--max-memory", "2G", "--hard-limit", "3G").returncode == 0
    for command in ("big/load", "chat/load", "chat/pin"):
        daemon.control("POST", f"models/{command}")
    daemon.control("PATCH", "limits", {"max_memory": "1G"})
    first = daemon.pid
    path = daemon.home / "omlxd.toml"
    good = path.read_text()
    path.write_text(good.replace("min_available", "min_avail"))
    refused = daemon.cli("restart")
    assert refused.returncode == 78
    assert "min_available" in refused.stderr
    assert (daemon.status["pid"], daemon.states["big"]) == (first, "loaded")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        path.write_text(good.replace("127.0.0.1:0", f"127.0.0.1:{taken.getsockname()[1]}"))
        refused = daemon.cli("restart")
        assert (refused.returncode, daemon.status["pid"]) == (1, first)
        assert "the port is taken" in refused.stderr
        assert "the daemon that runs was left as it is" in refused.stderr
    path.write_text(good)

    with daemon.chat_stream("chat", "Go on.", max_tokens=TOKENS) as stream:
        stream.until(has_text)
        restarting = in_thread(daemon.restart)
        frames = list(stream)
    assert frames[-1] == "[DONE]"
    assert not errors_in(frames)
    restarted = restarting.result()
    assert restarted.returncode == 0, restarted.stderr
    stopped, origin, pins = restarted.stderr.splitlines()[-3:]
    assert stopped == f"omlxd stopped (pid {first})"
    assert origin == "the limit was set by `omlxd limit`; the manifest says `8G`"
    assert "`chat`" in pins, "it was pinned by `omlxd pin`"
    assert "limit 1.00 GiB" in restarted.stdout
    daemon.kill()  # in the middle of loading them again
    assert daemon.start("--restore", "loaded").returncode == 0
    daemon.until_event("daemon_ready")
    assert daemon.states == {"chat": "loaded", "big": "loaded", "idle": "unloaded"}
    assert [model["pinned"] for model in daemon.control("GET", "models")["models"]] == [True, False, False]
    memory = daemon.memory
    assert (memory["soft_limit"], memory["binding"]) == (2**30, "max_memory")


@pytest.mark.slow
def test_restarts_at_once_and_a_start_that_comes_too_early_cut_nothing_short_and_leave_one_daemon(
    home_of: Callable[..., Daemon], small: Callable[..., Path]
) -> None:
    daemon = home_of({"chat": small()})
    assert daemon.start().returncode == 0
    first = daemon.pid
    with daemon.chat_stream("chat", "Go on.", max_tokens=TOKENS) as stream:
        stream.until(has_text)
        restarting = [in_thread(daemon.restart) for _ in range(3)]
        frames = list(stream)
    assert (frames[-1], errors_in(frames)) == ("[DONE]", [])
    ended = [each.result() for each in restarting]
    assert [each.returncode for each in ended] == [0, 0, 0], [each.stderr for each in ended]
    second = daemon.status["pid"]
    assert second != first
    assert all(each.stdout.startswith("omlxd answers: pid ") for each in ended)

    with daemon.chat_stream("chat", "Go on.", max_tokens=8 * TOKENS) as stream:
        stream.until(has_text)
        stopping = in_thread(lambda: daemon.cli("stop"))
        daemon.until_event("daemon_draining")
        starting = in_thread(daemon.start)
        frames = list(stream)
    assert (frames[-1], errors_in(frames)) == ("[DONE]", [])
    assert stopping.result().returncode == 0
    started = starting.result()
    assert started.returncode == 0, started.stderr
    assert f"omlxd is stopping (pid {second})" in started.stderr
    assert daemon.status["pid"] not in (first, second)
