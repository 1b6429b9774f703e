"""The line of progress: a bar for what has a percentage, what a wait is for, and never more than one line."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.cli.output import cut, with_bar
from tests.cli.fake_daemon import CHAT, FakeDaemon, as_lines, model_json
from tests.fakes.terminal import Terminal, omlxd


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("loading big 42% of 1.20 GiB, 3 s left", "loading big ████░░░░░░ 42% of 1.20 GiB, 3 s left"),
        ("loading big 42 % of 1.20 GiB", "loading big ████░░░░░░ 42% of 1.20 GiB"),
        ("100%", "██████████ 100%"),
        ("0% done", "░░░░░░░░░░ 0% done"),
        ("250%", "██████████ 250%"),
        ("waiting for `big` to finish, 1.20 GiB short", "waiting for `big` to finish, 1.20 GiB short"),
        ("loading 100%model, what a name", "loading ██████████ 100%model, what a name"),
        ("50 %% and -3%", "██████████"[:5] + "░░░░░ 50%% and -3%"),
        ("x% y", "x% y"),
    ],
)
def test_a_percentage_gets_a_bar(text: str, shown: str) -> None:
    assert with_bar(text, 10) == shown


@given(st.text(max_size=60), st.integers(0, 40))
def test_a_line_never_takes_more_columns_than_there_are_nor_moves_the_cursor(text: str, columns: int) -> None:
    shown = cut(text, columns)
    assert sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in shown) <= columns
    assert shown.isprintable()


def test_a_load_shows_its_wait_then_its_bar_and_leaves_the_result(
    fake: FakeDaemon, environment: dict[str, str]
) -> None:
    def progress(**told: object) -> dict[str, object]:
        before = {"model": "big", "state": "loading", "done_bytes": 0, "total_bytes": 2**30, "note": None}
        return {"progress": before | told}

    fake.routes["POST /v1/control/models/big/load"] = as_lines(
        progress(state="waiting", note="waiting for `chat` to finish, 1.20 GiB short"),
        progress(done_bytes=2**29, left_s=3.0),
        {"result": {"model": model_json(CHAT), "load_s": 0.5, "evicted": []}},
    )
    terminal = {key: value for key, value in environment.items() if key != "COLUMNS"} | {"TERM": "xterm"}
    with Terminal(omlxd("load", "big"), terminal, columns=60) as shown:
        assert shown.ended() == 0
        raw = shown.raw.decode()
        assert "\r\x1b[2Kbig: waiting for `chat` to finish, 1.20 GiB short" in raw
        assert "\r\x1b[2Kloading big ██████████░░░░░░░░░░ 50% of 1.00 GiB, 3 s left" in raw
        assert shown.lines[:2] == ["loaded `chat` in 500 ms (257 MiB, pinned)", ""]
    with Terminal(omlxd("load", "big"), terminal, columns=30) as narrow:
        assert narrow.ended() == 0
        assert "\r\x1b[2Kloading big ██████████░░░░░░░\r" in narrow.raw.decode()
        assert narrow.lines[0].startswith("loaded `chat` in")
