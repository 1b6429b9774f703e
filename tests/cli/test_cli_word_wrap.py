"""Text that streams to a terminal: broken between words, whatever its pieces are, and code as it is."""

from __future__ import annotations

import pyte
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len

from omlxd.cli.word_wrap import WordWrap, broken

WORDS = st.lists(st.text("ab`~漢。（👍\u0301", min_size=1, max_size=30), min_size=1)
BLANKS = st.sampled_from([" ", "  ", "\t", "\n", "\n\n", "\n    ", "\n```\n"])
PIECES = st.lists(st.one_of(st.text("ab`漢👍 ", min_size=1, max_size=30), BLANKS))
CODE = "```python\nprint('a line of code that is longer than the terminal')\n```\n"
FAMILY, THUMB = "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f44d\U0001f3fb"


@given(PIECES, st.integers(1, 40))
@example(["a\n``", "`\nb b b\n", "``", "`\n c c c"], 3)
def test_the_pieces_of_a_stream_give_the_same_lines_as_the_whole(pieces: list[str], columns: int) -> None:
    text = "".join(pieces)
    whole = broken(text, columns)
    for cut in (pieces, list(text)):
        stream = WordWrap(lambda: columns)
        assert ("".join(map(stream.feed, cut)) + stream.rest()).split("\n") == whole
    assert [char for char in text if not char.isspace()] == [
        char for line in whole for char in line if not char.isspace()
    ]


@given(WORDS, st.integers(4, 40))
def test_only_what_cannot_be_broken_is_longer_than_a_line(words: list[str], columns: int) -> None:
    for line in broken("x " + " ".join(words), columns):
        assert cell_len(line) <= columns or cell_len(line.split()[0]) > columns


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three four", ["one two", "three four"]),
        ("exactly ten", ["exactly", "ten"]),
        ("ab cdefghi", ["ab cdefghi"]),
        ("a averyveryverylongword b", ["a", "averyveryverylongword b"]),
        ("- one\n    - two three", ["- one", "    - two", "three"]),
        ("漢字漢字漢字漢字", ["漢字漢字漢", "字漢字"]),
        ("漢字漢字漢。字", ["漢字漢字", "漢。字"]),
        ("漢字漢字「漢」", ["漢字漢字", "「漢」"]),
        (f"aaaaaaaaa {FAMILY}{THUMB}", ["aaaaaaaaa", f"{FAMILY}{THUMB}"]),
        ("aaaaaa e\u0301e\u0301e\u0301", ["aaaaaa e\u0301e\u0301e\u0301"]),
        ("`a b c d e f` g", ["`a b c d e", "f` g"]),
        ("blanks  \nend   ", ["blanks", "end"]),
    ],
)
def test_where_lines_end(text: str, lines: list[str]) -> None:
    assert broken(text, 10) == lines


def test_code_keeps_its_lines_and_what_follows_it_is_broken_again() -> None:
    assert broken(f"a b c d e f\n{CODE}a b c d e f", 10) == ["a b c d e", "f", *CODE.splitlines(), "a b c d e", "f"]
    assert broken("~~~\na b c d e f ```\n~~~\n", 10) == ["~~~", "a b c d e f ```", "~~~", ""]


def test_only_the_word_that_is_not_finished_is_held_back() -> None:
    stream = WordWrap(lambda: 10)
    told = [
        ("He", "He"),
        ("llo wo", "llo"),
        ("rld", "\nworld"),
        (", a", ","),
        ("nd a", " and\na"),
        ("verylong", "verylong"),
        ("word", "word"),
        ("\n``", "\n"),
        ("` py", "``` py"),
    ]
    assert [stream.feed(piece) for piece, _ in told] == [shown for _, shown in told]
    assert stream.feed(" thon") == " thon"
    assert stream.rest() == ""


def test_a_terminal_that_changes_its_size_loses_nothing() -> None:
    columns = 20
    stream, screen = WordWrap(lambda: columns), pyte.Screen(20, 8)
    terminal = pyte.Stream(screen)
    screen.set_mode(pyte.modes.LNM)
    terminal.feed(stream.feed("some words before it is narrower, "))
    columns = 10
    screen.resize(8, 10)
    terminal.feed(stream.feed("and others then "))
    columns = 30
    screen.resize(8, 30)
    terminal.feed(stream.feed("and some more when it is wide") + stream.rest())
    shown = [line.rstrip() for line in screen.display if line.strip()]
    assert shown[-3:] == ["and others", "then and some more when it is", "wide"]
