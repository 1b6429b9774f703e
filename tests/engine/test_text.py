"""Streaming text and stop sequences, without a model."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from omlxd.core.reply import longest_prefix_at_end
from omlxd.engine.text import StreamText


class Pieces:
    """A detokenizer whose token `i` is the i-th piece of text."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces
        self.last_segment = ""

    def add_token(self, token: int) -> None:
        self.last_segment = self._pieces[token]

    def finalize(self) -> None:
        self.last_segment = ""


def stream(pieces: list[str], stop: tuple[str, ...]) -> tuple[str, bool]:
    text = StreamText(Pieces(pieces), stop)
    out = ""
    for token in range(len(pieces)):
        piece, stopped = text.add(token)
        out += piece
        if stopped:
            return out, True
    return out + text.finish(), False


letters = st.text(alphabet="ab", max_size=6)


@given(pieces=st.lists(letters, max_size=12), stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
@example(pieces=["a", "b", "a"], stop=["ab", "b"])
def test_streamed_text_ends_where_a_stop_sequence_first_completes(pieces: list[str], stop: list[str]) -> None:
    text, stopped = stream(pieces, tuple(stop))
    whole = "".join(pieces)
    assert stopped == any(word in whole for word in stop)
    if not stopped:
        assert text == whole
    else:
        assert whole.startswith(text)
        assert any(whole.startswith(text + word) for word in stop)
        assert not any(word in text for word in stop)


@given(pieces=st.lists(letters, max_size=12))
def test_without_stop_sequences_nothing_is_held_back(pieces: list[str]) -> None:
    text = StreamText(Pieces(pieces), ())
    assert [text.add(token)[0] for token in range(len(pieces))] == pieces


def test_text_that_may_become_a_stop_sequence_is_held_until_it_cannot() -> None:
    text = StreamText(Pieces(["one E", "N", "D!"]), ("END.",))
    assert text.add(0) == ("one ", False)
    assert text.add(1) == ("", False)
    assert text.add(2) == ("END!", False)


def test_it_tells_how_much_is_held_back() -> None:
    text, held = StreamText(Pieces(["one E", "N", "D!"]), ("END.",)), []
    for token in range(3):
        text.add(token)
        held.append(text.held_characters)
    assert held == [1, 2, 0]


@given(text=letters, stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
def test_the_held_length_is_the_longest_end_that_begins_a_stop_sequence(text: str, stop: list[str]) -> None:
    expected = max((size for word in stop for size in range(1, len(word)) if text.endswith(word[:size])), default=0)
    assert longest_prefix_at_end(text, stop) == expected
