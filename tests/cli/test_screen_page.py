"""The status screen drawn: on virtual screens of many sizes, with and without UTF-8, whatever the daemon says."""

from __future__ import annotations

import json
import time
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.segment import Segment

from omlxd.cli.memory_bar import memory_bar, memory_parts
from omlxd.cli.screen.feed import Look
from omlxd.cli.screen.page import LEAST_LINES, page, shared_out
from omlxd.cli.screen.state import Row, ScreenState
from omlxd.cli.sentences import decision_sentence
from omlxd.core.errors import DaemonNotRunning
from tests.cli.fake_daemon import CHAT, MIB, STATUS, model_json, status_json
from tests.fakes.terminal import seen, written

Golden = Callable[[str, str], None]
WAITING = {
    "id": "r8",
    "model": "small",
    "state": "waiting",
    "prompt_tokens": 0,
    "prefilled_tokens": 0,
    "generated_tokens": 0,
    "age_s": 0.25,
    "parks": 0,
    "waits_for": "waiting for `chat` to finish, 1.20 GiB short",
}


@pytest.fixture(autouse=True, scope="module")
def utf8_and_utc() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LC_ALL", "C.UTF-8")
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def status(**changes: Any) -> dict[str, Any]:
    """The fake daemon's status as it arrives, with a load that tells its time and requests in three states."""
    body: dict[str, Any] = json.loads(json.dumps(status_json()))
    body["models"][2] |= {"load_left_s": 3.0}
    prefill = body["requests"][0] | {"id": "r9", "state": "prefill", "prompt_tokens": 4096, "prefilled_tokens": 1024}
    body["requests"] += [prefill, WAITING]
    return body | changes


def state_of(*statuses: dict[str, Any]) -> ScreenState:
    """A screen that has seen these, a second apart."""
    now_s = 0.0
    state = ScreenState(lambda: now_s)
    for each in statuses:
        now_s += 1.0
        state.see(Look(each))
    return state


def growing(top_mib: int = 390, seconds: int = 120) -> list[dict[str, Any]]:
    """A status a second while memory grows."""
    found = []
    for second in range(seconds):
        body = status()
        body["memory"] |= dict.fromkeys(("used", "active"), (100 + (top_mib - 100) * second // seconds) * MIB)
        found.append(body)
    return found


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (140, 40), (40, 10)])
def test_what_is_drawn_does_not_change_by_accident(golden: Golden, columns: int, rows: int) -> None:
    lines = seen(page(state_of(*growing()), columns, rows), columns, rows)
    golden(f"screen-{columns}x{rows}", "".join(f"{line}\n" for line in lines))


