"""`omlxd run`: the prompt's ways in, the text's way out, and every way an answer can end."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omlxd.core.errors import DoesNotFit, RequestAborted
from tests.cli.conftest import Omlxd
from tests.cli.fake_daemon import FakeDaemon, as_error, as_events, chunk

CHAT_ROUTE = "POST /v1/chat/completions"
FIGURES = {"prompt_tokens": 12, "generated_tokens": 2, "first_token_s": 0.25, "tokens_per_s": 17.5}
ANSWER = as_events("loading chat 42%", chunk("Hel"), chunk("lo ä"), chunk(finish="stop", omlxd=FIGURES))


def test_the_text_goes_to_stdout_and_ends_with_a_newline(omlxd: Omlxd, fake: FakeDaemon) -> None:
    fake.routes[CHAT_ROUTE] = ANSWER
    done = omlxd("run", "chat", "hello")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello ä\n", "")
    assert fake.seen[0][2] == {
        "model": "chat",
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0.0,
        "stream": True,
    }


def test_every_option_reaches_the_daemon(omlxd: Omlxd, fake: FakeDaemon) -> None:
    fake.routes[CHAT_ROUTE] = ANSWER
    sampling = ["--max-tokens", "5", "--temperature", "0.7", "--top-p", "0.9", "--seed", "3"]
    options = [*sampling, "--stop", "A", "--stop", "B", "--system", "Be_brief"]
    assert omlxd("run", "chat", "hello", *options).returncode == 0
    sent: dict[str, Any] = fake.seen[0][2]
    assert sent["messages"][0] == {"role": "system", "content": "Be_brief"}
    assert {key: sent[key] for key in ("max_tokens", "temperature", "top_p", "seed", "stop")} == {
        "max_tokens": 5,
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 3,
        "stop": ["A", "B"],
    }


def test_json_holds_the_whole_answer(omlxd: Omlxd, fake: FakeDaemon) -> None:
    fake.routes[CHAT_ROUTE] = ANSWER
    done = omlxd("run", "chat", "hello", "--json")
    answer = {"schema": 1, "model": "chat", "text": "Hello ä", "finish_reason": "stop", **FIGURES}
    assert json.loads(done.stdout) == answer
    assert list(json.loads(done.stdout)) == list(answer)


@pytest.mark.parametrize("arguments", [["run", "chat"], ["run", "chat", "-"]], ids=["pipe", "dash"])
def test_the_prompt_may_come_from_standard_input(omlxd: Omlxd, fake: FakeDaemon, arguments: list[str]) -> None:
    fake.routes[CHAT_ROUTE] = ANSWER
    omlxd(*arguments, stdin="two\nlines\n")
    assert fake.seen[0][2]["messages"] == [{"role": "user", "content": "two\nlines\n"}]


def test_an_empty_pipe_is_a_usage_error(omlxd: Omlxd, fake: FakeDaemon) -> None:
    done = omlxd("run", "chat", stdin="  \n")
    assert done.returncode == 2
    assert "standard input is empty" in done.stderr
    assert fake.seen == []


def test_a_model_that_does_not_fit_is_exit_five(omlxd: Omlxd, fake: FakeDaemon) -> None:
    fake.routes[CHAT_ROUTE] = as_error(DoesNotFit("`chat` needs 9.0 GiB, the limit is 8.0 GiB", hint="`omlxd limit`"))
    done = omlxd("run", "chat", "hello")
    assert (done.returncode, done.stdout) == (5, "")


def test_an_answer_cut_off_by_an_error_keeps_its_text_and_fails(omlxd: Omlxd, fake: FakeDaemon) -> None:
    error = RequestAborted("request `r7` had to give way", hint="try again").to_json()
    fake.routes[CHAT_ROUTE] = as_events(chunk("Half an"), {"error": error})
    done = omlxd("run", "chat", "hello")
    assert (done.returncode, done.stdout) == (75, "Half an\n")
    assert done.stderr == "error: request `r7` had to give way\nhint: try again\n"


def test_a_stream_that_just_stops_is_not_an_answer(omlxd: Omlxd, fake: FakeDaemon) -> None:
    fake.routes[CHAT_ROUTE] = as_events(chunk("Half"), done=False)
    done = omlxd("run", "chat", "hello")
    assert (done.returncode, done.stdout) == (69, "Half\n")
    assert done.stderr.startswith("error: the daemon closed the stream before the answer was complete\n")


def test_a_daemon_that_dies_in_the_middle_of_an_answer_is_said_to_have_died(
    omlxd: Omlxd, home: Path, fake: FakeDaemon
) -> None:
    def died(body: dict[str, Any]) -> Any:
        (home / "omlxd.sock").unlink()
        return as_events(chunk("Half"), done=False)(body)

    fake.routes[CHAT_ROUTE] = died
    done = omlxd("run", "chat", "hello")
    assert (done.returncode, done.stdout) == (69, "Half\n")
    assert done.stderr.startswith("error: the daemon died before the answer was complete\nhint: `omlxd start`")


def test_ctrl_c_ends_the_answer_and_closes_the_connection(fake: FakeDaemon, environment: dict[str, str]) -> None:
    closed = threading.Event()

    def endless(_: dict[str, Any]) -> tuple[int, str, Iterator[bytes]]:
        def pieces() -> Iterator[bytes]:
            try:
                while True:
                    yield f"data: {json.dumps(chunk('word '))}\n\n".encode()
            finally:
                closed.set()

        return 200, "text/event-stream", pieces()

    fake.routes[CHAT_ROUTE] = endless
    with subprocess.Popen(
        [sys.executable, "-m", "omlxd", "run", "chat", "hello"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in stderr
    assert closed.wait(30)


def _on_a_terminal(environment: dict[str, str], *arguments: str) -> str:
    """What a terminal shows of a command whose three streams are all it."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-m", "omlxd", *arguments], environment)
    seen = b""
    try:
        while piece := os.read(terminal, 65_536):
            seen += piece
    except OSError:
        pass  # the terminal's way of saying that the command has ended
    os.close(terminal)
    os.waitpid(pid, 0)
    return seen.decode().replace("\r\n", "\n")


