"""`omlxd why` over recorded logs of a real daemon under pressure: two runs, the first killed; and requests parked."""

from __future__ import annotations

import fcntl
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omlxd.cli import happenings, lives, stories
from omlxd.cli.explain import explanation, headline
from omlxd.cli.log_lines import Log
from omlxd.cli.main import main
from omlxd.cli.sentences import event_line
from omlxd.core.events import EventName
from tests.cli.conftest import Omlxd

RECORDED = Path(__file__).parent / "recorded"
LINES = (RECORDED / "two-runs.jsonl").read_text().splitlines()
PARKED = (RECORDED / "parked.jsonl").read_text().splitlines()
NOW = 1_764_440_000.0
MANIFEST = "".join(f"[models.{name}]\n" for name in ("tiny-b", "tiny-c", "broken", "quiet"))
MANIFEST += '[models.tiny-a]\naliases = ["a"]\n'


def write(home: Path, *lines: str) -> Path:
    """The log in two files, and a manifest."""
    log = home / "logs" / "omlxd.jsonl"
    log.parent.mkdir(exist_ok=True)
    (home / "omlxd.toml").write_text(MANIFEST)
    half = len(lines) // 2
    log.with_name("omlxd.jsonl.1").write_text("".join(f"{line}\n" for line in lines[:half]))
    log.write_text("".join(f"{line}\n" for line in lines[half:]))
    return log


