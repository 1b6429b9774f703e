"""Requests that are being made ready are told to the engine, so that it can read them together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from omlxd.daemon.serving import SHORT_CHARACTERS
from tests.fakes.engine import FakeCodec
from tests.fakes.pools import Scene, turns, until_decoding


class SlowCodec(FakeCodec):
    """Takes until it is let go for each text that begins with `slow`."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.begun = threading.Semaphore(0)

    def encode_text(self, text: str) -> list[int]:
        if text.startswith("slow"):
            self.begun.release()
            assert self.go_on.wait(60)
        return super().encode_text(text)


async def test_the_plan_says_how_many_short_prompts_are_being_tokenized() -> None:
    scene = Scene({"a": 100, "b": 100})
    async with scene.pool as pool:
        await pool.load("a")
        codec = scene.engine._codecs["a"] = SlowCodec()
        slow = pool.generate("a", prompt="slow", max_tokens=1)
        assert await asyncio.to_thread(codec.begun.acquire, timeout=60)
        await pool.generate("a", prompt="quick", max_tokens=1).text()
        assert _coming(scene) == [{"a": 1}]
        codec.go_on.set()
        await slow.text()
        assert scene.engine.plans[-1].coming == {}, "and it is told when nobody comes any more"


async def test_long_prompts_are_not_waited_for() -> None:
    scene = Scene({"a": 100})
    async with scene.pool as pool:
        await pool.load("a")
        codec = scene.engine._codecs["a"] = SlowCodec()
        slow = pool.generate("a", prompt="slow".ljust(SHORT_CHARACTERS + 1), max_tokens=1)
        assert await asyncio.to_thread(codec.begun.acquire, timeout=60)
        await pool.generate("a", prompt="quick", max_tokens=1).text()
        codec.go_on.set()
        await slow.text()
        assert _coming(scene) == []


async def test_one_that_is_refused_is_not_waited_for_any_longer() -> None:
    scene = Scene({"a": 100})
    async with scene.pool as pool:
        await pool.load("a")
        codec = scene.engine._codecs["a"] = SlowCodec()
        slow = pool.generate("a", prompt="slow", max_tokens=1)
        assert await asyncio.to_thread(codec.begun.acquire, timeout=60)
        beside = pool.generate("a", prompt="quick", max_tokens=1000)
        await until_decoding(beside)
        assert scene.engine.plans[-1].coming == {"a": 1}
        pool.abort(slow.id, "its client is gone")
        await turns()
        assert scene.engine.plans[-1].coming == {}
        codec.go_on.set()
        pool.abort(beside.id, "the test is over")


def _coming(scene: Scene) -> Sequence[object]:
    return [plan.coming for plan in scene.engine.plans if plan.coming]
