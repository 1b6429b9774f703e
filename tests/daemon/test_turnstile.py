"""Who wants the same at once gets it in order, a few in each turn of the loop."""

from __future__ import annotations

import asyncio

from omlxd.daemon.turnstile import Turnstile


class Crowd:
    """Tasks that all go through one turnstile, in this order."""

    def __init__(self, at_once: int, count: int) -> None:
        self.passed: list[int] = []
        self._turnstile = Turnstile(at_once)
        self.tasks = [asyncio.create_task(self._pass(number)) for number in range(count)]

    async def _pass(self, number: int) -> None:
        await self._turnstile.through()
        self.passed.append(number)

    async def sizes(self) -> list[int]:
        """How many have passed after each turn of the loop, until all have."""
        sizes = []
        while not all(task.done() for task in self.tasks):
            await asyncio.sleep(0)
            sizes.append(len(self.passed))
        return sizes


async def test_few_pass_in_the_turn_in_which_they_come() -> None:
    crowd = Crowd(3, 3)
    await asyncio.sleep(0)
    assert crowd.passed == [0, 1, 2]


async def test_many_pass_in_order_and_so_many_in_a_turn_at_most() -> None:
    crowd = Crowd(3, 100)
    sizes = await crowd.sizes()
    assert crowd.passed == list(range(100))
    assert max(after - before for before, after in zip([0, *sizes], sizes, strict=False)) == 3


async def test_who_comes_while_others_wait_comes_after_them() -> None:
    crowd = Crowd(1, 3)
    await asyncio.sleep(0)
    late = asyncio.create_task(crowd._pass(3))
    await asyncio.gather(*crowd.tasks, late)
    assert crowd.passed == [0, 1, 2, 3]


async def test_who_gives_up_waiting_holds_nobody_up() -> None:
    crowd = Crowd(1, 4)
    await asyncio.sleep(0)
    crowd.tasks[1].cancel()
    crowd.tasks[2].cancel()
    await asyncio.gather(*crowd.tasks, return_exceptions=True)
    assert crowd.passed == [0, 3]