@contextmanager
def alive(home: Path) -> Iterator[None]:
    """As if the daemon ran: somebody holds its lock."""
    with (home / "omlxd.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ask(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Ask]:
    """`omlxd why ...` without a process of its own: its exit status, stdout and stderr."""
    for key, value in {"OMLXD_HOME": str(home), "NO_COLOR": "1", "COLUMNS": "100", "TZ": "UTC"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("LC_ALL", raising=False)
    monkeypatch.setenv("LANG", "C.UTF-8")
    time.tzset()

    def why(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["why", *arguments])
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    yield why
    monkeypatch.undo()
    time.tzset()


def told(ask: Ask, *arguments: str) -> str:
    """What `why` says, without how long ago that was."""
    status, out, err = ask(*arguments)
    text = re.sub(r" \((?:just now|\d+ [a-z]+ ago)\)", " (... ago)", out)
    return f"$ omlxd why {' '.join(arguments)}".rstrip() + f"\n{text}{err}[{status}]\n\n"


QUESTIONS = {
    "last": [(), ("-n", "3"), ("--run", "1"), ("d3",), ("d1",), ("d1", "--run", "1")],
    "models": [("tiny-a",), ("a", "-n", "2"), ("tiny-b",), ("tiny-c",), ("broken",), ("quiet",)],
    "earlier": [("tiny-b", "--run", "1"), ("tiny-c", "--run", "1"), ("tiny-a", "--run", "0")],
    "requests": [("r1",), ("r2",), ("r3",), ("chatcmpl-r4",), ("r1", "--run", "1")],
    "unknown": [("tinya",), ("r99",), ("d99",), ("r3", "--run", "0"), ("d1", "--run", "7"), ("7",)],
}


@pytest.mark.parametrize("questions", QUESTIONS)
def test_the_answers_over_a_recorded_log(
    ask: Ask, home: Path, golden: Callable[[str, str], None], questions: str
) -> None:
    write(home, *LINES)
    with alive(home):
        golden(f"why-{questions}", "".join(told(ask, *question) for question in QUESTIONS[questions]))


def test_while_a_load_waits_it_says_for_whom_and_who_waits_for_it(
    ask: Ask, home: Path, golden: Callable[[str, str], None]
) -> None:
    waits = next(at for at, line in enumerate(LINES) if '"load_waiting"' in line)
    write(home, *LINES[: waits + 1])
    with alive(home):
        golden("why-waiting", told(ask, "tiny-c") + told(ask, "r4") + told(ask, "r3"))


def test_a_parked_request_s_life_and_the_decisions_that_cost_it_time(
    ask: Ask, home: Path, golden: Callable[[str, str], None]
) -> None:
    write(home, *PARKED)
    with alive(home):
        golden("why-parked", "".join(told(ask, *question) for question in (("r2",), ("r5",), ("d2",), ("tiny-c",))))


def test_a_request_that_is_parked_now_says_why(ask: Ask, home: Path) -> None:
    parked = next(at for at, line in enumerate(PARKED) if '"request_parked"' in line)
    write(home, *PARKED[: parked + 1])
    with alive(home):
        said = " ".join(ask("r5")[1].split())
        assert said.startswith("r5 to `tiny-c` is parked since ")
        assert "by d2, to go on when there is memory for it" in said
        assert "was parked after 91 tokens by decision d2" in ask("tiny-c")[1]
    write(home, *PARKED[: parked + 2])
    with alive(home):
        said = ask("tiny-c", "-n", "3")[1].split("\n\n")[-1]
        assert said.index("d2: parked r5") < said.index("was parked after 91 tokens by decision d2")


def test_after_a_kill_it_says_that_the_daemon_ended_without_a_word(
    ask: Ask, home: Path, golden: Callable[[str, str], None]
) -> None:
    waits = next(at for at, line in enumerate(LINES) if '"load_waiting"' in line)
    log = write(home, *LINES[: waits + 1])
    log.write_text(log.read_text() + '{"ts": 17644')
    golden("why-killed", told(ask, "tiny-b") + told(ask, "tiny-c") + told(ask, "r3"))


def test_json_gives_the_answer_and_the_records(ask: Ask, home: Path) -> None:
    write(home, *LINES)
    found = json.loads(ask("a", "--json")[1])
    assert (found["schema"], found["about"]) == (1, {"kind": "model", "name": "tiny-a"})
    assert "it was unloaded" in found["answer"]
    assert found["run"]["ago"] == 1
    assert [decision["decision"] for decision in found["decisions"]] == ["d5"]
    assert found["events"] == sorted(found["events"], key=lambda event: event["ts"])
    assert {event["event"] for event in found["events"]} >= {"load_finished", "unloaded", "decision"}
    last = json.loads(ask("--json", "-n", "2")[1])
    assert [decision["decision"] for decision in last["decisions"]] == ["d1", "d5"]


def test_without_a_decision_nothing_has_had_to_give_way(ask: Ask, home: Path) -> None:
    write(home, *LINES[:6])
    status, out, err = ask()
    assert (status, err) == (0, "")
    assert out.startswith("nothing has had to give way since the daemon started at ")
    assert json.loads(ask("--json")[1])["decisions"] == []


def test_a_last_decision_of_an_earlier_run_is_said_to_be_that_unless_that_run_was_asked_for(
    ask: Ask, home: Path
) -> None:
    second = [at for at, line in enumerate(LINES) if '"daemon_starting"' in line][1]
    write(home, *LINES[: second + 2])
    note = "nothing has had to give way since: this is of an earlier run of the daemon (1 before the newest)\n"
    status, out, err = ask()
    assert (status, out.startswith("d"), err) == (0, True, note)
    assert ask("--run", "1")[1:] == (out, "")
    write(home, *LINES)
    assert ask()[2] == ""


def test_a_limit_that_cannot_be_kept_comes_first(ask: Ask, home: Path) -> None:
    over = {"ts": NOW, "event": "level_changed", "level_now": "exhausted", "reason": "all 2 loaded models are pinned"}
    write(home, *LINES, json.dumps(over))
    assert "nothing is left to do: all 2 loaded models are pinned" in ask()[1].replace("\n", " ")


def test_without_a_log_it_says_so(omlxd: Omlxd) -> None:
    done = omlxd("why", "tiny-a")
    assert (done.returncode, done.stdout) == (1, "")
    assert "hint: `omlxd start`" in done.stderr


def test_it_wraps_to_the_width_that_it_has_and_keeps_numbers_with_their_units(
    ask: Ask, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(home, *LINES)
    for columns in (60, 80, 140):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = ask("tiny-b")[1].splitlines()
        assert max(map(len, lines)) <= columns
        assert not any(re.match(r"\s+[KMG]?i?B\b", line) for line in lines)


def test_in_a_c_locale_it_is_ascii(omlxd: Omlxd, home: Path) -> None:
    write(home, *LINES)
    assert omlxd("why", "d2", LC_ALL="C").stdout.isascii()


def test_what_was_weighed_shows_what_a_request_would_free_and_what_a_model_holds() -> None:
    weighed = [
        {"model": "a", "chosen": True, "why": "newest", "weights_bytes": 2**30, "request": "r2", "frees_bytes": 2**20},
        {"model": "b", "chosen": False, "why": "busy", "weights_bytes": 2**30, "request": None, "frees_bytes": None},
    ]
    parts = {part.label: part.lines for part in explanation({"candidates": weighed}, (None, None), NOW)}
    assert parts["weighed"] == ("→ r2 of `a`  1.00 MiB  chosen: newest", "  `b`        1.00 GiB  left alone: busy")


@pytest.mark.parametrize(
    ("origin", "said"),
    [("limit", "omlxd limit"), ("command_line", "--max-memory"), ("manifest", "max_memory"), (None, "max_memory")],
)
def test_what_was_seen_names_who_had_set_the_limit(origin: str | None, said: str) -> None:
    decision = {"soft_limit_bytes": 2**30, "binding": "max_memory", "limit_origin": origin, "before_bytes": 2**31}
    parts = {part.label: part.lines for part in explanation(decision, (None, None), NOW)}
    assert parts["seen"] == (f"used memory 2.00 GiB, soft limit 1.00 GiB (set by {said})",)


def test_a_need_that_came_when_the_limit_was_passed_is_told_apart_from_what_had_to_be_freed() -> None:
    decision = {"for_model": "c", "need_bytes": 6 * 2**20, "short_bytes": 8 * 2**20}
    parts = {part.label: part.lines for part in explanation(decision, (None, None), NOW)}
    passed = "8.00 MiB had to be freed for it, since 2.00 MiB were already over the limit"
    assert f"`c` needed 6.00 MiB; {passed}" in parts["seen"]


def finished(at: float, **more: Any) -> str:
    told = {"event": "request_finished", "model": "tiny-a", "request": "r1", "finish_reason": "length"}
    return json.dumps({"ts": NOW + at, "generated_tokens": 12, "age_s": at, **told, **more})


def test_a_request_that_a_decision_cut_ended_early_and_the_decision_comes_first(ask: Ask, home: Path) -> None:
    cut = {"event": "decision", "decision": "d1", "action": "cut_short", "victim": "tiny-a", "requests": ["r1"]}
    decision = json.dumps({"ts": NOW + 2.5, **cut, "reason": "the next block would pass the hard limit"})
    runs = json.dumps({"ts": NOW + 1, "event": "request_started", "model": "tiny-a", "request": "r1", "waited_s": 1})
    write(home, LINES[0], runs, finished(2, decision="d1", reason="the next block would pass it"), decision)
    with alive(home):
        said = ask("r1")[1]
    answer, life = " ".join(said.split()), said.split("\n\n")[-1]
    assert answer.startswith("r1 to `tiny-a` ended early at ")
    assert "by d1 after 2 s, with the text it had (12 tokens)" in answer
    assert "ended well" not in answer
    assert life.index("d1: cut short an answer of `tiny-a`") < life.index(
        "ended early with the text it had (12 tokens)"
    )


def test_a_request_that_could_not_go_on_ended_early_and_says_why(ask: Ask, home: Path) -> None:
    write(home, LINES[0], finished(2, reason="a prompt of 1985 tokens needs 9.32 MiB"))
    with alive(home):
        answer = " ".join(ask("r1")[1].split())
    assert "with the text it had (12 tokens), because a prompt of 1985 tokens needs 9.32 MiB" in answer
    assert "ended well" not in answer
    write(home, LINES[0], finished(2))
    with alive(home):
        assert "ended well" in ask("r1")[1]


# Whatever a log holds

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["tiny-a", "r1", "d1", "unload", "park", "load", "limit", 10**400, 1e308, -1]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["model", "why", "chosen"]), inner),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [
        *("ts", "level", "event", "model", "request", "decision", "victim", "for_model", "for_request", "requests"),
        *("candidates", "reason", "error", "evicted", "load_s", "before_bytes", "after_bytes", "soft_limit_bytes"),
        *("seen", "duration_s", "age_s", "waited_s", "level_now", "action", "trigger", "rung"),
    ]
)
TIMES = st.floats(min_value=0, max_value=4e9) | VALUES
RECORDS = st.builds(
    lambda event, ts, odd, ids: {"event": event, "ts": ts, **ids, **odd},
    st.sampled_from([name.value for name in EventName]),
    TIMES,
    st.dictionaries(KEYS, VALUES, max_size=6),
    st.sampled_from([{}, {"model": "tiny-a"}, {"request": "r1"}, {"decision": "d1", "victim": "tiny-a"}]),
)
RUBBISH = st.binary(max_size=40) | st.sampled_from([b"[" * 5_000, b'{"event": "decision"', b"null", b"\x00" * 10])
LOG_LINES = st.lists(
    RECORDS.map(lambda record: json.dumps(record).encode())
    | RUBBISH
    | st.sampled_from([line.encode() for line in LINES]),
    max_size=20,
)


