"""Telling answer, reasoning and tool calls apart, however the text is cut into pieces."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from omlxd.core.reply import ANSWER, REASONING, TOOL_CALL, Part, ReplyFormat, ReplySplitter

THINK = {ANSWER: [("<think>", REASONING), ("<call>", TOOL_CALL)], REASONING: [("</think>", ANSWER)]}
FULL = ReplyFormat(transitions={**THINK, TOOL_CALL: [("</call>", ANSWER)]})
OPEN_ENDED = ReplyFormat(transitions={ANSWER: [("[CALLS]", TOOL_CALL)]})


def split(reply_format: ReplyFormat, *pieces: str) -> list[Part]:
    """The parts, with neighbours of one state joined."""
    splitter = ReplySplitter(reply_format)
    parts = [part for piece in pieces for part in splitter.add(piece)] + splitter.finish()
    joined: list[Part] = []
    for part in parts:
        if joined and part.state == joined[-1].state != TOOL_CALL:
            part = Part(part.state, joined.pop().text + part.text)
        joined.append(replace(part, is_open=False))
    return joined


def test_reasoning_answer_and_calls_are_told_apart() -> None:
    text = "<think>hm</think>Yes.<call>{1}</call><call>{2}</call>done"
    assert split(FULL, text) == [
        Part(REASONING, "hm"),
        Part(ANSWER, "Yes."),
        Part(TOOL_CALL, "{1}", "<call>", "</call>"),
        Part(TOOL_CALL, "{2}", "<call>", "</call>"),
        Part(ANSWER, "done"),
    ]


words = st.sampled_from(["<think>", "</think>", "<call>", "</call>", "<", "</", "a", " ", "<thin", "k>", "ll>"])


@given(text=st.lists(words, max_size=14).map("".join), cuts=st.lists(st.integers(0, 80), max_size=8))
def test_the_parts_are_the_same_however_the_text_is_cut(text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    assert "".join(pieces) == text
    assert split(FULL, *pieces) == split(FULL, text)


@given(text=st.text(alphabet="<>/acehiklnt ", max_size=40))
def test_text_without_a_whole_marker_is_the_answer_as_it_stands(text: str) -> None:
    if "<think>" not in text and "<call>" not in text:
        assert split(FULL, text) == ([Part(ANSWER, text)] if text else [])


def test_text_that_may_become_a_marker_is_held_until_it_cannot() -> None:
    splitter = ReplySplitter(FULL)
    assert splitter.add("so <") == [Part(ANSWER, "so ")]
    assert splitter.add("ca") == []
    assert splitter.add("t>") == [Part(ANSWER, "<cat>")]


def test_a_call_comes_whole_and_only_when_it_has_ended() -> None:
    splitter = ReplySplitter(FULL)
    assert [part for piece in ("<call>", '{"a', '": 1}', "</ca") for part in splitter.add(piece)] == []
    assert splitter.add("ll>!") == [Part(TOOL_CALL, '{"a": 1}', "<call>", "</call>"), Part(ANSWER, "!")]


def test_the_end_of_a_reply_inside_a_call_or_its_marker_is_told_and_no_other() -> None:
    for text, expected in (("ok <cal", [True]), ("<call>{", [True]), ("<thi", [False]), ("<call>{}</call>", [])):
        splitter = ReplySplitter(FULL)
        splitter.add(text)
        assert [part.is_open for part in splitter.finish()] == expected


def test_a_call_without_an_end_marker_goes_to_the_end() -> None:
    assert split(OPEN_ENDED, "ok[CALLS]", "[1]") == [Part(ANSWER, "ok"), Part(TOOL_CALL, "[1]", "[CALLS]")]


def test_a_reply_can_begin_in_the_reasoning_that_the_prompt_opened() -> None:
    opened = ReplyFormat(REASONING, FULL.transitions)
    assert split(opened, "why</think>so") == [Part(REASONING, "why"), Part(ANSWER, "so")]


def test_text_in_a_state_that_nobody_knows_is_left_out() -> None:
    headed = ReplyFormat("header", {"header": [("to=user|", ANSWER)], ANSWER: [("|end|", "header")]})
    assert split(headed, "to=", "user|hello|end|rest") == [Part(ANSWER, "hello")]
