"""What a chat remembers and what reaches the terminal: the pure parts."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.cli.conversation import Conversation, entered, is_complete
from omlxd.cli.safe_text import SafeText, safe

TEXT = st.text(st.sampled_from("ab\r\n\t\x1b\x07\x9b\x7f\u202e\u2066é🙂[]m;"))


@given(TEXT)
def test_no_control_character_reaches_the_terminal(text: str) -> None:
    found = safe(text)
    assert all(char in "\n\t" or unicodedata.category(char) != "Cc" for char in found)
    assert not set(found) & set("\u202e\u2066")
    harmless = "\n\té🙂"
    assert [char for char in found if char in harmless] == [char for char in text if char in harmless]


@given(st.lists(TEXT))
def test_the_pieces_of_a_stream_give_the_same_text_as_the_whole(pieces: list[str]) -> None:
    stream = SafeText()
    assert "".join(map(stream.feed, pieces)) + stream.rest() == safe("".join(pieces))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("a\r\nb\tc", "a\nb\tc"),
        ("over\rwritten", "over\\rwritten"),
        ("abc\u202etxt.exe", "abc\\u202etxt.exe"),
        ("naïve 🙂 שלום", "naïve 🙂 שלום"),
    ],
)
def test_an_escape_is_shown_and_not_obeyed(text: str, shown: str) -> None:
    assert safe(text) == shown


@pytest.mark.parametrize(
    ("typed", "complete"),
    [
        ("hello", True),
        ("", True),
        ("hello \\", False),
        ("one\\\ntwo", True),
        ('"""', False),
        ('"""one\ntwo', False),
        ('"""one\ntwo"""', True),
        ('"""one\\', False),
        ('say """', True),
    ],
)
def test_enter_sends_what_is_complete(typed: str, complete: bool) -> None:
    assert is_complete(typed) is complete


@pytest.mark.parametrize(
    ("typed", "question"),
    [
        ("  hello \n", "hello"),
        ('"""\none\n\ntwo\n"""', "one\n\ntwo"),
        ('say """x"""', 'say """x"""'),
        ('"""', '"""'),
    ],
)
def test_triple_quotes_are_not_part_of_the_question(typed: str, question: str) -> None:
    assert entered(typed) == question


def test_roles_take_turns_after_the_system_message() -> None:
    talk = Conversation("be brief", [("one", "1"), ("two", "2")])
    roles = [message["role"] for message in talk.messages("three")]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    assert talk.messages("three")[-1]["content"] == "three"


@pytest.mark.parametrize(("count", "dropped"), [(1, 1), (2, 1), (3, 2), (10, 5)])
def test_forgetting_drops_the_older_half(count: int, dropped: int) -> None:
    talk = Conversation(None, [(str(n), "a") for n in range(count)])
    assert talk.forget() == dropped
    assert [asked for asked, _ in talk.exchanges] == [str(n) for n in range(dropped, count)]
