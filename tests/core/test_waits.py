"""What waits are called: who has to finish or make way, and how much is short."""

from __future__ import annotations

import pytest

from omlxd.core.admission import Admission, AdmissionKind
from omlxd.core.room import Room, RoomKind
from omlxd.core.waits import load_waits_for, parked_waits_for, request_waits_for

GIB = 2**30


@pytest.mark.parametrize(
    ("kind", "names", "short_bytes", "said"),
    [
        (RoomKind.WAIT, ("big",), 6 * GIB // 5, "waiting for `big` to finish, 1.20 GiB short"),
        (RoomKind.WAIT, ("a", "b"), 1024, "waiting for `a`, `b` to finish, 1.00 KiB short"),
        (RoomKind.WAIT, (), GIB, "waiting for memory, 1.00 GiB short"),
        (RoomKind.EVICT, ("idle",), GIB, "waiting for `idle` to make way, 1.00 GiB short"),
    ],
)
def test_a_load_says_who_is_in_its_way(kind: RoomKind, names: tuple[str, ...], short_bytes: int, said: str) -> None:
    victims, blockers = (names, ()) if kind is RoomKind.EVICT else ((), names)
    room = Room(kind, "why", 2 * GIB, GIB, 2 * GIB, victims=victims, blockers=blockers, short_bytes=short_bytes)
    assert load_waits_for(room) == said


@pytest.mark.parametrize(
    ("binding", "blockers", "short_bytes", "said"),
    [
        ("max_memory", ("big",), GIB, "waiting for `big` to finish, 1.00 GiB short"),
        ("max_memory", ("r1",), 0, "waiting for `r1` to finish"),
        ("max_memory", (), 0, "waiting for memory"),
        ("system", (), GIB, "waiting for other programs to give memory back, 1.00 GiB short"),
    ],
)
def test_a_request_says_who_is_in_its_way(binding: str, blockers: tuple[str, ...], short_bytes: int, said: str) -> None:
    answer = Admission(AdmissionKind.WAIT, "why", binding=binding, blockers=blockers, short_bytes=short_bytes)
    assert request_waits_for(answer) == said


def test_who_is_parked_for_good_says_what_would_help() -> None:
    assert parked_waits_for((), "it is large") == "waiting for a higher limit: it is large"
    assert (
        parked_waits_for(("a", "b"), "it is large")
        == "waiting for `a` or `b` to be unpinned, or for a higher limit: it is large"
    )