def test_it_needs_no_utf8(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    body = status()
    body["models"][1] |= {"name": "模型", "state": "loaded"}
    state = state_of(*growing(seconds=20), body)
    state.selected = Row("model", "模型")
    state.press("u")
    text = "".join(f"{line}\n" for line in seen(page(state, 80, 24), 80, 24))
    assert text.isascii()
    golden("screen-80x24-ascii", text)


def test_without_colours_it_has_none_and_still_shows_what_is_selected() -> None:
    state = state_of(status())
    state.selected = Row("model", "chat")
    drawn = written(page(state, 80, 24), 80, 24)
    codes = {code for part in drawn.split("\x1b[")[1:] for code in part.partition("m")[0].split(";")}
    assert not codes & {str(colour) for colour in (*range(30, 38), *range(40, 48), *range(90, 98))}
    assert any(line.startswith("›  chat") for line in seen(page(state, 80, 24), 80, 24))


def test_each_part_of_memory_has_its_size_and_its_share_of_the_bar() -> None:
    body = status(models=[model_json(CHAT)])
    body["models"][0] |= {"weights_bytes": 200 * MIB, "kv_bytes": 60 * MIB}
    body["memory"] |= {"used": 340 * MIB, "active": 340 * MIB, "prefix_cache": 40 * MIB, "unaccounted": 20 * MIB}
    body["memory"] |= {"cache": 20 * MIB, "soft_limit": 400 * MIB, "hard_limit": 420 * MIB}
    lines = seen(page(state_of(body), 140, 30), 140, 30)
    for told in ("█ weights 200 MiB", "▓ KV 60.0 MiB", "▒ prefix caches 40.0 MiB", "▚ unaccounted 20.0 MiB"):
        assert told in lines[2]
    assert "▞ step 20.0 MiB" in lines[2]
    assert "░ cache 20.0 MiB" in lines[2]
    bar = lines[1].removeprefix("memory").split()[0]
    cells = {glyph: bar.count(glyph) for glyph in "█▓▒▚▞░·│┃"}
    per_mib = len(bar) / 420
    for glyph, mib in (("█", 200), ("▓", 60), ("▒", 40), ("▚", 20), ("▞", 20), ("░", 20)):
        assert abs(cells[glyph] - mib * per_mib) <= 1
    assert (cells["│"], cells["┃"]) == (1, 1)
    assert abs(bar.index("│") - 400 * per_mib) <= 1
    assert bar.endswith("┃")
    assert "340 MiB of 400 MiB (85 %)" in lines[1]


@given(
    used=st.integers(0, 2**36),
    prefix=st.integers(0, 2**34),
    unaccounted=st.integers(0, 2**34),
    kv=st.integers(0, 2**34),
    cells=st.integers(1, 150),
)
@settings(max_examples=50)
def test_the_parts_are_what_is_used_and_the_bar_is_as_long_as_it_should(
    used: int, prefix: int, unaccounted: int, kv: int, cells: int
) -> None:
    body = status()
    body["memory"] |= {"used": used, "active": used, "prefix_cache": prefix, "unaccounted": unaccounted}
    body["models"][0]["kv_bytes"] = kv
    *parts, cache = memory_parts(body)
    assert sum(part.size_bytes for part in parts) == used  # gauges are read a moment apart, and may not agree
    assert all(part.size_bytes >= 0 for part in parts)
    assert memory_bar(body, [*parts, cache], cells, utf8=True).cell_len == cells


def test_memory_over_the_limit_says_so_and_why() -> None:
    body = status()
    body["memory"] |= {"used": 500 * MIB, "active": 500 * MIB}
    body["enforcer"] |= {"level": "exhausted", "reason": "all 2 loaded models are pinned"}
    text = "\n".join(seen(page(state_of(body), 80, 24), 80, 24))
    assert "500 MiB of 400 MiB (125 %)" in text
    assert "all 2 loaded models are pinned" in text


def test_the_line_of_history_is_as_high_as_memory_was() -> None:
    lines = seen(page(state_of(*growing(400, 180)), 80, 24), 80, 24)
    line = next(line for line in lines if line.startswith("3 min"))
    heights = ["▁▂▃▄▅▆▇█".index(glyph) for glyph in line.removeprefix("3 min").split(" peak")[0].strip()]
    assert heights == sorted(heights)
    assert (heights[0], heights[-1]) == (2, 7)
    assert line.endswith("peak 310 MiB")


def test_a_load_shows_its_bar_its_bytes_and_the_time_left() -> None:
    lines = seen(page(state_of(status()), 80, 24), 80, 24)
    assert "    └ ████████░░░░░░░░░░░░ 20.2 MiB of 48.0 MiB, 3 s left" in lines


def test_who_waits_says_what_for_and_who_prefills_how_far() -> None:
    text = "\n".join(seen(page(state_of(status()), 80, 30), 80, 30))
    assert "    └ waiting for `chat` to finish, 1.20 GiB short" in text
    assert "██░░░░░░░░ 1024/4096" in text


def test_decisions_take_one_line_each_where_there_is_no_room_for_more() -> None:
    body = status(recent_decisions=STATUS.recent_decisions * 20)
    lines = seen(page(state_of(body), 80, 30), 80, 30)
    told = [line for line in lines if line.startswith("  17:40:48 unloaded `small` (48.0 MiB freed): active memory")]
    assert len(told) == 8
    assert all(len(line) == 80 and line.endswith("…") for line in told)


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_where_lines_are_free_decisions_are_told_to_their_end(columns: int) -> None:
    body = status(recent_decisions=STATUS.recent_decisions * 20)
    lines = seen(page(state_of(body), columns, 70), columns, 70)
    told = lines[lines.index("last decisions") + 1 : -1]
    whole = " ".join(" ".join(told).split())
    assert whole == " ".join(f"17:40:48 {decision_sentence(STATUS.recent_decisions[-1])}" for _ in range(8))
    assert {line[:11] for line in told if line} == {"  17:40:48 ", " " * 11}
    assert not any(line[-1:].isdigit() for line in told)


def test_the_newest_decisions_get_the_lines_that_are_free() -> None:
    body = status(recent_decisions=STATUS.recent_decisions * 20)
    lines = seen(page(state_of(body), 80, 33), 80, 33)
    told = lines[lines.index("last decisions") + 1 : -1]
    assert [line.endswith("…") for line in told] == [True] * 6 + [False, True] + [False] * 3


def test_where_lines_are_free_notes_are_told_to_their_end_before_decisions_are() -> None:
    error = "`chat` needs 61.4 MiB and pinned models hold 57.4 MiB (`small`), together more than the soft limit allows"
    models = [model_json(CHAT) | {"waits_for": None, "error": error if not at else None} for at in range(5)]
    waiting = WAITING | {"waits_for": f"waiting for `small` to be unpinned, or for a higher limit: {error}"}
    body = status(models=models, requests=[waiting])
    least = 1 + 4 + 8 + 4 + 3 + 1  # header, memory, models, requests and decisions below a blank line each, keys
    for spare, told in ((0, (1, 1, 1)), (1, (2, 1, 1)), (2, (2, 2, 1)), (4, (2, 3, 2)), (20, (2, 3, 3))):
        lines = seen(page(state_of(body), 80, least + spare), 80, least + spare)
        at = [
            next(at for at, line in enumerate(lines) if begin in line)
            for begin in ("└ `chat`", "└ waiting", "17:40:48")
        ]
        found = [next(more for more in range(1, 9) if not lines[first + more].startswith("      ")) for first in at]
        assert tuple(found) == told
        notes = " ".join(" ".join(lines[at[0] : at[0] + found[0]]).split())
        assert (error in notes) == (told[0] == 2)


def test_why_memory_is_over_the_limit_has_two_lines_where_there_is_room() -> None:
    body = status()
    reason = (
        "used memory 450 MiB is 50.0 MiB over the soft limit 400 MiB (max_memory), and all models are pinned: `chat`"
    )
    body["enforcer"] |= {"level": "exhausted", "reason": reason}
    assert reason in " ".join(" ".join(seen(page(state_of(body), 80, 24), 80, 24)).split())
    assert reason not in " ".join(" ".join(seen(page(state_of(body), 80, 19), 80, 19)).split())


def test_models_come_before_decisions_of_which_the_newest_is_always_there() -> None:
    models = [model_json(CHAT) | {"name": f"model-{number}", "waits_for": None} for number in range(9)]
    decisions = [STATUS.recent_decisions[-1] | {"victim": f"victim-{number}"} for number in range(8)]
    for rows, left in ((24, 5), (22, 3), (20, 1), (40, 8)):
        body = status(models=models, requests=[], recent_decisions=decisions)
        lines = seen(page(state_of(body), 80, rows), 80, rows)
        assert sum("model-" in line for line in lines) == 9
        told = [line for line in lines if "victim-" in line]
        assert len(told) == left
        assert "victim-7" in told[-1]


def test_a_decision_that_is_cut_is_seen_to_go_on_without_utf8_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    lines = seen(page(state_of(status()), 80, 24), 80, 24)
    at = next(at for at, line in enumerate(lines) if line.startswith("  17:40:48 unloaded"))
    told = lines[-2]
    assert at == len(lines) - 3
    assert len(told) == 80
    assert told.endswith("...")


def test_sixty_models_are_cut_with_a_count_and_scroll_with_the_selection() -> None:
    models = [model_json(CHAT) | {"name": f"model-{number}", "state": "unloaded"} for number in range(60)]
    models[50] |= {"state": "loaded"}
    state = state_of(status(models=models, requests=[], recent_decisions=[]))
    lines = seen(page(state, 80, 24), 80, 24)
    shown = [line.split()[0] for line in lines if "model-" in line]
    assert shown[:3] == ["model-50", "model-0", "model-1"]  # what is in memory comes first
    assert f"… {60 - len(shown)} more" in "\n".join(lines)
    for key in ("end", "up"):
        state.press(key)
    lines = seen(page(state, 80, 24), 80, 24)
    (selected,) = (line for line in lines if line.startswith("›"))
    assert "model-58" in selected
    shown = [line for line in lines if "model-" in line]
    assert f"… {59 - len(shown)} more above, 1 more below" in "\n".join(lines)


def test_wide_and_long_names_keep_the_columns_in_line() -> None:
    models = [model_json(CHAT) | {"name": name} for name in ("模型" * 40, "n" * 200, "日本語", "é" * 9, "plain")]
    lines = seen(page(state_of(status(models=models)), 80, 24), 80, 24)
    rows = [line for line in lines if line.endswith("pinned")]
    assert len(rows) == 5
    at = {sum(2 if unicodedata.east_asian_width(c) == "W" else 1 for c in row.partition("loaded")[0]) for row in rows}
    assert len(at) == 1


def test_a_name_with_control_characters_moves_nothing() -> None:
    name = "a\x1b[2J\x07\r\n\u202e\x9b2J\ud800b"
    body = status(manifest=name)
    body["models"] = [model_json(CHAT) | {"name": name, "error": name, "waits_for": name}]
    body["requests"] = [WAITING | {"id": name, "model": name, "waits_for": name}]
    body["recent_decisions"] = [{"ts": 1.0, "action": "unload", "victim": name, "reason": name}]
    state = state_of(body)
    state.selected = Row("model", name)
    state.press("u")
    drawn = written(page(state, 100, 30), 100, 30)
    for char in ("\x07", "\r", "\u202e", "\x9b", "\ud800", "\x1b[2J"):
        assert char not in drawn
    assert "\\x1b[2J" in drawn


def test_a_daemon_that_is_away_is_said_and_the_last_status_stands() -> None:
    state = state_of(status())
    state.see(Look(None, DaemonNotRunning("the daemon is not running")))
    lines = seen(page(state, 80, 24), 80, 24)
    assert lines[0] == "omlxd reconnecting… the daemon is not running (0 s)"
    assert any(line.startswith("   chat") for line in lines)
    state.see(Look(status()))
    assert seen(page(state, 80, 24), 80, 24)[0].startswith("omlxd 0.1.0 ready")


def test_no_models_no_limit_no_backend_is_drawn_too() -> None:
    body = status(models=[], requests=[], recent_decisions=[], backend=None, api=None)
    body["memory"] |= {"soft_limit": 0, "hard_limit": 0}
    lines = seen(page(state_of(body), 80, 24), 80, 24)
    assert "no models in /home/me/.omlxd/omlxd.toml" in lines
    assert any(line.startswith("limit   none") for line in lines)


@given(
    columns=st.integers(1, 200),
    rows=st.integers(1, 60),
    names=st.lists(st.text(max_size=40), max_size=5),
    used=st.integers(0, 2**40),
    pressed=st.lists(st.sampled_from(["up", "down", "p", "u", "a", "y", "home", "end"]), max_size=6),
)
@settings(max_examples=30)
def test_every_size_is_filled_exactly_whatever_the_daemon_says(
    columns: int, rows: int, names: list[str], used: int, pressed: list[str]
) -> None:
    body = status()
    body["memory"] |= {"used": used, "active": used, "peak": used}
    body["models"] += [model_json(CHAT) | {"name": name, "waits_for": name or None} for name in names]
    state = state_of(body)
    for key in pressed:
        state.press(key)
    console = Console(width=columns, height=rows, force_terminal=True, highlight=False, markup=False, emoji=False)
    lines = console.render_lines(page(state, columns, rows), console.options.update_dimensions(columns, rows))
    assert len(lines) == rows
    assert {Segment.get_line_length(line) for line in lines} == {columns}
    assert all(segment.text.isprintable() for line in lines for segment in line)


@given(wanted=st.lists(st.integers(0, 80), min_size=1, max_size=4), room=st.integers(-3, 120))
def test_lines_are_shared_without_waste_and_never_too_many(wanted: list[int], room: int) -> None:
    given_lines = shared_out(wanted, room)
    assert sum(given_lines) <= max(0, room)
    assert all(0 <= has <= wants for has, wants in zip(given_lines, wanted, strict=True))
    assert all(not has or has >= min(wants, LEAST_LINES) for has, wants in zip(given_lines, wanted, strict=True))
    if sum(wanted) <= room:
        assert given_lines == wanted
