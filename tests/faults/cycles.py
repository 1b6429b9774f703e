"""The same over and over: whether footprint, threads and descriptors stay where they are."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import median

from tests.acceptance.harness import MIB
from tests.bench.crowd import Crowd, Habits
from tests.faults.asking import PROMPTS, ask, judge
from tests.faults.campaign import Campaign
from tests.faults.tally import Tally

FLAT_BYTES = 4 * MIB
WARM = 5


def run(campaign: Campaign) -> Iterator[Tally]:
    """Loads and unloads, and in full the soak."""
    yield _loads_and_unloads(campaign)
    if not campaign.short:
        yield _soak(campaign)


def _loads_and_unloads(campaign: Campaign) -> Tally:
    tally, daemon = Tally("load, answer, unload"), campaign.daemon
    seen = []
    for _ in range(campaign.times(30, 1)):
        for model in ("medium", "twin"):
            judge(tally, ask(daemon, model, PROMPTS[0]), campaign.right(model, PROMPTS[0]))
        seen.append((campaign.footprint_bytes(), *campaign.counts()))
        tally.times += 1
    campaign.check_base(tally)
    _check_flat(tally, seen)
    return tally


def _soak(campaign: Campaign) -> Tally:
    """A crowd with pauses in which everything is unloaded and measured."""
    tally, daemon = Tally(f"soak of {campaign.soak_s / 60:g} minutes, rounds of a crowd"), campaign.daemon
    until_s, seen = time.monotonic() + campaign.soak_s, []
    while time.monotonic() < until_s:
        crowd = Crowd(Habits(("small", "twin", "medium"), asks=3, seed=tally.times), daemon.connection).start().join()
        ends = crowd.counts()
        tally.lost += [f"{kind}: {ends[kind]}" for kind in ends.keys() - {"whole", "vanished"}]
        for model in ("small", "twin"):
            for prompt in PROMPTS:
                judge(tally, ask(daemon, model, prompt), campaign.right(model, prompt))
        seen.append((campaign.footprint_bytes(), *campaign.counts()))
        tally.times += 1
    campaign.check_base(tally)
    _check_flat(tally, seen)
    return tally


def _check_flat(tally: Tally, seen: Sequence[tuple[int, int, int]]) -> None:
    """The last third against the first, once it is warm."""
    footprints, threads, descriptors = (list(each) for each in zip(*seen, strict=True))
    first, last, most = (each / MIB for each in (footprints[0], footprints[-1], max(footprints)))
    tally.note = (
        f"footprint {first:.1f} MiB first, {last:.1f} last, {most:.1f} at most;"
        f" threads {threads[0]}, {threads[-1]}; descriptors {descriptors[0]}, {descriptors[-1]}"
    )
    warm = seen[WARM:]
    if len(warm) < 6:
        return
    third = len(warm) // 3
    for what, at, slack in (("footprint", 0, FLAT_BYTES), ("threads", 1, 0), ("descriptors", 2, 0)):
        early, late = median(each[at] for each in warm[:third]), median(each[at] for each in warm[-third:])
        if late > early + slack:
            tally.leaked.append(f"{what} grew from {early} to {late} over {len(warm)} rounds")
