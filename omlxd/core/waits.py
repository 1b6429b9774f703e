"""What somebody waits for, in a few words: `waiting for `big` to finish, 1.20 GiB short`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from omlxd.core.admission import Admission
from omlxd.core.room import Room, RoomKind
from omlxd.core.units import format_bytes
from omlxd.core.wording import named


def load_waits_for(room: Room) -> str:
    """What a load waits for that `make_room` found no room for."""
    if room.kind is RoomKind.EVICT:
        return f"waiting for {named(room.victims)} to make way{_short(room.short_bytes)}"
    return _waiting(room.blockers, room.short_bytes)


def request_waits_for(answer: Admission) -> str:
    """What a request at the door waits for."""
    if answer.binding == "system":
        return f"waiting for other programs to give memory back{_short(answer.short_bytes)}"
    return _waiting(answer.blockers, answer.short_bytes)


def parked_waits_for(pinned: Sequence[str], refusal: str) -> str:
    """What a parked request waits for that cannot go on under these limits, beside these pinned models."""
    unpinned = f"{' or '.join(f'`{name}`' for name in pinned)} to be unpinned, or for " if pinned else ""
    return f"waiting for {unpinned}a higher limit: {refusal}"


def waits_behind(ahead: int, model: str) -> str:
    """Why a request is not even looked at, at the door: who came before it, or what runs, comes first."""
    if not ahead:
        return f"`{model}` is loaded, but what ran before comes first to its memory"
    before = "1 request before it waits" if ahead == 1 else f"{ahead} requests before it wait"
    return f"`{model}` is loaded, but {before} for memory"


def waits_in_engine(model: str, runs: int, max_batch: int, other_prompts: int, loading: str | None) -> str | None:
    """Why the engine has not begun with a request that it has; None when nothing else is to be done before.

    Args:
        runs: requests of the model that have begun and not ended.
        max_batch: how many may.
        other_prompts: prompts of all models that the engine has yet to read, beside this one.
        loading: the model that is being loaded between their steps.
    """
    if runs >= max_batch:
        return f"`{model}` runs {runs} request{'s' if runs > 1 else ''} already, and no more at once"
    others = [f"{other_prompts} other prompt{'s' if other_prompts > 1 else ''}"] if other_prompts else []
    before = " and ".join(others + ([f"the load of `{loading}`"] if loading else []))
    return f"`{model}` is loaded, but the engine has {before} to see to as well" if before else None


def _waiting(blockers: Iterable[str], short_bytes: int) -> str:
    names = named(blockers)
    return (
        f"waiting for {names} to finish{_short(short_bytes)}" if names else f"waiting for memory{_short(short_bytes)}"
    )


def _short(short_bytes: int) -> str:
    return f", {format_bytes(short_bytes)} short" if short_bytes > 0 else ""
