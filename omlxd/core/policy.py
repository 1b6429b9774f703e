"""The enforcer's mind: from what is seen to the one next action, as a ladder of pure rungs.

A rung looks at the case and either says what to do (or that nothing is to be done) or passes it on with None. A policy
is a tuple of rungs, cheapest first; `decide` returns the first answer. It proposes one action only: after it the memory
is read again, at rest, and the ladder is walked again, so that one action too many never happens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from omlxd.core.case import MAX_CANDIDATES, Rung, case_of
from omlxd.core.decision import (
    AbortRequests,
    Action,
    CancelLoad,
    Decision,
    DropCache,
    Outcome,
    Park,
    TrimPrefixCaches,
    Unload,
)
from omlxd.core.graceful import GRACEFUL
from omlxd.core.memory import Policy
from omlxd.core.reference import REFERENCE
from omlxd.core.snapshot import Limits, Snapshot

__all__ = [
    "LADDERS",
    "MAX_CANDIDATES",
    "AbortRequests",
    "Action",
    "CancelLoad",
    "Decision",
    "DropCache",
    "Outcome",
    "Park",
    "TrimPrefixCaches",
    "Unload",
    "decide",
]

LADDERS: Final[Mapping[Policy, tuple[Rung, ...]]] = {Policy.REFERENCE: REFERENCE, Policy.GRACEFUL: GRACEFUL}


def decide(snapshot: Snapshot, limits: Limits, futile: frozenset[Action] = frozenset()) -> Decision:
    """The one next action for this snapshot, or a decision with `action=None` that says why there is none.

    Args:
        futile: actions that have just been taken and changed nothing; they are not proposed again.
    """
    case = case_of(snapshot, limits, futile)
    for rung in LADDERS[limits.policy]:
        decision = rung(case)
        if decision is not None and (decision.action is None or decision.action not in futile):
            return decision
    raise AssertionError("a ladder ends with a rung that always answers")
