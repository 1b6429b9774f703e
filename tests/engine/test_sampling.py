"""How tokens are chosen: bias, penalties and log probabilities, alone, among neighbours and after a park."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from omlxd.engine.events import Generated, TokenLogprob
from omlxd.engine.orders import GenerationOrder, Sampling
from tests.engine.driver import Driver, on_mlx_thread, reference

pytestmark = pytest.mark.mlx

PROMPT = [70, 80, 90, 100]
A, B, C = 65, 66, 67


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model()


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Driver]:
    made = Driver()
    made.load("m", folder)
    yield made
    assert made.engine.close()


NUMBER = iter(range(1000))


def order(
    max_tokens: int = 8, top_logprobs: int | None = None, generated: tuple[int, ...] = (), **sampling: object
) -> GenerationOrder:
    return GenerationOrder(
        f"r{next(NUMBER)}",
        "m",
        tuple(PROMPT),
        max_tokens,
        Sampling(**sampling),  # type: ignore[arg-type]
        generated=generated,
        top_logprobs=top_logprobs,
    )


def tokens(engine: Driver, *orders: GenerationOrder) -> list[list[int]]:
    """The new tokens of each."""
    engine.run(*orders)
    return [[token for event in told(engine, each) for token in event.token_ids] for each in orders]


def told(engine: Driver, asked: GenerationOrder) -> list[Generated]:
    return [event for event in engine.seen if isinstance(event, Generated) and event.request == asked.request]


def both() -> dict[str, object]:
    """Two tokens far above all others, A above B."""
    return {"logit_bias": ((A, 9000.0), (B, 8000.0))}


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (both(), [A] * 6),
        ({"logit_bias": ((A, 9000.0), (B, 8000.0), (A, -2000.0))}, [B] * 6),
        ({**both(), "presence_penalty": 1500.0}, [A, B, A, A, A, A]),
        ({**both(), "frequency_penalty": 1500.0}, [A, B, A, B, A, B]),
        ({**both(), "presence_penalty": -1500.0}, [A] * 6),
    ],
)
def test_bias_and_penalties_steer_the_greedy_choice(
    engine: Driver, sampling: dict[str, object], expected: list[int]
) -> None:
    assert tokens(engine, order(6, **sampling)) == [expected]


def test_a_repetition_penalty_counts_the_prompt_too(engine: Driver, folder: Path) -> None:
    plain, _ = reference(folder, {"p": PROMPT}, 12)["p"]
    assert len(set(plain)) < 12, "the tiny model repeats itself, or this test shows nothing"
    (penalised,) = tokens(engine, order(12, repetition_penalty=1e6))
    assert len({*penalised, *PROMPT}) == 12 + len(PROMPT)


def test_requests_with_penalties_among_neighbours_say_what_they_say_alone(engine: Driver) -> None:
    shaped = {"frequency_penalty": 0.5, "repetition_penalty": 1.3, "logit_bias": ((C, 1.5),)}
    kinds: list[dict[str, object]] = [
        {},
        shaped,
        {"temperature": 1.0, "seed": 3, **shaped},
        {"temperature": 0.9, "seed": 4, "top_k": 20, "min_p": 0.02},
    ]
    alone = [tokens(engine, order(16, **kind))[0] for kind in kinds]
    assert tokens(engine, *(order(16, **kind) for kind in kinds)) == alone
    assert len({tuple(each) for each in alone}) == 4


def test_a_parked_request_goes_on_with_its_penalties_and_its_random_numbers(engine: Driver) -> None:
    sampling: dict[str, object] = {"temperature": 1.0, "seed": 9, "frequency_penalty": 1.0, "repetition_penalty": 1.2}
    (whole,) = tokens(engine, order(14, **sampling))
    (rest,) = tokens(engine, order(14, generated=tuple(whole[:6]), **sampling))
    assert rest == whole[6:]


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}])
def test_only_the_likeliest_token_left_is_the_greedy_choice(engine: Driver, narrow: dict[str, object]) -> None:
    (greedy,) = tokens(engine, order())
    assert tokens(engine, order(temperature=1.0, seed=5, **narrow)) == [greedy]


def test_more_than_there_are_tokens_is_no_limit(engine: Driver) -> None:
    (free,) = tokens(engine, order(temperature=1.0, seed=5))
    assert tokens(engine, order(temperature=1.0, seed=5, top_k=10**6)) == [free]


def logprobs(engine: Driver, asked: GenerationOrder) -> list[TokenLogprob]:
    return [logprob for event in told(engine, asked) for logprob in event.logprobs]


def test_log_probabilities_are_the_models_own_whatever_the_penalties(engine: Driver, folder: Path) -> None:
    asked = order(6, top_logprobs=3, **both())
    assert tokens(engine, asked) == [[A] * 6]
    expected = model_logprobs(folder, [*PROMPT, *[A] * 6])
    for place, found in enumerate(logprobs(engine, asked)):
        row = expected[len(PROMPT) - 1 + place]
        assert (found.token, found.logprob) == (A, pytest.approx(row[A], abs=1e-3))
        assert [value for _, value in found.top] == pytest.approx(sorted(row, reverse=True)[:3], abs=1e-3)
        assert [row[token] for token, _ in found.top] == pytest.approx([v for _, v in found.top], abs=1e-3)


def test_each_token_has_its_log_probability_alone_in_a_batch_and_with_no_alternatives(engine: Driver) -> None:
    asked = [order(10, top_logprobs=0), order(10, top_logprobs=2, temperature=1.0, seed=1), order(10)]
    said = tokens(engine, *asked)
    for each, ids in zip(asked[:2], said[:2], strict=True):
        found = logprobs(engine, each)
        assert [one.token for one in found] == ids
        assert all(one.logprob <= 0 and math.isfinite(one.logprob) for one in found)
        assert {len(one.top) for one in found} == {each.top_logprobs}
    assert logprobs(engine, asked[2]) == []


def model_logprobs(folder: Path, ids: list[int]) -> list[list[float]]:
    """The log probabilities behind each token, from mlx-lm itself."""

    def work() -> list[list[float]]:
        import mlx.core as mx
        from mlx_lm.utils import load_model

        model, _ = load_model(folder)
        logits = model(mx.array([ids]))[0]
        found: list[list[float]] = (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()
        return found

    return on_mlx_thread(work)  # type: ignore[no-any-return]
