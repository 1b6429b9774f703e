"""Memory of the last minutes: a figure a second, the oldest forgotten, and what the control API says of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from omlxd.daemon.memory_history import KEPT, MemoryHistory
from omlxd.engine.orders import MIB
from tests.fakes.clock import on_virtual_time
from tests.fakes.daemon import running


@on_virtual_time
async def test_a_figure_is_taken_each_second_and_the_oldest_is_forgotten() -> None:
    taken = iter(range(1000))
    history = MemoryHistory(lambda: next(taken), clock=asyncio.get_running_loop().time)
    history.start()
    history.start()
    await asyncio.sleep(3.5)
    assert history.to_json() == {"ages_s": [3.5, 2.5, 1.5, 0.5], "used": [0, 1, 2, 3]}
    await asyncio.sleep(KEPT)
    found = history.to_json()
    assert found["used"] == list(range(4, KEPT + 4))
    await history.stop()
    await history.stop()
    await asyncio.sleep(10)
    assert history.to_json()["used"] == found["used"]


async def test_the_control_api_shows_what_the_policy_compares(tmp_path: Path) -> None:
    async with running(tmp_path, {"chat": {"mib": 40}}) as daemon:
        await daemon.control("POST", "models/chat/load")
        async with asyncio.timeout(20):
            while (found := await daemon.control("GET", "history"))["used"][-1] < 40 * MIB:
                pass
        assert found["schema"] == 1
        assert len(found["ages_s"]) == len(found["used"])
        assert found["ages_s"] == sorted(found["ages_s"], reverse=True)
