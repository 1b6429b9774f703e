"""What has happened so far, counted from the events as they come: what `/metrics` tells beside the present state."""

from __future__ import annotations

from collections import Counter
from typing import Any

from omlxd.core.events import Event, EventName
from omlxd.core.histogram import Histogram

WAIT_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
DECISION_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_ENDS = {
    EventName.REQUEST_FINISHED: "finished",
    EventName.REQUEST_ABORTED: "aborted",
    EventName.REQUEST_FAILED: "failed",
    EventName.REQUEST_REFUSED: "refused",
}
_LOADS = {
    EventName.LOAD_FINISHED: "finished",
    EventName.LOAD_FAILED: "failed",
    EventName.LOAD_CANCELLED: "cancelled",
}


class Tallies:
    """Counters since the start of the daemon; `count` is a sink of the event bus.

    Attributes:
        requests: by (model, how it ended).
        prompt_tokens, generated_tokens: of requests that ended, by model.
        waits, parks: how often a request had to wait for its model, or was parked, by model.
        loads: by (model, how it ended).
        decisions: by (trigger, action).
        first_token_s, decision_s: how long they took.
    """

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        self.prompt_tokens: Counter[str] = Counter()
        self.generated_tokens: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.parks: Counter[str] = Counter()
        self.loads: Counter[tuple[str, str]] = Counter()
        self.decisions: Counter[tuple[str, str]] = Counter()
        self.first_token_s = Histogram(WAIT_BOUNDS_S)
        self.decision_s = Histogram(DECISION_BOUNDS_S)

    def count(self, event: Event) -> None:
        """Take one event into account; never raises."""
        model, fields = event.model or "", event.fields
        if (ended := _ENDS.get(event.event)) is not None:
            self.requests[model, ended] += 1
            self.prompt_tokens[model] += _number(fields, "prompt_tokens")
            self.generated_tokens[model] += _number(fields, "generated_tokens")
            if isinstance(first_s := fields.get("first_token_s"), float):
                self.first_token_s.add(first_s)
        elif (loaded := _LOADS.get(event.event)) is not None:
            self.loads[model, loaded] += 1
        elif event.event is EventName.REQUEST_WAITING:
            self.waits[model] += "waited_s" not in fields  # with it, it only says what it waits for by now
        elif event.event is EventName.REQUEST_PARKED:
            self.parks[model] += 1
        elif event.event is EventName.DECISION:
            self.decisions[str(fields.get("trigger")), str(fields.get("action"))] += 1
            self.decision_s.add(float(fields.get("duration_s") or 0.0))


def _number(fields: Any, name: str) -> int:
    value = fields.get(name)
    return value if isinstance(value, int) else 0
