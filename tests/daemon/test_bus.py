"""The event bus: numbers, order, memory of the last events, and listeners that come and go."""

from __future__ import annotations

import asyncio

from omlxd.core.events import Event, EventName
from omlxd.daemon.bus import EventBus
from tests.fakes.clock import on_virtual_time
from tests.fakes.pools import turns

PINNED = Event(EventName.PINNED, model="chat")


def test_events_are_numbered_dated_kept_and_handed_on_in_order() -> None:
    written: list[Event] = []
    bus = EventBus(clock=lambda: 12.5, sinks=(written.append,))
    for _ in range(3):
        bus.emit(PINNED)
    assert [event.seq for event in written] == [1, 2, 3]
    assert written == bus.since(0)
    assert bus.since(2) == written[2:]
    assert written[0].to_json() == {"seq": 1, "ts": 12.5, "level": "info", "event": "pinned", "model": "chat"}


def test_only_the_last_events_are_kept() -> None:
    bus = EventBus(keep=10)
    for _ in range(25):
        bus.emit(PINNED)
    assert [event.seq for event in bus.since(0)] == list(range(16, 26))
    assert bus.last_seq == 25


@on_virtual_time
async def test_a_listener_gets_what_was_kept_then_what_comes_and_ends_with_the_bus() -> None:
    bus = EventBus()
    bus.emit(PINNED)
    bus.emit(PINNED)

    async def listen(since: int) -> list[int]:
        return [event.seq async for event in bus.follow(since)]

    late, early = asyncio.create_task(listen(1)), asyncio.create_task(listen(0))
    await turns()
    bus.emit(PINNED)
    await turns()
    bus.emit(PINNED)
    bus.close()
    assert await late == [2, 3, 4]
    assert await early == [1, 2, 3, 4]


@on_virtual_time
async def test_an_event_that_comes_while_a_listener_is_busy_is_not_missed() -> None:
    bus = EventBus()
    seen = []

    async def listen() -> None:
        async for event in bus.follow():
            seen.append(event.seq)
            if event.seq < 5:
                bus.emit(PINNED)
                await turns(2)

    task = asyncio.create_task(listen())
    bus.emit(PINNED)
    await turns(40)
    bus.close()
    await task
    assert seen == [1, 2, 3, 4, 5]
