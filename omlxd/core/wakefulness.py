"""When the machine must not fall asleep: while requests run, and a little longer; pure, without a clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wakefulness:
    """Whether sleep is held off.

    Attributes:
        held: it is.
        idle_since_s: since when no request runs, on the caller's clock; None while one does, or while nothing is held.
    """

    held: bool = False
    idle_since_s: float | None = None

    def look(self, busy: bool, now_s: float, linger_s: float) -> Wakefulness:
        """What holds now.

        Args:
            busy: whether any request runs, or waits to.
            now_s: monotonic seconds.
            linger_s: seconds that it stays held after the last request, so that a chat does not make it flap.
        """
        if busy:
            return Wakefulness(held=True)
        if not self.held:
            return self
        since_s = now_s if self.idle_since_s is None else self.idle_since_s
        return Wakefulness(True, since_s) if now_s - since_s < linger_s else Wakefulness()

    def left_s(self, now_s: float, linger_s: float) -> float | None:
        """Seconds until it is let go if nothing happens; None when only a request can change it."""
        return None if self.idle_since_s is None else max(0.0, self.idle_since_s + linger_s - now_s)
