"""Why an idle model goes and another one stays, in words that are true of the whole choice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from omlxd.core.snapshot import EntrySnapshot
from omlxd.core.wording import named


class IdleChoice:
    """Some of the idle models, chosen to go, and the words for each.

    Args:
        idle: those that might go.
        chosen: those that do, one after the other.
        suffice: whether they free enough.
    """

    def __init__(self, idle: Iterable[EntrySnapshot], chosen: Sequence[EntrySnapshot], *, suffice: bool = True) -> None:
        self._chosen, self._suffice = chosen, suffice and bool(chosen)
        names, never = {entry.name for entry in chosen}, float("inf")
        self._oldest_spared_s = min((entry.last_used_s for entry in idle if entry.name not in names), default=never)
        self._newest_chosen_s = max((entry.last_used_s for entry in chosen), default=never)
        enough = "is enough" if len(chosen) == 1 else "are enough together"
        self._not_needed = f"not needed: {named(entry.name for entry in chosen)} {enough}"

    @property
    def why_they_go(self) -> str:
        """`is idle and least recently used`, or what is true of all that go when an older one is spared."""
        alone = len(self._chosen) == 1
        are = "is" if alone else "are"
        if self._newest_chosen_s <= self._oldest_spared_s:
            return f"{are} idle and least recently used"
        return f"{are} idle, and enough {'alone' if alone else 'together'}"

    def why_it_goes(self, victim: EntrySnapshot) -> str:
        """Its place in the order of use; when an older one is spared, that those which go free enough."""
        if victim.last_used_s <= self._oldest_spared_s:
            return "idle and least recently used"
        others = named(entry.name for entry in self._chosen if entry.name != victim.name)
        return f"idle, and enough together with {others}" if others else "idle, and enough alone"

    def why_it_stays(self, entry: EntrySnapshot) -> str:
        """Why an idle one is not among those that go."""
        if entry.last_used_s > self._newest_chosen_s:
            return "used more recently"
        if not self._suffice:
            return "idle, but not enough"
        return f"older, but {self._not_needed}" if entry.last_used_s < self._newest_chosen_s else self._not_needed
