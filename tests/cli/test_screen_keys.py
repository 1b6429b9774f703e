"""Keys of a terminal as they arrive, in one piece or several, and what each does to the screen's state."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.cli.screen.feed import Look
from omlxd.cli.screen.keys import KeyReader
from omlxd.cli.screen.state import MESSAGE_S, Row, ScreenState, Wish
from tests.cli.test_screen_page import state_of, status

TYPED = {
    b"q": "q",
    b"\x1b[A": "up",
    b"\x1bOB": "down",
    b"\x1b[5~": "page up",
    b"\x1b[1;5H": "",
    b"\x1b[H": "home",
    b"\x1b[4~": "end",
    b"\x03": "ctrl-c",
    b"\r": "enter",
    b"\xc3\xa4": "",
    b"\x1b[97;5u": "",
}


@pytest.mark.parametrize(("typed", "name"), TYPED.items())
def test_a_key_has_a_name_or_means_nothing(typed: bytes, name: str) -> None:
    assert KeyReader().feed(typed) == ([name] if name else [])


@given(st.lists(st.sampled_from(list(TYPED)), max_size=8), st.randoms())
def test_keys_may_come_in_any_pieces(keys: list[bytes], random: Any) -> None:
    typed, found, reader = b"".join(keys), [], KeyReader()
    while typed:
        length = random.randint(1, len(typed))
        found += reader.feed(typed[:length])
        typed = typed[length:]
    assert found == [TYPED[key] for key in keys if TYPED[key]]
    assert not reader.pending


def test_the_escape_key_is_one_when_nothing_follows() -> None:
    reader = KeyReader()
    assert reader.feed(b"\x1b") == []
    assert reader.pending
    assert reader.flush() == ["escape"]
    assert reader.feed(b"\x1b[") == []
    assert reader.flush() == []
    assert reader.feed(b"\x1bq") == ["escape", "q"]


@given(st.binary(max_size=200))
def test_no_bytes_are_too_strange(typed: bytes) -> None:
    reader = KeyReader()
    assert all(reader.feed(typed))
    reader.flush()
    assert not reader.pending


def pressed(state: ScreenState, *keys: str) -> list[Wish]:
    return [wish for key in keys if (wish := state.press(key)) is not None]


def test_the_arrows_go_through_models_and_requests_and_stop_at_the_ends() -> None:
    state = state_of(status())
    pressed(state, "down")
    assert state.selected == Row("model", "chat")
    pressed(state, "up")
    assert state.selected == Row("model", "chat")
    pressed(state, "end", "down")
    assert state.selected == Row("request", "r8")
    pressed(state, "home", "page down")
    assert state.selected == Row("request", "r8")
    pressed(state, "escape")
    assert state.selected is None
    pressed(state, "k")
    assert state.selected == Row("request", "r8")


def test_p_pins_what_is_not_pinned_and_unpins_what_is() -> None:
    state = state_of(status())
    assert pressed(state, "down", "p") == [Wish("unpin", "chat")]
    assert pressed(state, "down", "p") == [Wish("pin", "big")]


def test_what_may_cost_something_is_asked_about_and_only_y_or_enter_means_yes() -> None:
    state = state_of(status())
    assert pressed(state, "down", "u") == []
    assert state.question == Wish("unload", "chat", pinned=True)
    assert state.question.question == "`chat` is pinned; unload it all the same?"
    assert pressed(state, "n") == []
    assert state.question is None
    assert pressed(state, "y") == []
    assert pressed(state, "u", "y") == [Wish("unload", "chat", pinned=True)]
    assert pressed(state, "down", "u") == []
    assert state.question is not None
    assert state.question.question == "unload `big`?"
    assert pressed(state, "n") == []
    assert pressed(state, "end", "a", "enter") == [Wish("abort", "r8")]
    assert pressed(state, "a", "q") == []
    assert state.quits


@pytest.mark.parametrize(("keys", "said"), [(("p",), "select"), (("down", "a"), "model"), (("end", "u"), "request")])
def test_a_key_that_does_not_apply_says_why(keys: tuple[str, ...], said: str) -> None:
    state = state_of(status())
    assert pressed(state, *keys) == []
    assert said in state.message_now


def test_a_model_that_is_not_loaded_is_not_asked_about() -> None:
    state = state_of(status())
    view = next(each for each in state.models if each["name"] == "chat")
    view["state"] = "unloaded"
    state.selected = Row("model", "chat")
    assert pressed(state, "u") == []
    assert (state.question, state.message_now) == (None, "`chat` is not loaded")


def test_a_message_goes_with_the_next_key_or_by_itself() -> None:
    now_s = 0.0
    state = ScreenState(lambda: now_s)
    state.tell("unloaded\x1b `chat`")
    assert state.message_now == "unloaded\\x1b `chat`"
    now_s = MESSAGE_S
    assert state.message_now == ""
    state.tell("again")
    state.press("down")
    assert state.message_now == ""


def test_a_selected_row_that_has_gone_is_no_longer_acted_upon() -> None:
    state = state_of(status())
    pressed(state, "end")
    state.see(Look(status(requests=[])))
    assert pressed(state, "a") == []
    assert state.question is None
