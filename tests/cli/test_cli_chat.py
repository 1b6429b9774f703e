"""`omlxd run MODEL` on a terminal: a chat with the real daemon, typed into a pseudo-terminal."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest

from tests.cli.fake_daemon import FakeDaemon, as_events, chunk

OMLXD = [sys.executable, "-m", "omlxd"]
PROMPT = ">>>"
SENT = re.escape("\x1b[?2004l")  # the editor gives the terminal back: what follows is not the echo of what was typed
WAIT_S = 60
Chat = Callable[..., Any]


@pytest.fixture(scope="module")
def chat_home(tiny_model: Callable[..., Path]) -> Iterator[Path]:
    """A daemon with a model of a long context and one of a short one."""
    home = Path(tempfile.mkdtemp(prefix="omlxd-c-"))
    models = {"tiny": tiny_model(), "narrow": tiny_model(context=256)}
    tables = [f'[models.{name}]\npath = "{folder}"\naliases = ["{name[0]}"]\n' for name, folder in models.items()]
    (home / "omlxd.toml").write_text('[api]\nlisten = "off"\n' + "".join(tables))
    _omlxd(home, "start")
    yield home
    _omlxd(home, "stop", "--now")
    shutil.rmtree(home)


def _environment(home: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "PYTHONPATH", "TMPDIR")}
    terminal = {"TERM": "xterm", "NO_COLOR": "1", "LC_ALL": "C.UTF-8", "PROMPT_TOOLKIT_NO_CPR": "1"}
    return kept | terminal | {"OMLXD_HOME": str(home), "PYTHONUTF8": "1"}


def _omlxd(home: Path, *arguments: str, stdin: str | None = None) -> str:
    done = subprocess.run(
        [*OMLXD, *arguments], env=_environment(home), input=stdin or "", capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def chat(chat_home: Path) -> Iterator[Chat]:
    """`chat("tiny", "--stats")`: a terminal with a chat in it that has come to its prompt."""
    started = []

    def begin(*arguments: str, home: Path = chat_home) -> Any:
        terminal = pexpect.spawn(
            OMLXD[0],
            [*OMLXD[1:], "run", *arguments],
            env=_environment(home),
            encoding="utf-8",
            timeout=WAIT_S,
            dimensions=(40, 200),
        )
        started.append(terminal)
        terminal.expect(PROMPT)
        return terminal

    yield begin
    for terminal in started:
        terminal.close(force=True)


def _say(terminal: Any, text: str, answer: str) -> None:
    """Type, send, and wait for what is shown for it and for the next prompt."""
    terminal.send(text + "\r")
    terminal.expect(SENT)
    terminal.expect(answer)
    terminal.expect(PROMPT)


def _leave(terminal: Any) -> int:
    terminal.sendcontrol("d")
    terminal.expect(pexpect.EOF)
    terminal.close()
    return int(terminal.exitstatus)


@pytest.mark.mlx
def test_a_conversation_with_its_commands(chat: Chat, chat_home: Path) -> None:
    terminal = chat("t", "--max-tokens", "256")  # enough of them to tell a speed
    _say(terminal, "/stats", "nothing has been answered yet")
    _say(terminal, "/retry", "nothing has been asked yet")
    _say(terminal, "hello", "cut off after 256 tokens")
    first = _prompt_tokens(terminal)
    _say(terminal, "and\\\rmore", "cut off after 256 tokens")
    second = _prompt_tokens(terminal)
    assert second > first + 256  # the first exchange went along
    _say(terminal, "/retry", "cut off after 256 tokens")
    assert _prompt_tokens(terminal) == second  # in place of the answer that it had
    _say(terminal, "/forget", "1 of 2 questions and their answers are forgotten")
    _say(terminal, "/system Be brief.", "the next answer follows it")
    _say(terminal, "/system", r"Be brief\.")
    _say(terminal, "/clear", "the conversation is forgotten; the system message stays")
    _say(terminal, "/modle", "no command `/modle`; did you mean `/model`?")
    _say(terminal, "/model", r"\* tiny \(t\): loaded")
    _say(terminal, "/model nobody", "there is no model `nobody`")
    _say(terminal, "/help", "Alt-Enter")
    _say(terminal, '"""one\rtwo"""', "cut off after 256 tokens")
    assert _leave(terminal) == 0
    history = chat_home / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "+and\n+more\n" in history.read_text()


def _prompt_tokens(terminal: Any) -> int:
    terminal.send("/stats\r")
    terminal.expect(
        r"(\d+) prompt tokens, (\d+) generated, [\d.]+ tokens/s, first token after .*, memory .* for `tiny`"
    )
    found = int(terminal.match[1])
    terminal.expect(PROMPT)
    return found


@pytest.mark.mlx
def test_ctrl_c_stops_the_answer_and_the_computing_and_not_the_chat(chat: Chat, chat_home: Path) -> None:
    terminal = chat("tiny", "--max-tokens", "30000")
    terminal.send("go on for ever\r")
    terminal.expect(SENT)
    terminal.expect("[!-~]{20}")
    terminal.send("typed too early")
    terminal.sendcontrol("c")
    terminal.expect("stopped")
    terminal.expect(PROMPT)
    log = [json.loads(line) for line in _omlxd(chat_home, "logs", "--json", "-n", "20").splitlines()]
    ended = [line for line in log if line["event"] in ("request_aborted", "request_finished")][-1]
    assert ended["event"] == "request_aborted"
    assert json.loads(_omlxd(chat_home, "requests", "--json"))["requests"] == []
    terminal.sendcontrol("c")  # drops what is typed
    terminal.expect(PROMPT)
    _say(terminal, "/stats", "the answer was stopped.*1 question so far")
    assert _leave(terminal) == 0


@pytest.mark.mlx
def test_ctrl_d_in_the_middle_of_an_answer_leaves_after_it(chat: Chat) -> None:
    terminal = chat("tiny", "--max-tokens", "2000")
    terminal.send("go on\r")
    terminal.expect(SENT)
    terminal.expect("[!-~]{20}")
    terminal.sendcontrol("d")
    terminal.expect("cut off after 2000 tokens")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0


@pytest.mark.mlx
def test_a_full_context_says_what_to_type(chat: Chat) -> None:
    terminal = chat("narrow")
    _say(terminal, "x" * 300, "has a context of 256.*hint: shorten the question")
    _say(terminal, "x" * 100, r"the context is full \(256 of 256 tokens\): `/forget` drops")
    _say(terminal, "again", "hint: `/forget` drops the older half of the conversation, `/clear` all of it; `/retry`")
    _say(terminal, "/clear", "the conversation is forgotten")
    _say(terminal, "/retry", "the context is full")
    assert _leave(terminal) == 0


@pytest.mark.mlx
def test_the_chat_goes_on_when_its_model_is_unloaded_and_its_daemon_restarts(chat: Chat, chat_home: Path) -> None:
    terminal = chat("tiny", "--max-tokens", "4", "--stats")
    _say(terminal, "one", "4 generated")
    _omlxd(chat_home, "unload", "tiny")
    _say(terminal, "two", "4 generated")
    _omlxd(chat_home, "stop", "--now")
    _say(terminal, "three", "error: the daemon is not running.*the conversation is kept; `/retry` asks again")
    _omlxd(chat_home, "start")
    _say(terminal, "/retry", "4 generated")
    _say(terminal, "/stats", "3 questions so far")
    terminal.send("/exit\r")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0


@pytest.mark.mlx
def test_what_is_piped_in_comes_before_the_question(chat_home: Path) -> None:
    options = ["--max-tokens", "2", "--json"]
    asked = json.loads(_omlxd(chat_home, "run", "t", "summarise", *options, stdin="a text\n"))
    alone = json.loads(_omlxd(chat_home, "run", "t", "a text\n\nsummarise", *options))
    piped = json.loads(_omlxd(chat_home, "run", "t", *options, stdin="a text\n\nsummarise"))
    assert asked["prompt_tokens"] == alone["prompt_tokens"] == piped["prompt_tokens"] > 0


def test_a_model_that_does_not_exist_ends_the_command_before_anything_is_typed(chat_home: Path) -> None:
    terminal = pexpect.spawn(OMLXD[0], [*OMLXD[1:], "run", "nobody"], env=_environment(chat_home), encoding="utf-8")
    terminal.expect("there is no model `nobody`", timeout=WAIT_S)
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 4


@pytest.fixture
def loaded(home: Path, fake: FakeDaemon) -> FakeDaemon:
    """A stand-in that says whatever a test wants a model to say."""
    result = {"result": {"model": {"name": "chat", "weights_bytes": 1, "context_length": None}}}
    fake.routes["POST /v1/control/models/chat/load"] = lambda _: (
        200,
        "application/x-ndjson",
        iter([json.dumps(result).encode() + b"\n"]),
    )
    return fake


def test_nothing_but_text_reaches_the_terminal_and_reasoning_is_shown_and_not_remembered(
    chat: Chat, home: Path, loaded: FakeDaemon
) -> None:
    (home / "chat_history").write_bytes(b"\n# 2026-01-01 00:00:00\n+question\n" * 40_000)
    thought = {**chunk(), "choices": [{"index": 0, "delta": {"reasoning_content": "hm\x1bm"}, "finish_reason": None}]}
    pieces = [thought, chunk("ti\x1b]0;evil\x07"), chunk("tle\r"), chunk("\nnext\x9b2J"), chunk(finish="stop")]
    loaded.routes["POST /v1/chat/completions"] = as_events(*pieces)
    terminal = chat("chat", home=home)
    kept = (home / "chat_history").read_bytes()
    assert kept.startswith(b"\n# 2026")  # shortened, at the beginning of an entry
    assert len(kept) <= 2**19
    for _ in range(2):
        terminal.send("what?\r")
        terminal.expect(SENT)
        terminal.expect(PROMPT)
        assert "hm\\x1bm\r\nti\\x1b]0;evil\\x07tle\r\nnext\\x9b2J\r\n" in terminal.before
    asked = [body for method, path, body in loaded.seen if path == "/v1/chat/completions"]
    assert [message["role"] for message in asked[1]["messages"]] == ["user", "assistant", "user"]
    assert asked[1]["messages"][1]["content"] == "ti\x1b]0;evil\x07tle\r\nnext\x9b2J"
    assert _leave(terminal) == 0


def test_a_history_that_cannot_be_kept_is_told_and_a_killed_chat_leaves_the_terminal_as_it_was(
    chat: Chat, home: Path, loaded: FakeDaemon
) -> None:
    (home / "chat_history").mkdir()
    terminal = chat("chat", home=home)
    assert "what you type is not kept" in terminal.before
    terminal.kill(signal.SIGTERM)
    terminal.expect(SENT)
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 128 + signal.SIGTERM


@pytest.mark.mlx
def test_a_model_that_is_added_while_the_daemon_runs_answers_until_it_is_removed(
    chat_home: Path, tiny_model: Callable[..., Path]
) -> None:
    _omlxd(chat_home, "add", "third", str(tiny_model(context=512)), "--alias", "3rd")
    answer = json.loads(_omlxd(chat_home, "run", "3rd", "hello", "--max-tokens", "2", "--json"))
    assert (answer["model"], answer["generated_tokens"]) == ("third", 2)
    _omlxd(chat_home, "rm", "third")
    listed = json.loads(_omlxd(chat_home, "models", "--json"))["models"]
    assert [each["name"] for each in listed] == ["tiny", "narrow"]
