"""The prefix cache on real models: hits change no text, memory is counted and given back at once, LRU across models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from omlxd.core.states import FinishReason
from omlxd.engine import kv_caches
from omlxd.engine.events import Generated, Prefilled
from omlxd.engine.orders import GenerationOrder
from omlxd.engine.prefix_cache import PrefixCaches
from tests.engine.driver import Driver, generation, on_mlx_thread, reference
from tests.engine.test_generation import KINDS, prompt, same_until_a_tie

pytestmark = pytest.mark.mlx

MIB = 2**20
PLENTY = 512 * MIB
WINDOW = 64  # of gemma3's layers: shorter than most prompts here
SYSTEM = prompt(160, seed=7)


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    driver.apply(prefix_cache_bytes=PLENTY, prefill_chunk_tokens=64)
    yield driver
    assert driver.engine.close()


def chat(
    request: str, model: str, user_seed: int, *, max_tokens: int = 8, shared: int = len(SYSTEM)
) -> GenerationOrder:
    """The same system segment, another question."""
    return GenerationOrder(request, model, (*SYSTEM, *prompt(20, user_seed)), max_tokens, shared_tokens=shared)


def reused(driver: Driver, request: str) -> int:
    return max(event.reused for event in driver.seen if isinstance(event, Prefilled) and event.request == request)


def active_bytes(driver: Driver) -> int:
    return driver.engine.rest().result().active_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_another_chat_with_the_same_system_prompt_reuses_it_and_gets_the_same_text(
    kind: str, driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    path = tiny_model(kind, KINDS[kind], window=WINDOW)
    driver.load("m", path)
    orders = {f"r{n}": chat(f"r{n}", "m", n + 1) for n in range(4)}
    expected = reference(path, {name: order.prompt for name, order in orders.items()}, 8)
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
    path = tiny_model(kind, KINDS[kind], window=WINDOW)
    driver.load("m", path)
    first = {f"a{n}": generation(f"a{n}", "m", prompt(50 + 60 * n, n), max_tokens=10) for n in range(3)}
    answers = reference(path, {name: order.prompt for name, order in first.items()}, 10)
    driver.run(first["a0"])
    driver.run(first["a1"], first["a2"])
    turns = {}
    for n, name in enumerate(first):
        tokens, margins = answers[name]
        if min(margins) < 1e-3:
            continue
        turns[f"b{n}"] = generation(f"b{n}", "m", (*first[name].prompt, *tokens, *prompt(20, 50 + n)), max_tokens=6)
    assert turns
    expected = reference(path, {name: order.prompt for name, order in turns.items()}, 6)
    for name, order in turns.items():
        text, _ = driver.run(order)[name]
        assert same_until_a_tie(text, driver.engine.codec("m"), *expected[name]), name
        # One that ends in the moment in which it joins a batch has not run its last token.
        assert len(order.prompt) - 21 <= reused(driver, name) <= len(order.prompt) - 20


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_is_counted_as_what_it_holds_and_is_back_at_once_when_the_budget_falls(
    kind: str, driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    driver.load("m", tiny_model(kind, KINDS[kind], window=WINDOW))
    idle_bytes = active_bytes(driver)
    driver.run(chat("r0", "m", 1))
    driver.run(chat("r1", "m", 2), chat("r2", "m", 3))
    kept_bytes = driver.engine.prefix_bytes()["m"]
    held_bytes = active_bytes(driver) - idle_bytes
    assert kept_bytes > 0
    assert 0.9 * held_bytes < kept_bytes <= held_bytes  # MLX lets up to 16 KiB a buffer be
    driver.apply(prefix_cache_bytes=kept_bytes // 2)
    assert active_bytes(driver) - idle_bytes <= kept_bytes // 2 + 64 * 1024
    assert 0 < driver.engine.prefix_bytes()["m"] <= kept_bytes // 2
    driver.apply(prefix_cache_bytes=0)
    assert active_bytes(driver) - idle_bytes < 1024
    driver.run(chat("r3", "m", 1))
    assert reused(driver, "r3") == 0
    assert active_bytes(driver) - idle_bytes < 1024


def test_two_models_share_the_budget_and_the_least_recently_used_gives_way(
    driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    for model in ("a", "b"):
        driver.load(model, tiny_model())
    driver.run(chat("a1", "a", 1))
    entry_bytes = driver.engine.prefix_bytes()["a"]
    driver.run(chat("b1", "b", 1))
    driver.run(chat("a2", "a", 1, max_tokens=1))  # used again, and nothing new
    driver.apply(prefix_cache_bytes=entry_bytes + 1024)
    driver.engine.rest().result()
    assert driver.engine.prefix_bytes() == {"a": entry_bytes}
    driver.run(chat("b2", "b", 1))
    assert reused(driver, "b2") == 0
    assert driver.engine.prefix_bytes() == {"b": entry_bytes}


def test_what_a_model_keeps_goes_with_it_and_is_not_found_by_its_successor(
    driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    driver.load("a", tiny_model())
    driver.run(chat("a1", "a", 1))
    driver.unload("a")
    assert not driver.engine.prefix_bytes()
    assert active_bytes(driver) < 1024
    driver.load("a", tiny_model())
    driver.run(chat("a2", "a", 1))
    assert reused(driver, "a2") == 0


def test_a_hit_is_a_copy_that_ends_at_a_whole_block_whatever_the_entry_holds(
    driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    """The ledger reserves whole blocks of what a prompt needs: a long entry behind a short hit would not be in it."""
    driver.load("m", tiny_model())
    long = generation("long", "m", prompt(1500, 3), max_tokens=4)
    driver.run(long)
    short = generation("short", "m", (*long.prompt[:300], *prompt(20, 9)), max_tokens=4)
    driver.start(short)
    told = driver.until(Prefilled, lambda event: event.request == "short")
    driver.collect({"short"})
    of_long = [event for event in driver.seen if isinstance(event, Prefilled) and event.request == "long"]
    assert told.reused == 300
    assert told.kv_bytes * 1536 == of_long[-1].kv_bytes * 512


def test_a_prompt_that_was_answered_before_runs_its_last_token_only(
    driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    driver.load("m", tiny_model())
    again = chat("r1", "m", 1)
    first = driver.run(chat("r0", "m", 1))["r0"]
    assert driver.run(again)["r1"] == first
    told = [event for event in driver.seen if isinstance(event, Prefilled) and event.request == "r1"]
    assert [(event.done, event.reused) for event in told] == [(len(again.prompt), len(again.prompt) - 1)]


def test_a_prompt_is_kept_at_the_end_of_its_system_segment_while_it_is_still_being_run(
    driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    driver.load("m", tiny_model())
    driver.start(chat("first", "m", 1, max_tokens=200), chat("second", "m", 2))
    driver.collect({"first", "second"})
    assert (reused(driver, "first"), reused(driver, "second")) == (0, len(SYSTEM))
    done = [event.done for event in driver.seen if isinstance(event, Prefilled) and event.request == "first"]
    assert len(SYSTEM) in done


def test_a_device_that_has_no_memory_for_a_copy_costs_what_is_kept_and_no_request(
    driver: Driver, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(cache: object) -> None:
        raise RuntimeError("[malloc] out of memory")

    driver.load("m", tiny_model())
    driver.run(chat("r0", "m", 1))
    monkeypatch.setattr(kv_caches, "is_cuttable", out_of_memory)
    (_, end) = driver.run(chat("r1", "m", 2))["r1"]
    assert end is FinishReason.LENGTH
    assert not driver.engine.prefix_bytes()


def test_of_caches_that_stand_somewhere_else_nothing_is_kept() -> None:
    """A wrong entry would be found by every later prompt: rather none."""

    def work() -> dict[str, int]:
        import mlx.core as mx
        from mlx_lm.models.cache import KVCache

        kept = PrefixCaches()
        kept.obey(PLENTY)
        cache = KVCache()
        cache.update_and_fetch(mx.zeros((1, 1, 40, 4)), mx.zeros((1, 1, 40, 4)))
        kept.keep("m", range(41), lambda: [cache])
        return dict(kept.by_model)

    assert on_mlx_thread(work) == {}


def test_an_answer_is_kept_in_whichever_moment_it_ends_while_another_joins(
    driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    driver.load("m", tiny_model())
    driver.apply(prefill_chunk_tokens=16)
    for length in range(1, 8):
        first = generation(f"a{length}", "m", prompt(40, length), max_tokens=length)
        driver.run(first, generation(f"b{length}", "m", prompt(90, 100 + length), max_tokens=1))
        tokens = [
            event.token_ids for event in driver.seen if isinstance(event, Generated) and event.request == f"a{length}"
        ]
        history = (*first.prompt, *sum(tokens, ()))
        driver.run(generation(f"c{length}", "m", (*history, 9, 9), max_tokens=1))
        assert len(history) - 1 <= reused(driver, f"c{length}") <= len(history)


def test_the_head_that_all_prompts_share_is_copied_where_that_is_quicker_and_keeps_nothing_from_being_forgotten() -> (
    None
):
    def work() -> list[tuple[int, int]]:
        import mlx.core as mx
        from mlx_lm.models.cache import KVCache

        kept, told = PrefixCaches(), list[tuple[int, int]]()
        kept.obey(PLENTY)
        for first in (100, 200):
            cache = KVCache()
            cache.update_and_fetch(mx.zeros((1, 1, 40, 4)), mx.zeros((1, 1, 40, 4)))
            kept.keep("m", [*range(6), *range(first, first + 34)], lambda cache=cache: [cache])
        for least, prompt_tokens in ((7, (*range(6), 100, 7)), (8, (*range(6), 100, 7)), (4, (0, 1, 2, 7))):
            reused, own = kept.begin("m", prompt_tokens, least)
            told.append((reused, own[0].offset if own else 0))
        kept.obey(kept.by_model["m"] - 1)  # one of the two has to go: the older one still
        older, newer = (kept.reusable("m", [*range(6), *range(first, first + 40)]) for first in (100, 200))
        return [*told, (older, newer)]

    assert on_mlx_thread(work) == [(7, 7), (0, 0), (0, 0), (0, 40)]
