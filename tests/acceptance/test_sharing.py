"""Many who want one model, and two models that want one place: joined loads, turns, and unloads in the nick of time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import pytest

from omlxd import EnginePool
from omlxd.core.events import Event, EventName
from omlxd.core.manifest import ModelSettings
from omlxd.daemon.ttl import IdleTimer
from tests.acceptance.harness import TIMEOUT_S, Daemon, errors_in, in_thread, text_of, weights_bytes

T = TypeVar("T")

pytestmark = pytest.mark.mlx


def at_once(works: Iterable[Callable[[], T]]) -> list[T]:
    """The results of blocking work that is done at the same time."""
    return [each.result(TIMEOUT_S) for each in [in_thread(work) for work in works]]


def test_twenty_first_requests_at_once_cause_one_load(
    daemon_of: Callable[..., Daemon], small: Callable[..., Path]
) -> None:
    daemon = daemon_of({"chat": {"path": small(), "aliases": ["default"]}})
    answers = at_once(
        [
            lambda number=number: daemon.chat("default" if number % 2 else "chat", "Hello.", max_tokens=2)
            for number in range(20)
        ]
    )
    assert [answer.status for answer in answers] == [200] * 20
    assert len(daemon.log("load_started")) == 1


def test_five_impatient_clients_cause_one_load_and_it_outlives_them(
    daemon_of: Callable[..., Daemon], medium: Callable[..., Path]
) -> None:
    daemon = daemon_of({"chat": medium()})
    for _ in range(5):
        for number in range(5):
            daemon.chat_stream("chat", f"Hello from {number}.", max_tokens=500).close()
    daemon.until_event("load_finished", model="chat")
    assert daemon.chat("chat", "Hello.", max_tokens=2).status == 200
    assert len(daemon.log("load_started")) == 1
    daemon.until_idle()
    assert daemon.states == {"chat": "loaded"}


@pytest.mark.slow
def test_two_models_for_one_place_are_served_in_turns_and_every_answer_is_whole(
    daemon_of: Callable[..., Daemon], small: Callable[..., Path]
) -> None:
    models = {"one": small(1), "other": small(2)}
    limit_bytes = int(1.5 * weights_bytes(models["one"]))
    daemon = daemon_of(models, daemon={"max_memory": limit_bytes, "fair_wait": "300ms"})

    def client(model: str) -> list[str]:
        texts = []
        for _ in range(4):
            with daemon.chat_stream(model, "Hello.", max_tokens=24) as stream:
                frames = list(stream)
            assert not errors_in(frames)
            texts.append(text_of(frames))
        return texts

    found = at_once([lambda model=model: client(model) for model in ("one", "other", "one", "other")])
    assert len({tuple(texts) for texts in (found[0], found[2])}) == 1
    assert len(set(found[0])) == len(set(found[1])) == 1
    swaps = len(daemon.log("load_finished")) - 1
    assert 1 <= swaps < 16
    assert not daemon.log("request_aborted", "request_failed")


@pytest.mark.slow
def test_with_a_real_engine_too_a_request_at_the_moment_of_a_ttl_unload_is_served(
    tiny_model: Callable[..., Path],
) -> None:
    times = 150
    unloads = asyncio.run(asked_again_and_again(tiny_model("llama", 1_000_000), times))
    assert times // 10 <= unloads < times  # else nothing was tried


async def asked_again_and_again(model: Path, times: int) -> int:
    """Ask just before, at and after the time when the model goes; how often it went."""
    ttl_s, unloads = 0.004, 0

    def hear(event: Event) -> None:
        nonlocal unloads
        unloads += event.event is EventName.UNLOADED

    pool = EnginePool({"chat": ModelSettings("chat", path=str(model), ttl_s=ttl_s)}, emit=hear)
    timer = IdleTimer(pool)
    async with pool:
        timer.start()
        first = await pool.generate("chat", prompt="Hello", max_tokens=2).text()
        for number in range(times):
            await asyncio.sleep(ttl_s * (0.5 + 2.0 * number / times))
            assert await pool.generate("chat", prompt="Hello", max_tokens=2).text() == first
        await timer.stop()
    return unloads
