"""The hard limit inside steps: what a step takes, and what MLX keeps of what it has freed, fit below it together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from omlxd.core.costs import costs_of_config
from omlxd.core.states import FinishReason
from omlxd.daemon.model_files import read_model_folder
from omlxd.engine.orders import EngineLimits
from tests.engine.driver import Driver, generation

pytestmark = pytest.mark.mlx

PROMPT_TOKENS, CHUNK_TOKENS = 2000, 128


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
