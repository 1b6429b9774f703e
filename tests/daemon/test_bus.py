"""The event bus: numbers, order, memory of the last events, and listeners that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

from omlxd.core.events import Event, EventName
from omlxd.daemon.bus import EventBus, Missed, Quiet
from omlxd.daemon.event_stream import follow
from omlxd.daemon.log import libraries_to
from tests.fakes.clock import on_virtual_time
from tests.fakes.pools import turns

T = TypeVar("T")
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


def test_a_sink_that_raises_stops_neither_who_emits_nor_the_other_sinks() -> None:
    def broken(event: Event) -> None:
        raise TypeError("cannot be shown")

    written: list[Event] = []
    bus = EventBus(sinks=(broken, written.append))
    with libraries_to(bus.emit):
        bus.emit(PINNED)
    assert [event.event for event in written] == [EventName.API_ERROR, EventName.PINNED]
    assert written[0].fields["message"] == "an event could not be handed on"
    assert "TypeError" in written[0].fields["traceback"]


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


async def take(stream: AsyncGenerator[T, None], count: int) -> list[T]:
    return [await anext(stream) for _ in range(count)]


@on_virtual_time
async def test_a_listener_that_falls_behind_loses_the_oldest_and_is_told_how_many() -> None:
    bus = EventBus(keep=10)
    bus.emit(PINNED)
    stream = bus.follow()
    first = await anext(stream)
    for _ in range(25):
        bus.emit(PINNED)
    told = await take(stream, 11)
    assert isinstance(first, Event)
    assert told[0] == Missed(15, 16)
    assert [each.seq for each in told[1:] if isinstance(each, Event)] == list(range(17, 27))
    await stream.aclose()


@on_virtual_time
async def test_a_number_that_is_long_gone_is_answered_with_what_is_missing() -> None:
    bus = EventBus(keep=3)
    for _ in range(9):
        bus.emit(PINNED)
    for since, expected in ((2, Missed(4, 6)), (6, 7), (0, 7)):
        stream = bus.follow(since)
        found = await anext(stream)
        assert (found if isinstance(found, Missed) else found.seq) == expected
        await stream.aclose()


@on_virtual_time
async def test_silence_is_told_again_and_again_and_ends_with_an_event() -> None:
    bus = EventBus()
    bus.emit(PINNED)
    stream = bus.follow(1, quiet_s=15.0)
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    assert await take(stream, 2) == [Quiet(1), Quiet(1)]
    assert loop.time() - begun_s == 30.0
    waiting = asyncio.ensure_future(anext(stream))
    await turns()
    bus.emit(PINNED)
    assert (await waiting).seq == 2
    assert loop.time() - begun_s == 30.0
    await stream.aclose()


async def marks(bus: EventBus, count: int, **options: Any) -> list[Any]:
    stream = follow(bus, "now", **options)
    found = await take(stream, count)
    await stream.aclose()
    return found


@on_virtual_time
async def test_a_client_of_this_run_goes_on_and_one_of_another_gets_all() -> None:
    bus = EventBus(clock=lambda: 1.0)
    for _ in range(3):
        bus.emit(PINNED)
    heartbeat = {"event": "heartbeat", "seq": 3, "run": "now"}
    gap = {"event": "gap", "seq": 0, "missed": None}
    events = [event.to_json() for event in bus.since()]
    assert await marks(bus, 2, since=2, of_run="now") == [heartbeat, events[2]]
    assert await marks(bus, 2, since=2) == [heartbeat, events[2]]
    assert await marks(bus, 5, since=2, of_run="before") == [gap, heartbeat, *events]
    assert await marks(bus, 5, since=700) == [gap, heartbeat, *events]
    assert await marks(bus, 4, since=0, of_run="before") == [heartbeat, *events]


@on_virtual_time
async def test_a_stream_tells_of_a_gap_and_of_silence() -> None:
    bus = EventBus(keep=2)
    for _ in range(5):
        bus.emit(PINNED)
    found = await marks(bus, 5, since=1, heartbeat_s=15.0)
    assert [each.get("missed", each["seq"]) for each in found] == [5, 2, 4, 5, 5]
    assert [each["event"] for each in found] == ["heartbeat", "gap", "pinned", "pinned", "heartbeat"]
