"""Exceptions inside the engine's thread: who ends, who goes on with the right text, and that nobody waits for ever."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from omlxd.core.errors import Busy, DoesNotFit, EngineFailed, LoadFailed
from omlxd.core.states import FinishReason
from omlxd.engine import decode_lanes, kv_caches, mishaps, mlxlm, sampling, unloading
from omlxd.engine.events import Generated, LoadDone, LoadEnded, Prefilled, StepFailed, Unloaded
from omlxd.engine.executor import PlanExecutor
from omlxd.engine.load_errors import explain
from omlxd.engine.orders import LoadOrder, Sampling
from omlxd.engine.running import Running
from tests.engine.driver import Driver, generation

pytestmark = pytest.mark.mlx

PROMPTS = {"x": (5, 6), "y": (7, 8, 9), "z": tuple(range(1, 60))}


@pytest.fixture
def alone(driver: Driver, tiny_model: Callable[..., Path]) -> dict[str, str]:
    """With two models loaded, what each prompt is answered by `m` when nothing disturbs it."""
    for name, seed in (("m", 1), ("other", 2)):
        assert isinstance(driver.load(name, tiny_model("llama", 1_000_000, seed=seed)), LoadDone)
    return {name: driver.run(generation(f"{name}0", "m", PROMPTS[name], 40))[f"{name}0"][0] for name in PROMPTS}


def rest_bytes(driver: Driver) -> int:
    return driver.engine.rest().result().active_bytes


def steps(driver: Driver) -> list[tuple[str | None, str]]:
    return [(event.model, event.step) for event in driver.seen if isinstance(event, StepFailed)]


def failing(function: Callable[..., Any], error: Exception, *, when: Callable[..., bool]) -> Callable[..., Any]:
    """The function, which raises instead the first time that it is called so."""
    left = [error]

    def wrapped(*arguments: Any, **named: Any) -> Any:
        if left and when(*arguments, **named):
            raise left.pop()
        return function(*arguments, **named)

    return wrapped


@pytest.mark.parametrize("shaping", [{}, {"frequency_penalty": 0.5}])
def test_an_exception_in_one_requests_sampler_ends_that_request_and_no_row_beside_it(
    shaping: dict[str, float],
    driver: Driver,
    alone: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = sampling.make_sampler

    def sampler(wanted: Sampling, position: int) -> sampling.Sampler:
        inner, calls = make(wanted, position), iter(range(10))
        return inner if wanted.seed != 666 else lambda logprobs: (next(calls), inner(logprobs))[1]

    monkeypatch.setattr(sampling, "make_sampler", sampler)
    ends = driver.run(
        generation("bad", "m", (5, 6, 7), 40, seed=666, temperature=1.0, **shaping),
        *(generation(name, "m", tokens, 40) for name, tokens in PROMPTS.items()),
    )
    assert isinstance(ends.pop("bad")[1], EngineFailed)
    assert ends == {name: (text, FinishReason.LENGTH) for name, text in alone.items()}
    assert steps(driver) == [("m", "token")]


def test_an_exception_in_one_requests_text_ends_that_request_alone(
    driver: Driver, alone: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_it(request: Running, _token: int) -> bool:
        return request.order.request == "bad" and request.generated == 5

    secret = ValueError("a word of the prompt")
    monkeypatch.setattr(Running, "accept", failing(Running.accept, secret, when=is_it))
    ends = driver.run(
        generation("bad", "m", (5, 6, 7), 40), *(generation(name, "m", tokens, 40) for name, tokens in PROMPTS.items())
    )
    _, error = ends.pop("bad")
    assert isinstance(error, EngineFailed)
    assert "a word of the prompt" in error.message
    assert "a word of the prompt" not in str(error.to_log())
    (told,) = (event for event in driver.seen if isinstance(event, StepFailed))
    assert told.error == "ValueError"
    assert ends == {name: (text, FinishReason.LENGTH) for name, text in alone.items()}


def test_a_batch_whose_step_raises_ends_and_neither_those_who_wait_beside_it_nor_other_models_do(
    driver: Driver, alone: dict[str, str], monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path]
) -> None:
    driver.apply(max_batch=2)
    driver.load("two", tiny_model("llama", 1_000_000, seed=1))
    rest = rest_bytes(driver)
    error = RuntimeError("[malloc] Unable to allocate 17 bytes.")
    good = iter(range(20))
    step = failing(decode_lanes.DecodeBatch.step, error, when=lambda _: next(good, None) is None)
    monkeypatch.setattr(decode_lanes.DecodeBatch, "step", step)
    driver.start(generation("a", "two", (5, 6, 7), 200), generation("b", "two", (5, 6, 7, 8), 200))
    driver.until(Generated, lambda event: event.request == "b")
    beside = [generation(name, "two", tokens, 40) for name, tokens in PROMPTS.items()]
    driver.start(*beside, generation("o", "other", (5, 6), 200))
    ends = driver.collect({"a", "b", "o", *PROMPTS})
    for name in ("a", "b"):
        text, end = ends.pop(name)
        assert isinstance(end, EngineFailed)
        assert (end.details, "ran out of memory" in end.message) == ({"kind": "out_of_memory"}, True)
        assert text
    assert ends.pop("o")[1] is FinishReason.LENGTH
    assert ends == {name: (text, FinishReason.LENGTH) for name, text in alone.items()}
    assert steps(driver) == [("two", "decode")]
    assert rest_bytes(driver) - rest < 4096


def test_a_prompt_whose_step_raises_ends_alone_and_gives_its_memory_back(
    driver: Driver, alone: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = rest_bytes(driver)
    second = failing(mlxlm.prefill_chunk, MemoryError(), when=lambda _model, cache, _tokens: cache[0].offset > 0)
    monkeypatch.setattr(mlxlm, "prefill_chunk", second)
    ends = driver.run(
        replace(generation("bad", "m", range(120, 20, -1), 40), prefill_chunk_tokens=16),
        *(generation(name, "m", PROMPTS[name], 40) for name in ("x", "y")),
    )
    assert isinstance(ends.pop("bad")[1], EngineFailed)
    assert ends == {name: (alone[name], FinishReason.LENGTH) for name in ("x", "y")}
    assert rest_bytes(driver) - rest < 4096


def test_short_prompts_whose_common_step_raises_end_and_give_their_memory_back_and_nobody_else_ends(
    driver: Driver, alone: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = rest_bytes(driver)
    raising = failing(kv_caches.read_together, MemoryError(), when=lambda _model, _prompts: True)
    monkeypatch.setattr(kv_caches, "read_together", raising)
    driver.apply(group_tokens={"m": 256})
    driver.start(generation("beside", "m", PROMPTS["x"], 40))
    begun = driver.until(Generated).text
    driver.start(generation("a", "m", (5, 6, 7), 40), generation("b", "m", (8, 6, 7, 9), 40))
    ends = driver.collect({"a", "b", "beside"})
    assert all(isinstance(ends[name][1], EngineFailed) for name in ("a", "b"))
    assert (begun + ends["beside"][0], ends["beside"][1]) == (alone["x"], FinishReason.LENGTH)
    assert steps(driver) == [("m", "prefill")]
    assert rest_bytes(driver) - rest < 4096


def test_a_request_that_gets_lost_on_the_way_into_the_batch_ends_with_an_error_too(
    driver: Driver, alone: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave = failing(decode_lanes.LoneDecode.leave, RuntimeError("gone"), when=lambda _: True)
    monkeypatch.setattr(decode_lanes.LoneDecode, "leave", leave)
    driver.start(generation("lone", "m", (5, 6), 900))
    driver.until(Prefilled)
    driver.start(generation("second", "m", PROMPTS["z"], 40))
    ends = driver.collect({"lone", "second"})
    assert all(isinstance(end, EngineFailed) for _, end in ends.values())
    assert driver.run(generation("again", "m", PROMPTS["x"], 40))["again"][0] == alone["x"]


def test_an_abort_that_raises_is_one_all_the_same_and_costs_the_batch_and_nobody_else(
    driver: Driver, alone: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        kv_caches, "make_contiguous", failing(kv_caches.make_contiguous, RuntimeError("no memory"), when=lambda _: True)
    )
    driver.start(
        generation("goes", "m", PROMPTS["x"], 900),
        generation("beside", "m", PROMPTS["y"], 900),
        generation("o", "other", (5, 6), 200),
    )
    driver.until(Generated, lambda event: event.request == "beside")
    driver.drop("goes")
    ends = driver.collect({"goes", "beside", "o"})
    assert isinstance(ends["goes"][1], KeyError)  # RequestGone
    assert isinstance(ends["beside"][1], EngineFailed)
    assert ends["o"][1] is FinishReason.LENGTH
    assert steps(driver) == [("m", "abort")]
    assert driver.run(generation("again", "m", PROMPTS["x"], 40))["again"][0] == alone["x"]


def test_an_unload_that_raises_is_told_as_done_and_the_memory_is_back(
    driver: Driver, alone: dict[str, str], monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path]
) -> None:
    before = rest_bytes(driver)
    with monkeypatch.context() as broken:
        broken.setattr(unloading, "trim_heap", failing(unloading.trim_heap, RuntimeError("x"), when=lambda: True))
        told = driver.unload("other")
    assert before - told.reading.active_bytes > 900_000
    assert steps(driver) == [("other", "unload")]
    assert isinstance(driver.load("other", tiny_model("llama", 1_000_000, seed=2)), LoadDone)
    assert driver.run(generation("again", "m", PROMPTS["x"], 40))["again"][0] == alone["x"]


def test_a_load_whose_end_raises_is_told_as_ended(
    driver: Driver, alone: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def released() -> None:
        raise RuntimeError("x")

    (tmp_path / "empty").mkdir()
    with monkeypatch.context() as broken:
        broken.setattr(mlxlm, "release_memory", released)
        assert isinstance(driver.load("new", tmp_path / "empty"), LoadEnded)
    assert driver.run(generation("again", "m", PROMPTS["x"], 40))["again"][0] == alone["x"]


def test_a_bug_of_ours_ends_what_is_in_the_plan_each_once_and_the_rest_of_the_plan_is_obeyed(
    driver: Driver, alone: dict[str, str], monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path]
) -> None:
    follow = failing(PlanExecutor.follow, KeyError("bug"), when=lambda _, plan: "new" in plan.requests)
    driver.start(generation("old", "m", PROMPTS["x"], 900))
    driver.until(Prefilled)

    def stumble(executor: PlanExecutor, plan: Any) -> None:
        executor._plan = plan
        follow(executor, plan)

    monkeypatch.setattr(PlanExecutor, "follow", stumble)
    driver.apply(
        requests={**driver.plan.requests, "new": generation("new", "m", PROMPTS["y"], 40)},
        resident=frozenset({"m"}),
    )
    ends = driver.collect({"old", "new"})
    assert all(isinstance(end, EngineFailed) for _, end in ends.values())
    assert "bug" not in str(ends["new"][1].to_log())  # type: ignore[union-attr]
    assert any(isinstance(event, Unloaded) for event in driver.seen) or driver.until(Unloaded)
    assert driver.run(generation("again", "m", PROMPTS["x"], 40))["again"][0] == alone["x"]


@pytest.mark.parametrize(
    "text",
    [
        "[malloc] Unable to allocate 68719476736 bytes.",
        "[metal::malloc] Attempting to allocate 9 bytes which is greater than the maximum allowed buffer size of 8.",
        "[metal::malloc] Resource limit (499000) exceeded.",
        "[METAL] Command buffer failed: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        "cudaMallocAsync(&data, size, stream) failed: out of memory",
        "std::bad_alloc",
    ],
)
def test_memory_that_ran_out_is_told_as_such_whatever_the_device_calls_it(text: str) -> None:
    order = LoadOrder(1, "m", str(Path(__file__).parent))
    assert isinstance(explain(RuntimeError(text), order), DoesNotFit)
    assert "ran out of memory" in mishaps.failure("m", RuntimeError(text)).message


def test_other_errors_are_not_told_as_a_lack_of_memory() -> None:
    assert not mishaps.is_out_of_memory(ValueError("[matmul] shapes do not match"))
    assert mishaps.is_out_of_memory(MemoryError())


def test_a_load_that_finds_no_descriptor_says_nothing_bad_about_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    order = LoadOrder(1, "m", str(Path(__file__).parent))
    assert isinstance(explain(OSError(errno.EMFILE, "Too many open files"), order), Busy)
    damaged = RuntimeError("[load_safetensors] Failed to open file")
    assert isinstance(explain(damaged, order), LoadFailed)

    def no_more(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(mishaps.os, "open", no_more)
    assert isinstance(explain(damaged, order), Busy)
