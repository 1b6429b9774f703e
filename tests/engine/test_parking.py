"""Parked and resumed on the real engine: the memory comes back at once, and the text goes on as if nothing happened."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from omlxd.core.states import FinishReason
from omlxd.engine.events import Finished, Generated, OverLimit, Prefilled, RequestFailed, RequestGone
from omlxd.engine.orders import EngineLimits, GenerationOrder
from tests.engine.driver import Driver, generation, reference
from tests.engine.test_generation import KINDS, prompt, same_until_a_tie

pytestmark = pytest.mark.mlx


class Stays:
    """One request that is parked when its answer has so many tokens, and comes back with them each time."""

    def __init__(self, order: GenerationOrder, park_at: Sequence[int]) -> None:
        self.order, self.park_at = order, list(park_at)
        self.name, self.tokens, self.pieces = order.request, list[int](), list[str]()
        self.end: FinishReason | None = None
        self.parks = 0
        self._leaving = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def hear(self, driver: Driver, event: object) -> None:
        if isinstance(event, Generated) and event.request == self.name:
            self.tokens += event.token_ids
            self.pieces.append(event.text)
            assert event.tokens == len(event.token_ids)
            if self.park_at and not self._leaving and len(self.tokens) >= self.park_at[0]:
                self._leaving = True
                driver.drop(self.name)
        elif isinstance(event, Finished) and event.request == self.name:
            self.end = event.reason
        elif isinstance(event, RequestGone) and event.request == self.name:
            self.parks += 1
            self.park_at = [at for at in self.park_at if at > len(self.tokens)]
            self._leaving = False
            self.name = f"{self.order.request}.{self.parks + 1}"
            driver.start(replace(self.order, request=self.name, generated=tuple(self.tokens)))
        assert not isinstance(event, RequestFailed), event


def run_with_parks(driver: Driver, *requests: Stays) -> None:
    driver.start(*(each.order for each in requests))
    while any(each.end is None for each in requests):
        event = driver.next()
        for each in requests:
            each.hear(driver, event)
    driver.drop(*(each.name for each in requests))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_over_parks_is_the_undisturbed_text(
    kind: str, driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    path = tiny_model(kind, KINDS[kind])
    prompts = {f"r{length}": prompt(length, length) for length in (2, 60, 200)}
    expected = reference(path, prompts, 30)
    driver.load("m", path)
    driver.apply(prefill_chunk_tokens=64)
    dice = random.Random(kind)  # they leave early: the engine goes on until it hears of it
    together = [
        Stays(generation(name, "m", tokens, 30), sorted(dice.sample(range(1, 12), dice.randint(1, 3))))
        for name, tokens in prompts.items()
    ]
    alone = Stays(generation("alone", "m", prompts["r200"], 30), sorted(dice.sample(range(1, 12), 2)))
    run_with_parks(driver, *together)
    run_with_parks(driver, alone)
    codec = driver.engine.codec("m")
    for each in (*together, alone):
        assert each.parks >= 1
        assert (each.end, len(each.tokens)) == (FinishReason.LENGTH, 30)
        tokens, margins = expected["r200" if each is alone else each.order.request]
        assert same_until_a_tie(each.text, codec, tokens, margins), each.order.request
    driver.engine.rest().result()
    assert driver.engine.kv_bytes()["m"] == 0


def test_a_seed_gives_the_same_tokens_over_parks(driver: Driver, tiny_model: Callable[..., Path]) -> None:
    driver.load("m", tiny_model())
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.7, "repetition_penalty": 1.2}
    orders = [
        generation(f"r{seed}", "m", prompt(20, seed), 40, temperature=1.0, seed=seed, **(penalties if seed else {}))
        for seed in range(3)
    ]
    undisturbed = [Stays(replace(order, request=f"{order.request}-whole"), ()) for order in orders]
    parked = [Stays(order, (3, 17, 30)) for order in orders]
    run_with_parks(driver, *undisturbed)
    run_with_parks(driver, *parked)
    assert [each.parks for each in parked] == [3, 3, 3]
    assert [each.tokens for each in parked] == [each.tokens for each in undisturbed]
    assert [each.text for each in parked] == [each.text for each in undisturbed]


def test_a_stop_sequence_that_a_park_cuts_in_two_still_stops(driver: Driver, tiny_model: Callable[..., Path]) -> None:
    driver.load("m", tiny_model())
    whole = Stays(generation("whole", "m", prompt(20, 1), 40), ())
    run_with_parks(driver, whole)
    ends = [sum(map(len, whole.pieces[: at + 1])) for at in range(len(whole.pieces))]
    at = next(at for at in range(8, 36) if min(map(len, whole.pieces[at : at + 2])) > 0)
    word = whole.text[ends[at] - 1 : ends[at + 1]]  # its first half ends token `at`, the rest is token `at + 1`
    expected = whole.text[: whole.text.index(word)]
    cut = Stays(generation("cut", "m", prompt(20, 1), 40, stop=(word,)), (at + 1,))
    run_with_parks(driver, cut)
    assert (cut.text, cut.end) == (expected, FinishReason.STOP)


def test_a_character_that_a_park_cuts_in_two_arrives_whole(driver: Driver, tiny_model: Callable[..., Path]) -> None:
    driver.load("m", tiny_model())
    codec = driver.engine.codec("m")
    assert codec is not None
    first, _ = codec.encode_text("é")[-2:]
    stream = codec.stream_text(())  # type: ignore[attr-defined]
    assert stream.add(first) == ("", False), "the tokenizer must spell this character with two tokens"
    resumed = generation("r", "m", prompt(20, 1), 2)
    (text, end) = driver.run(replace(resumed, generated=(first,)))["r"]
    (made,) = [event.token_ids[0] for event in driver.seen if isinstance(event, Generated)]
    stream = codec.stream_text(())  # type: ignore[attr-defined]
    assert stream.add(first)[0] + stream.add(made)[0] + stream.finish() == text
    assert end is FinishReason.LENGTH


def test_parking_one_of_four_gives_its_share_back_at_once(driver: Driver, tiny_model: Callable[..., Path]) -> None:
    driver.load("m", tiny_model())
    idle_bytes = driver.engine.rest().result().active_bytes
    names = [f"r{at}" for at in range(4)]
    driver.start(*(generation(name, "m", prompt(1200, at), 4000) for at, name in enumerate(names)))
    for name in names:
        driver.until(Generated, lambda event, name=name: event.request == name)
    four_bytes = driver.engine.rest().result().active_bytes - idle_bytes
    driver.drop("r3")
    driver.until(RequestGone)
    three_bytes = driver.engine.rest().result().active_bytes - idle_bytes
    assert 0.70 < three_bytes / four_bytes < 0.80
    driver.drop(*names)
    driver.until(RequestGone, lambda event: event.request == "r2")


@pytest.mark.parametrize("kind", ["llama", "mamba2"])
def test_parking_a_lone_request_or_one_in_prefill_leaves_nothing(
    kind: str, driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    driver.load("m", tiny_model(kind, KINDS[kind]))
    driver.run(generation("warm", "m", prompt(300, 1), 5))
    idle_bytes = driver.engine.rest().result().active_bytes
    driver.start(generation("lone", "m", prompt(300, 1), 4000))
    driver.until(Generated, lambda event: event.request == "lone")
    assert driver.engine.rest().result().active_bytes > idle_bytes + 50_000
    driver.drop("lone")
    driver.until(RequestGone)
    assert driver.engine.rest().result().active_bytes <= idle_bytes + 4096
    driver.apply(prefill_chunk_tokens=64)
    driver.start(generation("prefilling", "m", prompt(4000, 1), 5))
    driver.until(Prefilled, lambda event: event.done >= 256)
    driver.drop("prefilling")
    driver.until(RequestGone)
    assert driver.engine.rest().result().active_bytes <= idle_bytes + 4096


def test_the_prefill_of_a_resumed_request_counts_what_it_had_generated(
    driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    driver.load("m", tiny_model())
    resumed = replace(generation("r", "m", prompt(100, 1), 40), generated=tuple(prompt(30, 2)), prefill_chunk_tokens=50)
    driver.run(resumed)
    assert [event.done for event in driver.seen if isinstance(event, Prefilled)] == [50, 100, 130]
    assert {event.total for event in driver.seen if isinstance(event, Prefilled)} == {130}
    assert sum(event.tokens for event in driver.seen if isinstance(event, Generated)) == 10


def test_what_streaming_holds_back_is_known_for_an_answer_that_is_cut_short(
    driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    driver.load("m", tiny_model())
    codec = driver.engine.codec("m")
    assert codec is not None
    tokens = codec.encode_text("so far E")
    assert codec.held_back(tokens, ("END",)) == "E"
    assert codec.held_back(tokens, ()) == ""


def test_one_that_is_taken_out_while_the_engine_stands_still_gives_its_memory_back_at_once(
    driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    driver.load("a", tiny_model("llama", 5_000_000))
    idle_bytes = driver.engine.rest().result(60).active_bytes
    driver.apply(limits=EngineLimits(idle_bytes, 0, idle_bytes + 1))
    order = generation("r1", "a", prompt(600, 1), max_tokens=4)
    driver.apply(requests={"r1": order})
    over = driver.until(OverLimit)
    assert over.reading.active_bytes > idle_bytes
    driver.apply(requests={}, seen_seq=over.seq - 1)  # the engine stands still until the pressure was looked at
    driver.until(RequestGone)
    assert driver.engine.rest().result(60).active_bytes <= idle_bytes + 4096
