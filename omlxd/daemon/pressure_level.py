"""How the enforcer stands: within the limit, over it and acting, or over it with nothing left to do."""

from __future__ import annotations

from collections.abc import Callable

from omlxd.core.events import Emit, Event, EventLevel, EventName
from omlxd.core.policy import Decision, Outcome
from omlxd.core.states import Level
from omlxd.engine.orders import MIB

EXHAUSTED_STEP_BYTES = 16 * MIB  # growth after which an engine that cannot be helped is looked at again

_SEVERITIES = {Level.OK: EventLevel.INFO, Level.OVER: EventLevel.WARNING, Level.EXHAUSTED: EventLevel.ERROR}


class PressureLevel:
    """Follows the decisions, and tells each transition once (R9).

    Args:
        emit: where the transitions go.
        on_exhausted: the last thing to do before memory is called unaccounted for.

    Attributes:
        now: ok, over and acting, or over with nothing left to do.
        reason: why it is not ok, in plain words; None when it is.
    """

    def __init__(self, emit: Emit, on_exhausted: Callable[[], None]) -> None:
        self.now = Level.OK
        self.reason: str | None = None
        self._emit, self._on_exhausted = emit, on_exhausted
        self._exhausted_at_bytes = 0

    @property
    def tolerated_bytes(self) -> int:
        """What cannot be helped, and a little more: up to it the engine need not stand still; 0 for nothing."""
        return self._exhausted_at_bytes + EXHAUSTED_STEP_BYTES if self._exhausted_at_bytes else 0

    def look_anew(self) -> None:
        """The limit is another: what could not be helped under the old one is judged again."""
        self._exhausted_at_bytes = 0

    def end(self) -> None:
        """Nobody watches any more; no transition is told."""
        self.now, self.reason = Level.OK, None

    def judge(self, last: Decision) -> None:
        """Take the level that the last decision of a look leaves."""
        if last.outcome is Outcome.SYSTEM_SHORT or last.rung.startswith("system"):
            self.become(Level.OVER, last)
        elif not 0 < last.soft_bytes < last.pressure_bytes:
            self.become(Level.OK, last)
        elif last.exhausted:
            if not self._exhausted_at_bytes:
                self._on_exhausted()
            self._exhausted_at_bytes = self._exhausted_at(last.pressure_bytes)
            self.become(Level.EXHAUSTED, last)
        else:
            self.become(Level.OVER, last)

    def become(self, level: Level, decision: Decision) -> None:
        """Take this level because of this decision."""
        if level is not Level.EXHAUSTED:
            self._exhausted_at_bytes = 0
        self.reason = None if level is Level.OK else decision.reason
        if level is self.now:
            return
        before, self.now = self.now, level
        fields = {
            "level_before": before.value,
            "level_now": level.value,
            "reason": decision.reason,
            "outcome": decision.outcome.value,
            "pressure_bytes": decision.pressure_bytes,
            "soft_limit_bytes": decision.soft_bytes,
        }
        self._emit(Event(EventName.LEVEL_CHANGED, _SEVERITIES[level], fields=fields))

    def _exhausted_at(self, pressure_bytes: int) -> int:
        """What cannot be helped: what runs within the tolerance is not part of it, or the tolerance would creep up."""
        before_bytes = self._exhausted_at_bytes
        if 0 < before_bytes < pressure_bytes <= before_bytes + EXHAUSTED_STEP_BYTES:
            return before_bytes
        return max(pressure_bytes, 1)
