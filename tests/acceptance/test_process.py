"""The daemon as a process: how it ends with work in flight, what it leaves, and how it comes back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acceptance.harness import Daemon, Lines, errors_in, has_text, in_thread

pytestmark = pytest.mark.mlx

LONG_PROMPT = "tell me more " * 1500


def decoding(daemon: Daemon) -> Lines:
    stream = daemon.chat_stream("chat", "Go on.", max_tokens=20_000)
    stream.until(has_text)
    return stream


def prefilling(daemon: Daemon) -> Lines:
    stream = daemon.chat_stream("chat", LONG_PROMPT, max_tokens=8)
    while not (seen := daemon.requests) or seen[0]["state"] != "prefill":
        pass
    return stream


def loading(daemon: Daemon) -> Lines:
    """The first load of a process imports mlx-lm, which takes longer than everything else here."""
    stream = daemon.load_stream("other")
    stream.until(lambda line: line["progress"]["state"] == "loading")
    return stream


@pytest.mark.parametrize("work", [decoding, prefilling])
def test_a_stop_with_a_request_in_flight_ends_it_with_one_error_and_the_process_with_0(
    work: Callable[[Daemon], Lines], daemon_of: Callable[..., Daemon], small: Callable[..., Path]
) -> None:
    daemon = daemon_of({"chat": small()}, daemon={"drain_timeout": "0s"})
    daemon.control("POST", "models/chat/load")
    with work(daemon) as stream:
        daemon.process.terminate()
        frames = list(stream)
    if stream.response.status == 200:
        (error,) = errors_in(frames)
        assert frames[-1] == "[DONE]"
    else:
        assert stream.response.status == 503
        (error,) = errors_in(frames)
    assert error["code"] == "request_aborted"
    assert "shutting down" in error["message"]
    assert daemon.wait() == 0
    assert not (daemon.home / "omlxd.sock").exists()
    assert daemon.log()[-1]["event"] == "daemon_stopped"
    assert not (daemon.home / "test.err").read_text()


def test_a_stop_with_a_load_in_flight_ends_it_with_one_error_and_the_process_with_0(
    daemon_of: Callable[..., Daemon], medium: Callable[..., Path]
) -> None:
    daemon = daemon_of({"other": medium()})
    with loading(daemon) as stream:
        daemon.process.terminate()
        end = list(stream)[-1]
    assert end["error"]["code"] in ("shutting_down", "load_cancelled")
    assert daemon.wait() == 0
    assert not (daemon.home / "test.err").read_text()


def test_a_stop_lets_a_short_answer_finish(daemon_of: Callable[..., Daemon], small: Callable[..., Path]) -> None:
    daemon = daemon_of({"chat": small()})
    daemon.control("POST", "models/chat/load")
    with daemon.chat_stream("chat", "Go on.", max_tokens=200) as stream:
        stream.until(has_text)
        stopped = in_thread(lambda: daemon.cli("stop"))
        frames = list(stream)  # meanwhile: nobody waits for long at the end for a client that does not read
    assert frames[-2]["choices"][0]["finish_reason"] == "length"
    assert stopped.result().returncode == 0
    assert daemon.wait() == 0


def test_a_stop_now_ends_a_running_request_at_once(
    daemon_of: Callable[..., Daemon], small: Callable[..., Path]
) -> None:
    daemon = daemon_of({"chat": small()})
    daemon.control("POST", "models/chat/load")
    with decoding(daemon) as stream:
        stopped = in_thread(lambda: daemon.cli("stop", "--now"))
        assert len(errors_in(list(stream))) == 1
    assert stopped.result().returncode == 0
    assert daemon.wait() in (0, 1)


@pytest.mark.slow
def test_after_kill_9_in_the_middle_of_an_answer_the_next_start_works_at_once(
    home_of: Callable[..., Daemon], small: Callable[..., Path]
) -> None:
    daemon = home_of({"chat": small()})
    started = daemon.start()
    assert started.returncode == 0, started.stderr
    assert "omlxd answers" in started.stdout
    with decoding(daemon) as stream:
        first = daemon.pid
        daemon.kill()
        assert "[DONE]" not in list(stream), "the stream broke off; nothing may pretend that it ended"
    again = daemon.start()
    assert again.returncode == 0, again.stderr
    assert daemon.pid != first
    assert daemon.chat("chat", "Hello.", max_tokens=4).status == 200
    assert daemon.cli("stop").returncode == 0
    assert daemon.cli("status").returncode == 3


def test_a_second_start_is_refused_and_the_first_goes_on(
    home_of: Callable[..., Daemon], small: Callable[..., Path]
) -> None:
    daemon = home_of({"chat": small()})
    assert daemon.start().returncode == 0
    first = daemon.pid
    assert daemon.chat("chat", "Hello.", max_tokens=4).status == 200
    again = daemon.cli("start")
    assert again.returncode == 1
    assert str(first) in again.stderr
    assert "hint: " in again.stderr
    assert daemon.status["pid"] == first
    assert daemon.states == {"chat": "loaded"}
    assert daemon.cli("stop").returncode == 0
