"""The list of faults, and how they are run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.faults import cycles, descriptors, disk, garbage, kills, manifests, steps, weights
from tests.faults.campaign import Campaign
from tests.faults.tally import Tally


@dataclass(frozen=True, slots=True)
class Fault:
    """One file of this package."""

    name: str
    what: str
    run: Callable[[Campaign], Iterator[Tally]]


FAULTS = (
    Fault("kills", "kill -9 at random points, and the next start", kills.run),
    Fault("steps", "exceptions and lack of memory inside the engine's steps", steps.run),
    Fault("disk", "a full disk under the log and the state file", disk.run),
    Fault("descriptors", "no file descriptor left", descriptors.run),
    Fault("garbage", "messages that mean nothing, at both doors", garbage.run),
    Fault("weights", "model files deleted, cut or replaced under a model", weights.run),
    Fault("manifests", "the manifest rewritten ten times in a second", manifests.run),
    Fault("cycles", "loads and unloads, and a soak", cycles.run),
)


def run(fault: Fault, campaign: Campaign) -> Iterator[Tally]:
    """Its rows; in the short form the base is looked at once, after the last one."""
    last = None
    for tally in fault.run(campaign):
        if last is not None:
            yield last
        last = tally
    if last is not None:
        if campaign.short:
            campaign.check_base(last, at_last=True)
        yield last
