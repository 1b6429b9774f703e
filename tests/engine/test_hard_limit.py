"""The hard limit inside steps: what a step takes, and what MLX keeps of what it has freed, fit below it together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from omlxd.core.costs import costs_of_config
from omlxd.core.ledger import Ledger
from omlxd.core.states import FinishReason
from omlxd.daemon.model_files import read_model_folder
from omlxd.engine.orders import EngineLimits, GenerationOrder
from tests.engine.driver import Driver, generation

pytestmark = pytest.mark.mlx

PROMPT_TOKENS, CHUNK_TOKENS = 2000, 128
SHORT_TOKENS, OTHERS = 20, 8


@pytest.mark.slow
def test_active_and_cache_stay_below_the_hard_limit_inside_steps_that_were_promised_all_of_it(
    tiny_model: Callable[..., Path],
) -> None:
    folder = tiny_model("llama", 3_000_000, layers=2)
    files = read_model_folder(folder)
    costs = costs_of_config(files.config, files.element_bytes, None, "cpu")
    transient = costs.prefill_transient_bytes(CHUNK_TOKENS, PROMPT_TOKENS)
    soft = files.weights_bytes + costs.kv_bytes(PROMPT_TOKENS + 256)
    driver = Driver()
    try:
        driver.engine.sampler._interval_s = 0.0003  # inside steps, and not only now and then
        driver.load("m", folder)
        limits = EngineLimits(soft, soft + transient, pause_above_bytes=0)
        driver.apply(limits=limits, transient_bytes=transient)
        order = generation("r", "m", [5 + number % 90 for number in range(PROMPT_TOKENS)], max_tokens=4)
        _, end = driver.run(replace(order, prefill_chunk_tokens=CHUNK_TOKENS))["r"]
        assert end is FinishReason.LENGTH
        seen = driver.engine.sampled()
        assert seen.samples > 100
        assert driver.engine.sampler.peak_total_bytes > soft  # so that there was something to see
        assert seen.over_hard_samples == 0, f"{seen} of {limits}"
    finally:
        driver.engine.close()


@pytest.mark.slow
def test_rows_that_join_a_batch_find_the_room_that_they_were_promised_and_no_cache_in_it(
    driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    folder = tiny_model("llama", 3_000_000, layers=2)
    files = read_model_folder(folder)
    costs = costs_of_config(files.config, files.element_bytes, None, "cpu")
    orders = [_order("long", PROMPT_TOKENS)] + [_order(f"short-{number}", SHORT_TOKENS) for number in range(OTHERS)]
    ledger = Ledger()
    ledger.reserve_weights("m", files.weights_bytes)
    for order in orders:
        ledger.reserve("m", order.request, costs, len(order.prompt), CHUNK_TOKENS)
    transient, promised = ledger.transient_bytes, ledger.committed_bytes
    driver.engine.sampler._interval_s = 0.0003
    driver.load("m", folder)
    driver.run(*(replace(order, request=f"{order.request} before") for order in orders))  # so that MLX's cache is full
    limits = EngineLimits(promised, promised + 2 * transient, pause_above_bytes=0)
    driver.apply(limits=limits, transient_bytes=transient, promised_bytes=promised)
    driver.engine.rest().result()
    before = driver.engine.sampled()
    assert {end for _, end in driver.run(*orders).values()} == {FinishReason.LENGTH}
    seen = driver.engine.sampled()
    assert seen.samples > before.samples + 100
    assert driver.engine.sampler.peak_total_bytes > promised
    assert seen.over_hard_samples == before.over_hard_samples, f"{seen} of {limits}"


def _order(request: str, tokens: int) -> GenerationOrder:
    order = generation(request, "m", [5 + number % 90 for number in range(tokens)], max_tokens=150)
    return replace(order, prefill_chunk_tokens=CHUNK_TOKENS, cache_prompt=False)