def warped(value: Any, odd: Any, *, only: type) -> Any:
    """The value with everything of this type in it replaced."""
    if isinstance(value, dict):
        return {key: each if key == "event" else warped(each, odd, only=only) for key, each in value.items()}
    if isinstance(value, list):
        return [warped(each, odd, only=only) for each in value]
    return odd if type(value) is only else value


@pytest.mark.parametrize(
    "odd", [float("nan"), float("inf"), -(10**400), 1e300, "x\x1b[2J\n", None, [[]], {"a": {}}, True]
)
@pytest.mark.parametrize("only", [int, float, str])
def test_odd_values_where_numbers_and_words_should_be_make_sentences_all_the_same(odd: Any, only: type) -> None:
    for line in (*LINES, *PARKED):
        record = warped(json.loads(line), odd, only=only)
        assert event_line(record).isprintable()
        if record["event"] == EventName.DECISION:
            assert headline(record, NOW).isprintable()
            for part in explanation(record, (record, record), NOW):
                assert all(text.isprintable() for text in part.lines)


@given(LOG_LINES, st.booleans())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_log_makes_it_fail(tmp_path: Path, lines: list[bytes], is_alive: bool) -> None:
    path = tmp_path / "omlxd.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    answers: list[tuple[str, stories.Story, Any]] = []
    for ago in (None, 1):
        answers += [
            ("", stories.of_decisions(Log(path), 2, ago), None),
            ("d1", stories.of_decision(Log(path), "d1", ago), None),
            ("tiny-a", stories.of_model(Log(path), "tiny-a", ago), lives.of_model),
            ("r1", stories.of_request(Log(path), "r1", ago), lives.of_request),
        ]
    for name, story, answer in answers:
        if answer is not None:
            text = answer(name, story, alive=is_alive, now=NOW).text
            assert text.isprintable()
        for at, text in happenings.happenings(name, story, 5, lives.arrived_at(story, name)):
            assert text.isprintable()
            assert happenings.when(at, NOW)
        for decision in story.decisions:
            assert headline(decision, NOW).isprintable()
            for part in explanation(decision, stories.loads_around(Log(path), decision), NOW):
                assert all(line.isprintable() for line in part.lines)
