"""Log probabilities of a text that a stop sequence may cut: each comes with its token's text, or not at all."""

from __future__ import annotations

from omlxd.daemon.told_logprobs import ToldLogprobs
from omlxd.engine.events import TokenLogprob


def one(token: int) -> tuple[TokenLogprob, ...]:
    return (TokenLogprob(token, -0.5),)


def test_those_of_text_that_is_held_back_come_with_the_text() -> None:
    told = ToldLogprobs()
    assert told.add("a", 0, one(1)) == one(1)
    assert told.add("", 1, one(2)) == ()
    assert told.add("|b", 0, one(3)) == one(2) + one(3)
    assert told.finish(is_cut=False) == ()


def test_those_of_text_that_a_stop_sequence_cut_are_left_out() -> None:
    told = ToldLogprobs()
    assert told.add("a", 0, one(1)) == one(1)
    assert told.add("", 1, one(2)) == ()
    assert told.add("", 0, one(3)) == ()
    assert told.finish(is_cut=True) == ()


def test_that_of_a_token_that_is_cut_in_its_middle_is_told() -> None:
    told = ToldLogprobs()
    assert told.add("", 2, one(1)) == ()
    assert told.add("a", 0, one(2)) == ()  # its second letter began the stop sequence
    assert told.finish(is_cut=True) == one(1)


def test_half_a_character_goes_with_the_other_half() -> None:
    told = ToldLogprobs()
    assert told.add("", 0, one(1)) == ()
    assert told.add("é", 0, one(2)) == one(1) + one(2)
    assert told.add("", 0, one(3)) == ()
    assert told.finish(is_cut=False) == one(3)


def test_what_is_told_at_the_end_of_what_was_held_brings_its_own() -> None:
    told = ToldLogprobs()
    assert told.add("", 3, one(1)) == ()
    assert told.add("abc", 0, ()) == one(1)
