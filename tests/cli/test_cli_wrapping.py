"""Sentences on a terminal: broken between words, with code whole; and on a pipe as they are."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pexpect
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.cli import output
from omlxd.cli.sentences import write_event
from omlxd.core.errors import OmlxError
from tests.cli.conftest import Omlxd

LONG = (
    "the pinned models together take more than the limit holds, so that `omlxd limit 8G --force` is the way out of it"
)
WORDS = st.lists(
    st.one_of(st.text("abcä/", min_size=1, max_size=30), st.just("`omlxd run chat`"), st.just("a `b c`;")), min_size=1
)


class Terminal(io.StringIO):
    """A terminal with UTF-8; its width is COLUMNS."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("COLUMNS", "40"), ("TERM", "xterm"), ("LC_ALL", "C.UTF-8")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_a_line_is_broken_between_words_and_code_stays_whole() -> None:
    assert output.wrapped(LONG, Terminal()).split("\n") == [
        "the pinned models together take more",
        "  than the limit holds, so that",
        "  `omlxd limit 8G --force` is the way",
        "  out of it",
    ]


def test_a_pipe_and_a_dumb_terminal_get_the_text_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert output.wrapped(LONG, io.StringIO()) == LONG
    monkeypatch.setenv("TERM", "dumb")
    assert output.wrapped(LONG, Terminal()) == LONG


@given(WORDS)
def test_no_word_is_lost_and_only_what_cannot_be_broken_is_longer_than_a_line(words: list[str]) -> None:
    text = " ".join(words)
    lines = output.wrapped(text, Terminal()).split("\n")
    assert " ".join(line.strip() for line in lines) == text
    assert all(len(line) <= 40 for line in lines)
    assert sum(line.count("`omlxd run chat`") for line in lines) == text.count("`omlxd run chat`")


def test_what_is_longer_than_a_line_is_broken_at_its_blanks_or_not_at_all() -> None:
    path = "/" + "a" * 60
    assert output.wrapped(f"look at {path} please", Terminal()).split("\n") == ["look at", f"  {path}", "  please"]
    code = "`omlxd start --max-memory 8G --manifest models.toml`"
    assert max(map(len, output.wrapped(f"type {code}", Terminal()).split("\n"))) <= 40


def test_a_number_keeps_its_unit() -> None:
    text = "a limit is not larger than that: 12.5 MiB, and in 4 tokens it would be over it, after 300 ms or 2 min 5 s"
    lines = output.wrapped(text, Terminal()).split("\n")
    assert len(lines) > 2
    assert " ".join(line.strip() for line in lines) == text
    assert not any(line[-1].isdigit() for line in lines)


def test_an_event_is_broken_between_words_on_a_terminal_and_a_line_on_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TZ", "UTC")
    record = {"ts": 0.0, "level": "warning", "event": "load_failed", "model": "a", "error": {"message": LONG}}
    monkeypatch.setattr(sys, "stdout", shown := Terminal())
    write_event(record)
    lines = shown.getvalue().removeprefix("\x1b[33m").removesuffix("\x1b[0m\n").split("\n")
    assert lines[0].endswith(" warning load_failed      `a` could not be loaded: the pinned models")
    assert len(lines) == 3
    assert all(len(line) <= 80 for line in lines)
    assert all(line.startswith(" " * 20) for line in lines[1:])
    assert LONG in " ".join(line.strip() for line in lines)
    monkeypatch.setattr(sys, "stdout", piped := io.StringIO())
    write_event(record)
    assert piped.getvalue().endswith(f"`a` could not be loaded: {LONG}\n")
    assert piped.getvalue().count("\n") == 1


def test_lines_of_the_text_stay_lines_and_what_is_quoted_is_left_alone() -> None:
    quoted = "  | " + "a word " * 10
    text = f"it ended:\n{quoted}\n  daemon.max_memory: must be a size such as 8G"
    lines = output.wrapped(text, Terminal()).split("\n")
    assert lines == ["it ended:", quoted, "  daemon.max_memory: must be a size such", "    as 8G"]


def test_the_colour_of_a_label_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    output.report(OmlxError("x" * 33, hint=LONG))
    error, hint, *rest = shown.getvalue().splitlines()
    assert error == f"\x1b[1;31merror:\x1b[0m {'x' * 33}"
    assert hint == "\x1b[36mhint:\x1b[0m the pinned models together take"
    assert rest[0] == "  more than the limit holds, so that"


def test_doctors_remedies_are_set_below_what_was_found(omlxd: Omlxd, home: Path, environment: dict[str, str]) -> None:
    (home / "omlxd.toml").write_text('[models.chat]\npath = "/nowhere/chat"\n')
    more = {"TERM": "xterm", "OMLXD_HOME": str(home)}
    kept = {name: value for name, value in environment.items() if name != "COLUMNS"}
    command = ["-m", "omlxd", "doctor"]
    terminal = pexpect.spawn(sys.executable, command, env=kept | more, encoding="utf-8", dimensions=(24, 60))
    terminal.expect(pexpect.EOF)
    lines = terminal.before.splitlines()
    terminal.close()
    begin = next(number for number, line in enumerate(lines) if "`/nowhere/chat`" in line)
    indent = re.match(r"\S \S+ +", lines[begin])
    assert indent is not None
    assert lines[begin + 1].startswith(" " * indent.end() + "`")
    assert all(len(line) <= 60 for line in lines[begin : begin + 2])
