"""A wait that ends after a while: neither early nor late, however many waits there were before it."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from omlxd.daemon.patience import Patience
from tests.fakes.clock import on_virtual_time, run

WAITS = st.lists(st.tuples(st.floats(0.01, 5.0), st.one_of(st.none(), st.floats(0.0, 6.0)), st.floats(0.0, 3.0)))
"""Of each wait: how long at most, after how long somebody ends it, and the pause behind it."""


@given(WAITS)
def test_a_wait_ends_at_its_time_unless_it_was_ended_before(waits: list[tuple[float, float | None, float]]) -> None:
    async def main() -> None:
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        patience = Patience(news.set)
        for timeout_s, ended_after_s, pause_s in waits:
            began_s = loop.time()
            ended = None if ended_after_s is None else loop.call_later(ended_after_s, news.set)
            patience.begin(timeout_s)
            await news.wait()
            patience.end()
            expected_s = timeout_s if ended_after_s is None else min(timeout_s, ended_after_s)
            assert abs(loop.time() - began_s - expected_s) < 1e-6
            if ended is not None:
                ended.cancel()
            news.clear()
            await asyncio.sleep(pause_s)
            assert not news.is_set(), "nobody waits"
        patience.close()

    run(main())


@on_virtual_time
async def test_of_a_thousand_waits_one_timer_is_left_and_none_once_it_is_closed() -> None:
    loop = asyncio.get_running_loop()
    patience = Patience(lambda: None)
    for _ in range(1000):
        patience.begin(1.0)
        patience.end()
    assert len(loop._scheduled) == 1  # type: ignore[attr-defined]
    patience.close()
    assert all(timer.cancelled() for timer in loop._scheduled)  # type: ignore[attr-defined]
