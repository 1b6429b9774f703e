"""The prefix cache on real models: hits change no text, memory is counted and given back at once, LRU across models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from omlxd.core.states import FinishReason
from omlxd.engine.protocol import GenerationOrder, Prefilled
from tests.engine.driver import Driver, generation, reference
from tests.engine.test_generation import KINDS, prompt, same_until_a_tie

pytestmark = pytest.mark.mlx

MIB = 2**20
PLENTY = 512 * MIB
SYSTEM = prompt(300, seed=7)


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    driver.apply(prefix_cache_bytes=PLENTY, prefill_chunk_tokens=128)
    yield driver
    assert driver.engine.close()


def chat(
    request: str, model: str, user_seed: int, *, max_tokens: int = 12, shared: int = len(SYSTEM)
) -> GenerationOrder:
    """The same system segment, another question."""
    return GenerationOrder(request, model, (*SYSTEM, *prompt(40, user_seed)), max_tokens, shared_tokens=shared)


def reused(driver: Driver, request: str) -> int:
    return max(event.reused for event in driver.seen if isinstance(event, Prefilled) and event.request == request)


@pytest.mark.parametrize("kind", KINDS)
def test_another_chat_with_the_same_system_prompt_reuses_it_and_gets_the_same_text(
    kind: str, driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    path = tiny_model(kind, KINDS[kind])
    driver.load("m", path)
    orders = {f"r{n}": chat(f"r{n}", "m", n + 1) for n in range(4)}
    expected = reference(path, {name: order.prompt for name, order in orders.items()}, 12)
    got = driver.run(orders["r0"])
    got |= driver.run(orders["r1"])
    got |= driver.run(orders["r2"], orders["r3"])
    codec = driver.engine.codec("m")
    for name, (text, end) in got.items():
        assert end in FinishReason
        tokens, margins = expected[name]
        assert same_until_a_tie(text, codec, tokens, margins), name
    assert [reused(driver, name) for name in orders] == [0, len(SYSTEM), len(SYSTEM), len(SYSTEM)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_turn_of_a_chat_goes_on_where_the_last_one_ended_alone_and_from_a_batch(
    kind: str, driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    path = tiny_model(kind, KINDS[kind])
    driver.load("m", path)
    first = {f"a{n}": generation(f"a{n}", "m", prompt(90 + 200 * n, n), max_tokens=20) for n in range(3)}
    answers = reference(path, {name: order.prompt for name, order in first.items()}, 20)
    driver.run(first["a0"])
    driver.run(first["a1"], first["a2"])
    turns = {}
    for n, name in enumerate(first):
        tokens, margins = answers[name]
        if min(margins) < 1e-3:
            continue
        turns[f"b{n}"] = generation(f"b{n}", "m", (*first[name].prompt, *tokens, *prompt(30, 50 + n)), max_tokens=12)
    assert turns
    expected = reference(path, {name: order.prompt for name, order in turns.items()}, 12)
    for name, order in turns.items():
        text, _ = driver.run(order)[name]
        assert same_until_a_tie(text, driver.engine.codec("m"), *expected[name]), name
        assert reused(driver, name) == len(order.prompt) - 30