def test_a_terminal_sees_the_loading_and_then_only_the_text(fake: FakeDaemon, environment: dict[str, str]) -> None:
    fake.routes[CHAT_ROUTE] = ANSWER
    seen = _on_a_terminal(environment | {"TERM": "xterm"}, "run", "chat", "hello")
    assert seen == "\r\x1b[2Kloading chat ████████░░░░░░░░░░░░ 42%\r\x1b[2KHello ä\n"


def test_a_dumb_terminal_is_not_redrawn(fake: FakeDaemon, environment: dict[str, str]) -> None:
    fake.routes[CHAT_ROUTE] = ANSWER
    assert _on_a_terminal(environment, "run", "chat", "hello") == "Hello ä\n"


def test_a_terminal_is_not_asked_for_a_prompt_when_the_answer_goes_elsewhere(
    fake: FakeDaemon, environment: dict[str, str]
) -> None:
    controller, terminal = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "omlxd", "run", "chat"],
        env=environment,
        stdin=terminal,
        capture_output=True,
        text=True,
        timeout=60,
    )
    os.close(controller)
    os.close(terminal)
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no prompt, and a chat needs a terminal")
    assert "hint: `omlxd run chat " in done.stderr


def test_a_terminal_sees_no_control_characters_and_a_pipe_the_text_as_it_is(
    omlxd: Omlxd, fake: FakeDaemon, environment: dict[str, str]
) -> None:
    fake.routes[CHAT_ROUTE] = as_events(chunk("a\x1b[2J"), chunk("b\x07"), chunk(finish="stop"))
    assert _on_a_terminal(environment, "run", "chat", "hello") == "a\\x1b[2Jb\\x07\n"
    fake.routes[CHAT_ROUTE] = as_events(chunk("a\x1b[2J"), chunk("b\x07"), chunk(finish="stop"))
    assert omlxd("run", "chat", "hello").stdout == "a\x1b[2Jb\x07\n"


def test_a_terminal_breaks_the_answer_between_words_and_a_pipe_has_it_as_it_is(
    omlxd: Omlxd, fake: FakeDaemon, environment: dict[str, str]
) -> None:
    answer = as_events(chunk("one two th"), chunk("ree fo"), chunk("ur"), chunk(finish="stop"))
    fake.routes[CHAT_ROUTE] = answer
    narrow = environment | {"TERM": "xterm", "COLUMNS": "12"}
    assert _on_a_terminal(narrow, "run", "chat", "hello") == "one two\nthree four\n"
    fake.routes[CHAT_ROUTE] = answer
    assert omlxd("run", "chat", "hello").stdout == "one two three four\n"


def test_what_is_piped_in_comes_before_the_prompt(omlxd: Omlxd, fake: FakeDaemon) -> None:
    fake.routes[CHAT_ROUTE] = ANSWER
    omlxd("run", "chat", "summarise", stdin="two\nlines\n")
    assert fake.seen[0][2]["messages"] == [{"role": "user", "content": "two\nlines\n\nsummarise"}]


def test_stats_follow_the_answer_on_the_other_stream(omlxd: Omlxd, fake: FakeDaemon) -> None:
    fake.routes[CHAT_ROUTE] = ANSWER
    done = omlxd("run", "chat", "hello", "--stats")
    assert done.stdout == "Hello ä\n"
    assert done.stderr == (
        "12 prompt tokens, 2 generated, 17.5 tokens/s, first token after 250 ms, memory 263 MiB for `chat`,"
        " 263 MiB of 400 MiB in all\n"
    )


def test_colours_only_on_a_terminal_that_wants_them(fake: FakeDaemon, environment: dict[str, str]) -> None:
    colourful = environment | {"TERM": "xterm-256color"}
    assert "\x1b[" not in _on_a_terminal(colourful, "status", "--once")
    colourful.pop("NO_COLOR")
    assert "\x1b[32mready\x1b[0m" in _on_a_terminal(colourful, "status", "--once")
