"""The campaign in its short form: each fault a few times, nothing lost, nothing wrong, nothing leaked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tests.faults
from tests.bench.command_line import chosen
from tests.faults.campaign import Campaign
from tests.faults.runner import FAULTS, run
from tests.faults.tally import HEAD, Tally

pytestmark = [pytest.mark.faults, pytest.mark.mlx, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def campaign(tmp_path: Path, tiny_model: Callable[..., Path]) -> Iterator[Campaign]:
    made = Campaign(tmp_path, lambda size, seed: tiny_model("llama", size * 1_000_000, seed=seed), short=True)
    yield made
    made.close()


def check(tallies: list[Tally]) -> None:
    table = "\n".join([HEAD, *map(str, tallies)])
    print(table)
    assert tallies
    assert all(tally.clean or tally.note.startswith("left out") for tally in tallies), f"\n{table}"


def test_kill_9_at_any_moment_costs_what_was_under_way_and_nothing_else(campaign: Campaign) -> None:
    check([tally for fault in chosen(FAULTS, ["kills"]) for tally in run(fault, campaign)])


@pytest.mark.skipif(sys.platform != "linux", reason="bounds a running process by prlimit(2)")
def test_one_daemon_lives_through_all_other_faults(campaign: Campaign) -> None:
    check([tally for fault in FAULTS if fault.name != "kills" for tally in run(fault, campaign)])


def test_every_fault_of_the_package_is_in_the_list() -> None:
    folder = Path(tests.faults.__file__).parent
    head = "\ndef run(" + "campaign: Campaign)"
    with_tallies = {path.stem for path in folder.glob("*.py") if head in path.read_text()}
    assert with_tallies == {fault.name for fault in FAULTS}


def test_a_tally_counts_and_gives_its_reasons() -> None:
    tally = Tally("something", times=3, wrong=["this", "that"], note="a note")
    assert tally.clean is False
    first, *below = str(tally).splitlines()
    assert first.split()[1:] == ["3", "0", "2", "0"]
    assert below == ["    a note", "    wrong: this", "    wrong: that"]
    assert Tally("something", times=1).clean
    assert not Tally("something").clean, "what never happened proves nothing"
