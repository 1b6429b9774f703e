"""Several models and prompts at once on the real engine: whose step comes when, told by the order of its events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from omlxd.core.states import FinishReason
from omlxd.engine.events import EngineEvent, Generated, LoadDone, LoadProgress, Prefilled
from omlxd.engine.orders import MIB
from tests.engine.driver import Driver, generation, reference
from tests.engine.test_generation import prompt, same_until_a_tie

pytestmark = pytest.mark.mlx

STEPS_BEFORE = 2
"""The step that runs when a request comes, and one when its plan was not seen before that step began."""


def between(driver: Driver, since: int, of: Callable[[EngineEvent], bool]) -> int:
    """How many such events came since that event number and before the last one seen."""
    return sum(of(event) for event in driver.seen if event.seq > since)


def is_chunk_of(request: str) -> Callable[[EngineEvent], bool]:
    return lambda event: isinstance(event, Prefilled) and event.request == request


@pytest.mark.parametrize("model", ["same", "other"])
def test_a_short_prompt_has_its_first_token_after_the_running_chunk_of_a_long_one(
    model: str, driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    driver.load("same", tiny_model("llama", 3_000_000))
    driver.load("other", tiny_model())
    driver.start(generation("long", "same", prompt(20_000, 1), 3))
    for number in range(3):
        driver.until(Prefilled)
        since, short = driver.seen[-1].seq, f"short{number}"
        driver.start(generation(short, model, prompt(20, number), 3))
        driver.until(Generated, lambda event, short=short: event.request == short)  # type: ignore[misc]
        assert between(driver, since, is_chunk_of("long")) <= STEPS_BEFORE
    assert not any(isinstance(event, Generated) and event.request == "long" for event in driver.seen)
    driver.drop("long")


def test_of_prompts_that_are_equally_long_the_one_asked_first_goes_first(
    driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    driver.load("m", tiny_model("llama", 3_000_000))
    later = replace(generation("later", "m", prompt(3_000, 1), 3), arrival=2)
    first = replace(generation("first", "m", prompt(3_000, 2), 3), arrival=1)
    driver.start(later, first)  # as they come when the first took longer to tokenize
    driver.until(Generated)
    assert [event.request for event in driver.seen if isinstance(event, Generated)] == ["first"]
    driver.drop("later", "first")


def test_a_short_prompt_has_its_first_token_after_the_running_slice_of_a_load(
    driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    driver.load("small", tiny_model())
    driver.apply(load=driver.order("big", tiny_model("llama", 300 * MIB, layers=8)))
    driver.until(LoadProgress)
    since = driver.seen[-1].seq
    driver.start(generation("r", "small", prompt(20, 1), 3))
    driver.until(Generated)
    assert between(driver, since, lambda event: isinstance(event, LoadProgress)) <= STEPS_BEFORE
    driver.until(LoadDone)


def test_answers_go_on_between_any_two_chunks_of_a_long_prompt(driver: Driver, tiny_model: Callable[..., Path]) -> None:
    for name in ("a", "b"):
        driver.load(name, tiny_model())
    for name in ("a", "b"):
        driver.start(generation(f"stream-{name}", name, [5, 6, 7], 4000))
        driver.until(Generated, lambda event, name=name: event.request == f"stream-{name}")  # type: ignore[misc]
    since = driver.seen[-1].seq
    driver.start(generation("long", "a", prompt(1500, 1), 1))
    driver.until(Generated, lambda event: event.request == "long")
    seen = [event for event in driver.seen if event.seq > since]
    chunks = [at for at, event in enumerate(seen) if is_chunk_of("long")(event)]
    assert len(chunks) > 2
    for one, next_one in pairwise(chunks):
        told = {event.request for event in seen[one:next_one] if isinstance(event, Generated)}
        assert told == {"stream-a", "stream-b"}
    driver.drop("stream-a", "stream-b")


def test_prompts_of_one_model_that_pass_each_other_give_the_same_text_as_one_by_one(
    driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    path = tiny_model()
    prompts = {f"r{length}": prompt(length, length) for length in (1500, 700, 40, 300)}
    expected = reference(path, prompts, 20)
    driver.load("m", path)
    driver.apply(prefill_chunk_tokens=64)
    first, *others = [generation(name, "m", tokens, 20) for name, tokens in prompts.items()]
    driver.start(first)
    driver.until(Prefilled)
    driver.start(*others)
    together = driver.collect(set(prompts))
    codec = driver.engine.codec("m")
    for name, (text, end) in together.items():
        assert end is FinishReason.LENGTH
        assert same_until_a_tie(text, codec, *expected[name]), name
    joined = [event.request for event in driver.seen if isinstance(event, Prefilled) and event.done == event.total]
    assert joined.index("r40") < joined.index("r1500")


@pytest.mark.parametrize("one_leaves", [False, True], ids=["all stay", "one leaves"])
def test_short_prompts_that_come_together_hear_their_first_tokens_one_by_one_and_then_go_on_together(
    one_leaves: bool, driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    path = tiny_model()
    prompts = {f"r{number}": prompt(300, number) for number in range(5)}
    expected = reference(path, prompts, 12)
    driver.load("m", path)
    driver.start(*(generation(name, "m", tokens, 12) for name, tokens in prompts.items()))
    gone = {driver.until(Generated).request} if one_leaves else set()
    driver.drop(*gone)
    together = driver.collect(set(prompts) - gone)
    codec = driver.engine.codec("m")
    assert all(same_until_a_tie(text, codec, *expected[name]) for name, (text, _) in together.items())
    assert sum(driver.engine.kv_bytes().values()) == 0
    told = [event.request for event in driver.seen if isinstance(event, Generated)]
    read = [event.request for event in driver.seen if isinstance(event, Prefilled) and event.done == event.total]
    *before_the_last, _ = read
    assert told[: len(before_the_last)] == before_the_last, "nobody has a second token before all are read"
    ends = [event.seq for event in driver.seen if isinstance(event, Prefilled) and event.done == event.total]
    early = [event.request for event in driver.seen if isinstance(event, Generated) and event.seq < ends[-1]]
    assert early == before_the_last, "and nobody waits for the first one until all are read"
    of_one = [event for event in driver.seen if isinstance(event, Prefilled | Generated) and event.request == "r0"]
    kinds = [type(event) for event in of_one]
    assert kinds == sorted(kinds, key=[Prefilled, Generated].index), "what is answered is not read any more"


@pytest.mark.parametrize("group_tokens", [0, 256], ids=["one by one", "at once"])
def test_answers_of_one_token_end_while_the_others_are_still_read(
    group_tokens: int, driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    driver.load("m", tiny_model())
    driver.apply(group_tokens={"m": group_tokens})
    base = driver.engine.kv_bytes()
    orders = [generation(f"r{number}", "m", prompt(10, number), 1) for number in range(4)]
    ended = driver.run(*orders)
    assert {end for _, end in ended.values()} == {FinishReason.LENGTH}
    assert sum(driver.engine.kv_bytes().values()) == sum(base.values())


def test_a_short_prompt_waits_a_moment_for_others_that_are_on_their_way(
    driver_of: Callable[..., Driver], tiny_model: Callable[..., Path]
) -> None:
    driver = driver_of(clock=lambda: 0.0)  # the moment never ends
    driver.load("m", tiny_model())
    driver.apply(group_tokens={"m": 256}, coming={"m": 1})
    driver.start(generation("first", "m", prompt(20, 1), 4))
    driver.engine.rest().result()  # it has seen that plan, and has nothing to do
    assert not [event for event in driver.seen if isinstance(event, Prefilled)]
    driver.apply(coming={})
    driver.start(generation("second", "m", prompt(20, 2), 4))
    driver.collect({"first", "second"})
    read = [(event.request, event.kv_bytes) for event in driver.seen if isinstance(event, Prefilled)]
    assert read == [("first", 0), ("second", 0)], "both in one step, of which nobody's own cache is known"


def test_it_does_not_wait_for_what_never_comes(driver: Driver, tiny_model: Callable[..., Path]) -> None:
    driver.load("m", tiny_model())
    driver.apply(group_tokens={"m": 256}, coming={"m": 1})
    assert driver.run(generation("only", "m", prompt(20, 1), 4))["only"][1] is FinishReason.LENGTH


def test_a_long_prompt_has_nobody_to_wait_for(
    driver_of: Callable[..., Driver], tiny_model: Callable[..., Path]
) -> None:
    driver = driver_of(clock=lambda: 0.0)
    driver.load("m", tiny_model())
    driver.apply(coming={"m": 1})
    assert driver.run(generation("long", "m", prompt(600, 1), 4))["long"][1] is FinishReason.LENGTH
