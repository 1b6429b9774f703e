"""What somebody waits for, in a few words: `waiting for `big` to finish, 1.20 GiB short`."""

from __future__ import annotations

from collections.abc import Iterable

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


def _waiting(blockers: Iterable[str], short_bytes: int) -> str:
    names = named(blockers)
    return (
        f"waiting for {names} to finish{_short(short_bytes)}" if names else f"waiting for memory{_short(short_bytes)}"
    )


def _short(short_bytes: int) -> str:
    return f", {format_bytes(short_bytes)} short" if short_bytes > 0 else ""
