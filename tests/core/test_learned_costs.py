"""Costs learned from measured chunks cover what was measured and tell growth from constants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.core.learned_costs import ChunkSample, LearnedCosts, learn

SAMPLES = st.builds(
    ChunkSample,
    chunk_tokens=st.integers(1, 2048),
    context_tokens=st.integers(1, 100_000),
    kv_bytes=st.integers(0, 2**36),
    transient_bytes=st.integers(0, 2**36),
)


def kv_of(costs: LearnedCosts, context: int) -> float:
    return costs.state_bytes + costs.kv_token_bytes * (-(-context // 256) * 256)


def transient_of(costs: LearnedCosts, chunk: int, context: int) -> float:
    return chunk * (costs.transient_token_bytes + costs.transient_pair_bytes * context)


@given(st.lists(SAMPLES, min_size=1, max_size=8))
def test_no_sample_is_predicted_below_what_was_measured(samples: list[ChunkSample]) -> None:
    costs = learn(samples)
    assert costs is not None
    for sample in samples:
        assert kv_of(costs, sample.context_tokens) >= sample.kv_bytes * (1 - 1e-6) - 1
        predicted = transient_of(costs, sample.chunk_tokens, sample.context_tokens)
        assert predicted >= sample.transient_bytes * (1 - 1e-6) - 1


def test_a_state_and_growing_keys_are_told_apart() -> None:
    samples = [ChunkSample(256, n, 5_000_000 + 1024 * n, 256 * (9_000 + 16 * n)) for n in (256, 512, 1024)]
    costs = learn(samples)
    assert costs is not None
    assert costs.state_bytes == pytest.approx(5_000_000, rel=1e-6)
    assert costs.kv_token_bytes == pytest.approx(1024)
    assert costs.transient_token_bytes == pytest.approx(9_000)
    assert costs.transient_pair_bytes == pytest.approx(16)


def test_a_model_whose_cache_does_not_grow_is_not_said_to_grow() -> None:
    costs = learn([ChunkSample(256, n, 7_000_000, 3_000_000) for n in (256, 4096)])
    assert costs is not None
    assert (costs.kv_token_bytes, costs.state_bytes, costs.transient_pair_bytes) == (0.0, 7_000_000, 0.0)


def test_one_sample_is_met_exactly() -> None:
    costs = learn([ChunkSample(256, 256, 1_000_000, 4_000_000)])
    assert costs is not None
    assert kv_of(costs, 256) == pytest.approx(1_000_000)
    assert transient_of(costs, 256, 256) == pytest.approx(4_000_000)


def test_without_a_sample_nothing_is_learned() -> None:
    assert learn([]) is None
    assert learn([ChunkSample(0, 100, 1, 1)]) is None
