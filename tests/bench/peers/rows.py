"""One figure of a contest as rows: a row a peer, also for those that have none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from tests.bench.peers.catalogue import PEERS, Needs
from tests.bench.peers.contest import OURS, Contest
from tests.bench.report import Row, Target, against, beside, unable

Noted = Callable[[str], str]


def rows(
    contest: Contest,
    needs: Needs,
    figure: str,
    unit: str,
    found: Mapping[str, Sequence[float]],
    *,
    target: Target | Callable[[str], Target] | None = None,
    note: Noted = lambda name: "",
    counts: bool = False,
) -> Iterator[Row]:
    """`figure` of all peers.

    Args:
        contest: who took part.
        needs: what the workload asked of them.
        found: the measurements by name, round by round.
        target: ours; of the peer's name where it is not the same beside each.
        note: of the peer's name.
        counts: they are counts: no ratio is made, since any may be 0.
    """
    make = beside if counts else against
    for peer in PEERS:
        name = peer.name
        if name in contest.absent:
            yield unable(figure, unit, found[OURS], name, contest.absent[name])
            continue
        bound = target(name) if callable(target) else target
        said = "; ".join(filter(None, (note(name), peer.remark(needs))))
        yield make(figure, unit, found[OURS], name, found[name], bound, said)
