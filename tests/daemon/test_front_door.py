"""What passes the front door, and how many at once."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

from omlxd.daemon.front_door import POSTS_AT_ONCE, FrontDoor


async def test_of_a_crowd_of_posts_a_few_begin_in_each_turn_and_a_get_need_not_wait_for_them() -> None:
    begun: list[str] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["path"])

    async def nothing(*_: Any) -> Any:
        raise AssertionError("nobody sends or receives")

    door = FrontDoor(application, application, None, lambda event: None)

    def ask(method: str, path: str) -> asyncio.Task[None]:
        scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": [], "server": None}
        return asyncio.create_task(door(scope, nothing, nothing))

    posts = [ask("POST", f"/{number}") for number in range(20)]
    get = ask("GET", "/health")
    sizes = []
    while not all(task.done() for task in (*posts, get)):
        await asyncio.sleep(0)
        sizes.append(len(begun))
    assert sizes[0] == POSTS_AT_ONCE + 1
    assert max(after - before for before, after in pairwise(sizes)) == POSTS_AT_ONCE
    assert begun.index("/health") == POSTS_AT_ONCE
    assert [path for path in begun if path != "/health"] == [f"/{number}" for number in range(20)]
