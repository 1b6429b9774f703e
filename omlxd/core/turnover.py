"""Whose turn it is, when models that do not fit together are in use at the same time: pure, and nothing is done here.

Without it two such models would be swapped for each request, or the one that is never idle would keep the other out.
A model in use keeps its memory for a turn: long enough that the swap is a small part of it and that those who had
gathered for it have begun to be answered, and otherwise never longer than the fairness bound after the oldest request
for another model came. Then it takes nothing new, ends what it has, and goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from omlxd.core.room import Room, RoomKind
from omlxd.core.units import format_duration
from omlxd.core.wording import named

TURN_RELOADS: Final = 8
"""A turn lasts so many times what the swap costs, unless the bound is shorter: swaps take about a ninth of the time.
It also lasts a fair share of the bound, since models that load in no time still have prompts to run."""
LEAST_SWAP_S: Final = 0.1
"""What a swap costs at the least: prompts whose KV went with the model are run again, however fast it is loaded."""
LEAST_LINGER_S: Final = 0.05
MOST_LINGER_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class WaitingLoad:
    """A load that needs others' memory.

    Attributes:
        since_s: since when its oldest request waits.
        asked_s: when the load was asked for.
        by_user: somebody asked for the model itself, and not only for an answer of it.
        wanted: whether anybody still waits for it.
        rivals: models whose loads wait for memory, this one among them.
    """

    model: str
    since_s: float
    asked_s: float
    by_user: bool = False
    wanted: bool = True
    rivals: int = 1


@dataclass(frozen=True, slots=True)
class Holder:
    """A loaded, unpinned model whose memory others may want.

    Attributes:
        held_bytes: what would come back.
        busy: somebody would lose by its eviction now.
        idle_since_s: when its last request ended.
        turn_began_s: when it was loaded.
        reload_s: what loading it again takes, as measured.
        kept: a user's own `load` brought it, and it was not used yet.
        closed_s: since when it takes nothing new; None while it does.
        parkable: what it runs could be parked, and would lose nothing but time.
        gathered: some who had gathered for it when it was loaded wait for their first token still.
        prefills_since_s: since when the engine has the youngest request that is in its prefill; None without one.
    """

    name: str
    held_bytes: int
    busy: bool
    idle_since_s: float
    turn_began_s: float
    reload_s: float
    kept: bool = False
    closed_s: float | None = None
    parkable: bool = False
    gathered: bool = False
    prefills_since_s: float | None = None

    @property
    def closed(self) -> bool:
        """Whether it takes nothing new already."""
        return self.closed_s is not None


class TurnKind(StrEnum):
    """What happens to those that hold the memory."""

    EVICT = "evict"
    CLOSE = "close"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class TurnDecision:
    """The answer of `decide_turn`.

    Attributes:
        kind: the `models` go now, the busy `models` take nothing new from now on, or everybody waits.
        why: the reason in plain words with numbers.
        until_s: when to look again even if nothing happens; None when only an event can change the answer.
    """

    kind: TurnKind
    why: str
    models: tuple[str, ...] = ()
    until_s: float | None = None


def decide_turn(
    now_s: float, load: WaitingLoad, room: Room, holders: Sequence[Holder], fair_wait_s: float
) -> TurnDecision:
    """What a load that does not fit may do about those in its way.

    Args:
        room: `evict` or `wait`, as `make_room` answered.
        holders: the models it may take memory from.
        fair_wait_s: the longest that its oldest request waits before others take nothing new.
    """
    if room.kind is RoomKind.EVICT:
        victims = [holder for holder in holders if holder.name in room.victims]
        free_s = max((_free_s(victim, load, fair_wait_s) for victim in victims), default=now_s)
        if free_s <= now_s:
            gave_way = any(victim.closed for victim in victims)
            why = f"{room.why}, after `{load.model}` had waited for its turn" if gave_way else room.why
            return TurnDecision(TurnKind.EVICT, why, room.victims)
        names = named(victim.name for victim in victims)
        why = f"{names} may be asked again: kept for another {format_duration(free_s - now_s)}"
        return TurnDecision(TurnKind.WAIT, why, until_s=free_s)
    chosen = [holder for holder in _in_the_way(holders, room.short_bytes) if holder.busy]
    closing = tuple(holder.name for holder in chosen if not holder.closed)
    if not load.wanted:
        return TurnDecision(TurnKind.WAIT, room.why)
    if not closing:
        return _overdue(now_s, load, room, chosen, fair_wait_s)
    share_s = fair_wait_s / (len(chosen) + load.rivals + 1)
    ends_s = max(_turn_ends_s(holder, load, fair_wait_s, share_s) for holder in chosen)
    if now_s < ends_s:
        return TurnDecision(TurnKind.WAIT, room.why, until_s=ends_s)
    names = named(closing)
    waited = format_duration(now_s - load.since_s)
    takes = "takes" if len(closing) == 1 else "take"
    why = f"`{load.model}` has waited {waited}: {names} {takes} nothing new until it had its turn"
    return TurnDecision(TurnKind.CLOSE, why, closing)


def _overdue(
    now_s: float, load: WaitingLoad, room: Room, leaving: Sequence[Holder], fair_wait_s: float
) -> TurnDecision:
    """What still runs after the bound has passed once more goes on later, where that is possible.

    A prefill that is cut off has been for nothing, so it is spared until it has lasted for the bound itself.
    """
    bound_s = max(fair_wait_s, MOST_LINGER_S)
    ends_s = {
        holder.name: max(holder.closed_s, holder.prefills_since_s or 0.0) + bound_s
        for holder in leaving
        if holder.parkable and holder.closed_s is not None
    }
    due = tuple(name for name, end_s in ends_s.items() if end_s <= now_s)
    if due:
        names = named(due)
        waited = format_duration(now_s - load.since_s)
        return TurnDecision(TurnKind.EVICT, f"`{load.model}` has waited {waited} and {names} still runs requests", due)
    return TurnDecision(TurnKind.WAIT, room.why, until_s=min(ends_s.values(), default=None))


def _free_s(victim: Holder, load: WaitingLoad, fair_wait_s: float) -> float:
    """When an idle model may go: ski rental, it is kept at most for as long as its reload would take."""
    if load.by_user or victim.closed:
        return victim.idle_since_s
    linger_s = _linger_s(victim.reload_s)
    ends_s = _ends_s(victim, load, fair_wait_s) if load.wanted else victim.idle_since_s + linger_s
    if victim.kept:  # its turn has not begun; but who waits for too long already waits for a moment only
        return max(ends_s, victim.turn_began_s + linger_s)
    if victim.idle_since_s <= load.asked_s:  # nobody came back to it before the load was asked for
        return victim.idle_since_s
    return min(victim.idle_since_s + linger_s, ends_s)


def _turn_ends_s(holder: Holder, load: WaitingLoad, fair_wait_s: float, share_s: float) -> float:
    """When the turn of a model in use ends: with its fair share of the bound, even if somebody has waited too long."""
    if holder.gathered:
        return max(_ends_s(holder, load, fair_wait_s, share_s), holder.turn_began_s + fair_wait_s)
    return max(_ends_s(holder, load, fair_wait_s, share_s), holder.turn_began_s + share_s)


def _ends_s(holder: Holder, load: WaitingLoad, fair_wait_s: float, share_s: float = 0.0) -> float:
    """When its turn ends: it has lasted long enough since somebody else waits, or that one waits for too long."""
    turn_s = max(TURN_RELOADS * max(holder.reload_s, LEAST_SWAP_S), share_s)
    return min(max(load.since_s, holder.turn_began_s) + turn_s, load.since_s + fair_wait_s)


def _in_the_way(holders: Sequence[Holder], short_bytes: int) -> list[Holder]:
    """Who has to go: what is idle or goes already, then those whose turn is the longest; nobody if it is not enough."""
    freed_bytes, chosen = 0, []
    for holder in sorted(holders, key=lambda each: (each.busy, not each.closed, each.turn_began_s, each.name)):
        chosen.append(holder)
        freed_bytes += holder.held_bytes
        if freed_bytes >= short_bytes:
            break
    else:
        return []
    for holder in reversed(chosen[:-1]):
        if not holder.closed and freed_bytes - holder.held_bytes >= short_bytes:
            freed_bytes -= holder.held_bytes
            chosen.remove(holder)
    return chosen


def _linger_s(reload_s: float) -> float:
    return min(max(reload_s, LEAST_LINGER_S), MOST_LINGER_S)
