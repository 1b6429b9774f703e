"""The arithmetic of `bench`: speeds from the tokens' times, errors of predictions, what counts as a disturbance."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.cli.bench_disturbances import Meanwhile, disturbances, summary
from omlxd.cli.bench_figures import Memory, Round, Speed, Stream, decode_memory, prompt_memory, spread

PLAN = {"kv_bytes": 910, "growth_bytes": 90}


def stream(*token_s: float, prompt: int = 100, **measured: Any) -> Stream:
    return Stream(prompt, token_s, measured)


def test_one_stream_has_the_speed_of_its_tokens_behind_the_first() -> None:
    alone = Round((stream(2.0, 2.1, 2.2, 2.3, 2.4),))
    assert alone.first_token_s == 2.0
    assert alone.prefill_tokens_per_s == 50.0
    assert alone.decode_tokens_per_s == pytest.approx(10.0)
    assert alone.gap_p99_s == pytest.approx(0.1)


def test_several_streams_count_only_while_all_of_them_decode() -> None:
    early = stream(1.0, 1.5, 2.0, 3.1, 3.2, 3.3, 3.4)  # waits for the other's prompt, and ends first
    late = stream(3.0, 3.1, 3.2, 3.3, 3.4, 3.5, 3.6)
    both = Round((early, late))
    assert both.prefill_tokens_per_s == pytest.approx(200 / 3.0)
    assert both.first_token_s == 2.0
    assert both.decode_tokens_per_s == pytest.approx(8 / 0.4)


@given(
    begins=st.lists(st.floats(0.01, 5.0), min_size=1, max_size=6),
    gap_s=st.floats(0.005, 0.5),
    tokens=st.integers(2000, 3000),
)
def test_streams_of_one_pace_have_that_pace_together_whenever_they_began(
    begins: list[float], gap_s: float, tokens: int
) -> None:
    found = Round(tuple(stream(*(begin + gap_s * number for number in range(tokens))) for begin in begins))
    expected = len(begins) / gap_s
    assert found.decode_tokens_per_s == pytest.approx(expected, rel=0.02)
    assert found.gap_p99_s == pytest.approx(gap_s, rel=0.01)


@pytest.mark.parametrize("token_s", [(1.0,), (1.0, 1.1, 1.2), (1.0, 1.001, 1.002, 1.003)])
def test_an_answer_too_short_has_no_speed(token_s: tuple[float, ...]) -> None:
    short = Round((stream(*token_s),))
    assert short.decode_tokens_per_s is None
    assert Speed(1, (short,)).to_json()["decode_tokens_per_s"] is None


def test_a_figure_over_the_rounds_is_its_median_and_its_range() -> None:
    found = spread([3.0, None, 1.0, 2.5])
    assert found is not None
    assert found.to_json() == {"median": 2.5, "min": 1.0, "max": 3.0}
    assert spread([None]) is None


@pytest.mark.parametrize(
    ("predicted", "measured", "error"), [(110, 100, 0.1), (90, 100, -0.1), (100, 100, 0.0), (5, 0, None)]
)
def test_an_error_is_positive_when_too_much_was_predicted(predicted: int, measured: int, error: float | None) -> None:
    found = Memory("weights", predicted, measured).error
    assert found == (None if error is None else pytest.approx(error))


def test_the_peak_of_a_prompt_comes_on_top_of_the_weights() -> None:
    figures = {
        "kv": {"tokens": 99, "bytes": 10, "predicted_bytes": 11},
        "transient": {"tokens": 64, "bytes": 20, "predicted_bytes": 22, "chunk_tokens": 64},
        "peak": {"tokens": 99, "bytes": 28, "predicted_bytes": 33},
    }
    kv, step, peak = prompt_memory(stream(1.0, **figures), Memory("weights", 1000, 1001))
    assert (kv.predicted_bytes, kv.measured_bytes, kv.tokens) == (11, 10, 99)
    assert (step.predicted_bytes, step.measured_bytes, step.chunk_tokens) == (22, 20, 64)
    assert (peak.predicted_bytes, peak.measured_bytes) == (1033, 1029)


def test_what_was_not_measured_has_no_line() -> None:
    weights = Memory("weights", 1000, 1001)
    assert prompt_memory(stream(1.0, kv=None, transient=None, peak=None), weights) == []
    assert decode_memory(Round((stream(1.0, model_kv_bytes=0),)), PLAN) == []
    one_by_one = Round((stream(1.0, 1.5, model_kv_bytes=500), stream(2.0, 2.5, model_kv_bytes=500)))
    assert decode_memory(one_by_one, PLAN) == []


def test_kv_caches_are_those_of_the_moment_when_the_first_stream_ended() -> None:
    (found,) = decode_memory(Round((stream(1.0, 2.0, model_kv_bytes=500), stream(1.0, 1.5, model_kv_bytes=900))), PLAN)
    assert (found.measured_bytes, found.streams, found.tokens) == (900, 2, 102)
    assert (found.predicted_bytes, found.reserved_bytes) == (910, 1000)


def test_a_summary_tells_each_thing_once_and_not_too_many_and_the_busiest_moment_of_other_programs() -> None:
    some = [Meanwhile(("a", "b"), 0.01), Meanwhile(("b", "c"), 99.0), Meanwhile(("d",), 3.0)]
    told = summary(some)
    assert told[:3] == ["a", "b", "2 more things happened"]
    assert told[3].startswith("other programs kept up to 99.0 of ")
    assert summary([Meanwhile((), 0.01)]) == summary([]) == []


def event(name: str, model: str, request: str | None = None) -> dict[str, Any]:
    return {"event": name, "model": model} | ({"request": request} if request else {})


@pytest.mark.parametrize(
    ("events", "in_flight", "told"),
    [
        ([], {}, []),
        ([event("request_started", "m", "r1"), event("request_finished", "m", "r1")], {"r1": "m"}, []),
        ([], {"r9": "other"}, ["1 other request to `other` ran"]),
        (
            [event("request_started", "m", "r2"), event("request_finished", "other", "r9")],
            {"r9": "other"},
            ["2 other requests to `m`, `other` ran"],
        ),
        ([event("load_started", "big"), event("unloaded", "big")], {}, ["`big` was loaded", "`big` was unloaded"]),
        ([event("load_started", "m"), event("unloaded", "m"), event("decision", "m")], {}, []),
        (
            [event("request_parked", "m", "r1"), event("request_parked", "m", "r1")],
            {},
            ["`m` had to park a request of this benchmark for lack of memory"],
        ),
    ],
)
def test_what_others_do_is_a_disturbance_and_told_once(
    events: list[dict[str, Any]], in_flight: dict[str, str], told: list[str]
) -> None:
    assert disturbances(events, in_flight, {"r1"}, "m") == told
