"""The benchmark suite without running it: what a row says, and that each bench of the package is in the list."""

from __future__ import annotations

from pathlib import Path

import pytest

import tests.bench
from tests.bench.command_line import chosen
from tests.bench.report import Judged, Row, Spread, Target, against, alone, format_row
from tests.bench.runner import BENCHES


def test_a_row_shows_figure_ours_peer_ratio_target_and_verdict() -> None:
    row = against("tokens/s", "tok/s", [90, 100, 120], "peer", [100, 100, 100], Target(1.0, Judged.RATIO, False), "why")
    text = format_row(row)
    for part in ("tokens/s", "100 [90.0, 120] tok/s", "peer 100", "ratio 1.00 [0.900, 1.20]", "ratio ≥ 1.00", "met"):
        assert part in text
    assert text.endswith("why")


def test_a_missed_target_is_said_aloud() -> None:
    assert "NOT MET" in format_row(alone("wait", "ms", [60.0], Target(50.0)))


def test_the_ratio_is_of_each_round_and_not_of_the_medians() -> None:
    row = against("x", "ms", [1, 20, 3], "peer", [2, 10, 3])
    assert row.ratio == Spread(median=1.0, low=0.5, high=2.0, count=3)


@pytest.mark.parametrize(
    ("target", "met"),
    [
        (Target(2.0), True),
        (Target(1.9), False),
        (Target(2.9, Judged.WORST), False),
        (Target(3.0, Judged.WORST), True),
        (Target(1.0, Judged.WORST, at_most=False), True),
        (Target(1.1, Judged.WORST, at_most=False), False),
        (Target(1.0, Judged.RATIO), None),
        (None, None),
    ],
)
def test_a_target_judges_the_median_the_worst_or_the_ratio(target: Target | None, met: bool | None) -> None:
    assert Row("figure", "ms", Spread.of([3.0, 1.0, 2.0]), target=target).met is met


def test_json_carries_the_verdict_and_the_bound_in_words() -> None:
    found = alone("figure", "ms", [1.0], Target(2.0)).to_json()
    assert (found["met"], found["target"], found["ours"]["count"]) == (True, "median ≤ 2.00", 1)


def test_every_bench_of_the_package_is_in_the_list() -> None:
    folder = Path(tests.bench.__file__).parent
    files = {path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py") if _has_rows(path)}
    assert {"-".join(file.parts) for file in files} == {bench.name for bench in BENCHES}


def _has_rows(path: Path) -> bool:
    return "def run(scratch: Scratch)" in path.read_text()


def test_benches_run_in_the_suite_s_order_whatever_order_they_are_named_in() -> None:
    assert [bench.name for bench in chosen(BENCHES, ["react", "load"])] == ["load", "react"]
    assert chosen(BENCHES, []) == list(BENCHES)
    with pytest.raises(KeyError):
        chosen(BENCHES, ["unknown"])


def test_a_group_s_name_stands_for_all_of_it() -> None:
    names = [bench.name for bench in chosen(BENCHES, ["peers"])]
    assert "peers-streams" in names
    assert all(name.startswith("peers-") for name in names)
