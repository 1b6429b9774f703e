"""The daemon's clock: time passes while the process runs, and no time passes while it does not."""

from __future__ import annotations

import asyncio
import threading
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.core.events import Event, EventLevel, EventName
from omlxd.daemon import awake_clock
from omlxd.daemon.awake_clock import LOOK_EACH_S, AwakeClock, AwakeEventLoop, PauseWatch
from tests.fakes.clock import on_virtual_time

GAP_S = 15.0
EIGHT_HOURS_S = 8 * 3600.0


class Hands:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@given(st.lists(st.one_of(st.floats(0.0, GAP_S), st.floats(2 * GAP_S, 1e7)), max_size=50))
def test_it_counts_every_gap_of_a_working_daemon_and_none_of_a_stopped_one(gaps: list[float]) -> None:
    hands = Hands()
    clock = AwakeClock(hands, GAP_S)
    seen, expected = [clock()], 0.0
    for gap_s in gaps:
        before_s = hands.now_s
        hands.now_s += gap_s
        expected += hands.now_s - before_s if gap_s <= GAP_S else 0.0
        seen.append(clock())
    assert all(after_s >= before_s for before_s, after_s in pairwise(seen))
    assert seen[-1] - seen[0] == pytest.approx(expected, abs=1e-3)
    assert clock.stopped_s == pytest.approx(sum(gap_s for gap_s in gaps if gap_s > GAP_S), abs=1e-3)


def test_readings_of_several_threads_never_go_back_and_leave_out_a_pause_once() -> None:
    stopped_s = 0.0
    clock = AwakeClock(lambda: time.monotonic() + stopped_s, GAP_S)
    began_s, back, go_on = clock(), list[float](), threading.Event()

    def read() -> None:
        last_s = clock()
        while not go_on.is_set():
            now_s = clock()
            if now_s < last_s:
                back.append(last_s - now_s)
            last_s = now_s

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        stopped_s += EIGHT_HOURS_S
        clock()
    go_on.set()
    for thread in threads:
        thread.join()
    assert not back
    assert clock.stopped_s == pytest.approx(20 * EIGHT_HOURS_S, abs=60)
    assert clock() - began_s < 60


def test_timers_of_the_loop_do_not_fall_due_by_a_pause() -> None:
    hands = Hands()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        due = list[str]()
        for name, delay_s in (("soon", 5.0), ("later", 60.0)):
            loop.call_later(delay_s, due.append, name)
        hands.now_s += EIGHT_HOURS_S
        await _turns()
        assert due == []
        hands.now_s += 5.5
        await _turns()
        assert due == ["soon"]
        hands.now_s += EIGHT_HOURS_S
        await _turns()
        assert due == ["soon"]
        for _ in range(6):
            hands.now_s += 10.0
            await _turns()
        assert due == ["soon", "later"]

    with asyncio.Runner(loop_factory=lambda: AwakeEventLoop(AwakeClock(hands, GAP_S))) as runner:
        runner.run(main())


def test_another_thread_wakes_the_loop_each_time_and_a_bell_that_is_full_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rung: list[int] = []
    write = awake_clock._write
    monkeypatch.setattr(awake_clock, "_write", lambda fd, *rest: rung.append(write(fd, *rest)))
    heard: list[int] = []

    async def main() -> None:
        loop, all_heard, turn = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        def hear(number: int) -> None:
            heard.append(number)
            turn.set()
            if number == 999:
                all_heard.set()

        def tell() -> None:
            for number in range(1000):
                turn.clear()
                loop.call_soon_threadsafe(hear, number)
                if number % 100 == 0:
                    assert turn.wait(60), "the loop sleeps on"

        teller = threading.Thread(target=tell)
        teller.start()
        async with asyncio.timeout(60):
            await all_heard.wait()
        teller.join()
        for number in range(300_000):  # more than the bell holds
            loop.call_soon_threadsafe(heard.append, number)
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=AwakeEventLoop) as runner:
        runner.run(main())
    assert heard == [*range(1000), *range(300_000)]
    assert rung.count(1) >= 10, "asyncio has another name for it: see `_write_to_self`"
    assert -1 in rung


async def _turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@on_virtual_time
async def test_a_pause_is_told_once_with_its_length_and_drift_is_not() -> None:
    events, absent_s = list[Event](), 100.0
    watch = PauseWatch(events.append, lambda: absent_s)
    watch.start()
    watch.start()
    await asyncio.sleep(LOOK_EACH_S + 1)
    absent_s += 0.5
    await asyncio.sleep(3 * LOOK_EACH_S)
    assert not events
    absent_s += EIGHT_HOURS_S
    await asyncio.sleep(3 * LOOK_EACH_S)
    (told,) = events
    assert (told.event, told.level) == (EventName.DAEMON_PAUSED, EventLevel.INFO)
    assert told.fields == {"paused_s": EIGHT_HOURS_S + 0.5}
    await watch.stop()
    await watch.stop()
    assert "omlxd-pauses" not in {task.get_name() for task in asyncio.all_tasks()}
