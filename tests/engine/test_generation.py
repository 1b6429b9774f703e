"""What the engine generates: the same greedy text as mlx-lm alone and together, seeds, stops, aborts, failures."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from omlxd.core.states import FinishReason
from omlxd.engine.events import CacheDropped, Finished, Generated, LoadDone, NeedsBlock, Prefilled, RequestGone
from omlxd.engine.orders import EngineLimits
from omlxd.engine.thread import KEEPS_CACHE_S
from tests.engine.driver import Driver, generation, reference

pytestmark = pytest.mark.mlx

KINDS = {"llama": 3_000_000, "gemma3_text": 6_000_000, "qwen3_moe": 4_000_000, "mamba2": 3_000_000}
TIE = 1e-3


def prompt(length: int, seed: int) -> list[int]:
    return [random.Random(seed * 1000 + at).randrange(4, 250) for at in range(length)]


def same_until_a_tie(text: str, codec: object, tokens: list[int], margins: list[float]) -> bool:
    """Greedy text equals the reference's, or first differs where the reference's choice was a near tie."""
    stream = codec.stream_text(())  # type: ignore[attr-defined]
    expected = ""
    for token, margin in zip(tokens, margins, strict=True):
        before = expected
        expected += stream.add(token)[0]
        if not text.startswith(expected):
            return margin < TIE and text.startswith(before)
    return text == expected + stream.finish()


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_mlx_lms_alone_joining_leaving_and_together(
    kind: str, driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    path = tiny_model(kind, KINDS[kind])
    prompts = {f"r{length}": prompt(length, length) for length in (1, 2, 40, 300, 700)}
    expected = reference(path, prompts, 40)
    assert isinstance(driver.load("m", path), LoadDone)
    codec = driver.engine.codec("m")
    alone = {name: driver.run(generation(name, "m", tokens, 40))[name] for name, tokens in prompts.items()}
    together = driver.run(*(generation(f"{name}+", "m", tokens, 40) for name, tokens in prompts.items()))
    for name, (tokens, margins) in expected.items():
        for text, end in (alone[name], together[f"{name}+"]):
            assert end is FinishReason.LENGTH
            assert same_until_a_tie(text, codec, tokens, margins), name


def test_short_prompts_that_wait_together_give_the_same_text_as_one_by_one(
    driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    path = tiny_model()
    prompts = {f"r{at}": prompt(5 + at, at) for at in range(8)}
    expected = reference(path, prompts, 20)
    driver.load("m", path)
    driver.apply(group_tokens={"m": 256})
    texts = driver.run(*(generation(name, "m", tokens, 20) for name, tokens in prompts.items()))
    codec = driver.engine.codec("m")
    assert all(same_until_a_tie(texts[name][0], codec, *expected[name]) for name in prompts)
    at_once = {event.request for event in driver.seen if isinstance(event, Prefilled) and event.kv_bytes == 0}
    assert len(at_once) > 1
    for name in prompts:
        of_one = [event for event in driver.seen if isinstance(event, Prefilled | Generated) and event.request == name]
        assert [isinstance(event, Prefilled) for event in of_one[:2]] == [True, False], "read, and then answered"


def test_two_models_generate_at_the_same_time(driver: Driver, tiny_model: Callable[..., Path]) -> None:
    driver.load("a", tiny_model())
    driver.load("b", tiny_model("qwen3", 2_000_000))
    driver.start(generation("ra", "a", [5, 6, 7], 200), generation("rb", "b", [5, 6, 7], 200))
    order: list[str] = []
    while len([event for event in driver.seen if isinstance(event, Finished)]) < 2:
        if isinstance(event := driver.next(), Generated):
            order.append(event.request)
    first_end = min(len(order) - order[::-1].index(name) for name in ("ra", "rb"))
    assert {"ra", "rb"} == set(order[: first_end // 2]), "one stream starved while the other ran"


def test_a_seed_fixes_the_text_whoever_else_is_running(driver: Driver, tiny_model: Callable[..., Path]) -> None:
    driver.load("m", tiny_model())
    warm = {"temperature": 1.0, "top_p": 0.9}
    first = driver.run(generation("a", "m", [5, 6, 7], 40, seed=11, **warm))["a"][0]
    again = driver.run(
        generation("b", "m", [5, 6, 7], 40, seed=11, **warm),
        generation("c", "m", [9, 8], 40, seed=4, **warm),
        generation("d", "m", prompt(400, 3), 40, seed=5, **warm),
    )
    other = driver.run(generation("e", "m", [5, 6, 7], 40, seed=12, **warm))["e"][0]
    assert again["b"][0] == first
    assert other != first


def test_a_stop_sequence_ends_the_text_before_it(driver: Driver, tiny_model: Callable[..., Path]) -> None:
    driver.load("m", tiny_model())
    whole = driver.run(generation("a", "m", [5, 6, 7], 40))["a"][0]
    word = whole[12:15]
    text, end = driver.run(generation("b", "m", [5, 6, 7], 40, stop=(word,)))["b"]
    assert end is FinishReason.STOP
    assert text == whole[: whole.index(word)]


def test_an_answer_may_go_on_behind_the_end_that_the_model_makes_alone_and_in_a_batch(
    driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    path = tiny_model(seed=77)  # a folder of its own: its tokenizer stays as it is for the others
    driver.load("m", path)
    (tokens, _) = reference(path, {"r": [5, 6, 7]}, 12)["r"]
    codec = driver.engine.codec("m")
    codec._tokenizer._eos_token_ids.add(tokens[4])  # type: ignore[union-attr]
    order = generation("ends", "m", [5, 6, 7], 12)
    assert driver.run(order)["ends"][1] is FinishReason.STOP
    on = [replace(order, request=name, ignore_eos=True) for name in ("alone", "one", "other")]
    ends = driver.run(on[0]) | driver.run(*on[1:])
    assert {end for _, end in ends.values()} == {FinishReason.LENGTH}
    for name in ("alone", "one", "other"):
        made = [e for e in driver.seen if isinstance(e, Generated) and e.request == name]
        assert sum(len(event.token_ids) for event in made) == 12


def test_an_abort_gives_the_kv_cache_back_while_others_go_on(driver: Driver, tiny_model: Callable[..., Path]) -> None:
    driver.load("m", tiny_model())
    rest = driver.engine.rest().result().active_bytes
    driver.start(generation("stays", "m", [5, 6], 400), generation("goes", "m", prompt(2000, 1), 400))
    driver.until(Generated, lambda event: event.request == "goes")
    both = driver.engine.rest().result().active_bytes - rest
    driver.drop("goes")
    driver.until(RequestGone, lambda event: event.request == "goes")
    left = driver.engine.rest().result().active_bytes - rest
    assert left < both / 3, f"{both} bytes with both, {left} after the long one left"
    assert driver.collect({"stays"})["stays"][1] is FinishReason.LENGTH
    after = driver.engine.rest().result().active_bytes
    assert after - rest < 4096


def test_an_abort_in_the_middle_of_a_prefill_stops_it_there(driver: Driver, tiny_model: Callable[..., Path]) -> None:
    driver.load("m", tiny_model("llama", 3_000_000))
    driver.apply(prefill_chunk_tokens=64)
    rest = driver.engine.rest().result().active_bytes
    driver.start(generation("long", "m", prompt(20_000, 1), 5))
    driver.next()
    driver.drop("long")
    driver.until(RequestGone)
    assert driver.engine.rest().result().active_bytes - rest < 4096
    assert not any(isinstance(event, Generated) for event in driver.seen)


def test_an_idle_engine_gives_its_cache_back_when_the_hard_limit_comes_down(
    driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    driver.load("m", tiny_model())
    driver.run(generation("r", "m", prompt(600, 1), 5))
    reading = driver.engine.rest().result()
    assert reading.cache_bytes > 1_000_000
    hard = reading.active_bytes + 500_000
    driver.apply(limits=EngineLimits(hard_bytes=hard))
    dropped = driver.until(CacheDropped)
    assert dropped.reading.active_bytes + dropped.reading.cache_bytes <= hard


def test_an_idle_engine_gives_its_cache_back_when_a_plan_asks_for_it_and_only_once(
    driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    driver.load("m", tiny_model())
    driver.run(generation("r", "m", prompt(600, 1), 5))
    driver.apply(cache_drops=1)
    assert driver.until(CacheDropped).reading.cache_bytes == 0
    driver.run(generation("again", "m", prompt(600, 1), 5))
    driver.apply()
    assert driver.engine.rest().result().cache_bytes > 1_000_000


def test_an_idle_engine_gives_its_cache_back_when_a_lower_soft_limit_leaves_no_room_for_it(
    driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    driver.load("m", tiny_model())
    driver.run(generation("r", "m", prompt(600, 1), 5))
    reading = driver.engine.rest().result()
    driver.apply(limits=EngineLimits(soft_bytes=1_000_000_000, hard_bytes=4_000_000_000))
    assert driver.engine.rest().result().cache_bytes == reading.cache_bytes > 1_000_000
    driver.apply(limits=EngineLimits(soft_bytes=1_000_000_000, hard_bytes=1_000_000_000))
    assert driver.engine.rest().result().cache_bytes == 0


def test_an_engine_that_has_nothing_to_do_keeps_its_cache_for_a_while_and_then_gives_it_back_once(
    driver_of: Callable[..., Driver], tiny_model: Callable[..., Path]
) -> None:
    later_s = [0.0]
    driver = driver_of(clock=lambda: time.monotonic() + later_s[0])
    driver.load("m", tiny_model())
    for _ in range(2):
        driver.run(generation(f"at {later_s}", "m", prompt(600, 1), 5))
        later_s[0] += KEEPS_CACHE_S / 2
        assert driver.engine.rest().result().cache_bytes > 1_000_000
        assert driver.engine.rest().result().cache_bytes > 1_000_000
        later_s[0] += KEEPS_CACHE_S / 2
        driver.engine.rest().result()  # a look is answered, and does not count as something to do
        assert driver.until(CacheDropped).reading.cache_bytes == 0
    driver.engine.rest().result()
    driver.unload("m")
    assert sum(isinstance(event, CacheDropped) for event in driver.seen) == 2


@pytest.mark.parametrize("others", [0, 3])
def test_decoding_stands_still_at_the_end_of_its_grant_and_goes_on_with_a_new_one(
    others: int, driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    driver.load("m", tiny_model())
    driver.load("free", tiny_model("qwen2", 1_500_000))
    driver.apply(granted_tokens={"m": 120})
    short = [generation(f"s{at}", "m", prompt(20 + at, at), 300) for at in range(others)]
    driver.start(generation("long", "m", prompt(100, 9), 60), *short, generation("other", "free", [5, 6], 90))
    asked = driver.until(NeedsBlock)
    assert (asked.model, asked.length_tokens) == ("m", 120)
    driver.until(Finished, lambda event: event.request == "other")  # the other model does not stand still
    made = sum(event.tokens for event in driver.seen if isinstance(event, Generated) and event.request == "long")
    assert made == 20
    driver.engine.rest().result()
    assert sum(isinstance(event, NeedsBlock) for event in driver.seen) == 1
    driver.apply(granted_tokens={"m": 512})
    driver.until(Finished, lambda event: event.request == "long")


def test_each_prefill_step_tells_what_it_took_and_left(driver: Driver, tiny_model: Callable[..., Path]) -> None:
    driver.load("m", tiny_model())
    driver.run(replace(generation("r", "m", prompt(1001, 1), 3), prefill_chunk_tokens=100))
    steps = [event for event in driver.seen if isinstance(event, Prefilled)]
    assert [event.done for event in steps] == [100, 200, 256, 356, 456, 512, 612, 712, 768, 868, 968, 1001]
    assert all(event.transient_bytes > 0 for event in steps)
    assert steps[-1].kv_bytes > steps[0].kv_bytes > 0


def test_more_requests_than_the_batch_holds_wait_their_turn_and_all_finish(
    driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    driver.apply(max_batch=3)
    driver.load("m", tiny_model())
    ends = driver.run(*(generation(f"r{at}", "m", prompt(10 + at, at), 15) for at in range(10)))
    assert all(end is FinishReason.LENGTH for _, end in ends.values())
