"""Whatever chunks and prefix hits bring a prompt in, its KV cache never holds more than the ledger reserves for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from omlxd.core.costs import ShapeCosts, costs_of_config
from omlxd.core.ledger import Ledger
from omlxd.daemon.model_files import read_model_folder
from omlxd.engine.events import NeedsBlock, Prefilled
from tests.engine.driver import Driver, generation
from tests.engine.test_generation import prompt

pytestmark = pytest.mark.mlx

MIB = 2**20
STEP_BYTES = 64 * 1024  # the token in flight: logits of a tiny vocabulary
KINDS = {"llama": 1_000_000, "gemma3_text": 6_000_000}


def costs_of(folder: Path) -> ShapeCosts:
    files = read_model_folder(folder)
    return costs_of_config(files.config, files.element_bytes, None, "cpu")


def requests_bytes(driver: Driver) -> int:
    """Everything but what is kept of earlier prompts."""
    reading = driver.engine.rest().result()
    return reading.active_bytes - sum(driver.engine.prefix_bytes().values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_stands_at_the_end_of_its_grant_is_within_what_was_reserved(
    kind: str, driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    folder = tiny_model(kind, KINDS[kind])
    costs, draw = costs_of(folder), random.Random(3)
    driver.load("m", folder)
    driver.apply(prefix_cache_bytes=64 * MIB)
    never_ends = tuple((token, -1e9) for token in sorted(driver.engine.codec("m").end_ids))
    model_bytes = requests_bytes(driver)
    for number in range(4):
        name, tokens, shared = f"r{number}", draw.randrange(200, 600), 101 + number // 2
        chunk = draw.choice([16, 64, 100, 192, 256, 300])
        ledger = Ledger()
        ledger.reserve("m", name, costs, tokens, chunk)
        share, granted = ledger.share("m"), ledger.granted_tokens()
        ids = (*prompt(shared, seed=number // 2), *prompt(tokens - shared, seed=number))
        order = generation(name, "m", ids, max_tokens=100_000, logit_bias=never_ends)
        driver.apply(granted_tokens=granted)
        driver.start(replace(order, prefill_chunk_tokens=chunk, shared_tokens=shared))
        assert driver.until(NeedsBlock).length_tokens == granted["m"]
        assert requests_bytes(driver) - model_bytes <= share.kv_bytes + STEP_BYTES, (tokens, chunk)
        steps = [event for event in driver.seen if isinstance(event, Prefilled) and event.request == name]
        assert max(step.kv_bytes for step in steps) <= share.kv_bytes + share.prefill_bytes
        assert steps[0].reused == (shared if number % 2 else 0)
        driver.drop(name)


def test_no_chunk_leaves_a_cache_with_more_than_the_rest_of_a_block(
    driver: Driver, tiny_model: Callable[..., Path]
) -> None:
    folder = tiny_model("llama", 1_000_000)
    costs = costs_of(folder)
    driver.load("m", folder)
    for chunk in (48, 100, 300):
        order = generation(f"c{chunk}", "m", prompt(1000, seed=chunk), max_tokens=2)
        driver.run(replace(order, prefill_chunk_tokens=chunk))
    chunks = [event for event in driver.seen if isinstance(event, Prefilled)]
    assert len(chunks) > 30
    for event in chunks[:-1]:
        assert event.kv_bytes == costs.kv_bytes(event.done), event
