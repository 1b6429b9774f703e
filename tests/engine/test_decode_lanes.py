"""Decoding alone and in a batch: a token that is told ahead is the one a step would have told, and costs no step."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omlxd.engine import decode_lanes, kv_caches, mlxlm
from omlxd.engine.orders import Sampling
from omlxd.engine.sampling import make_sampler
from tests.engine.driver import Driver, generation, on_mlx_thread, reference
from tests.engine.test_generation import prompt

pytestmark = pytest.mark.mlx

LENGTH = 40


class Counted:
    """A model that counts how often it is run."""

    def __init__(self, model: Any) -> None:
        self._model, self.runs = model, 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.runs += 1
        return self._model(*arguments, **named)


@pytest.mark.parametrize("seed", range(3))
def test_a_lane_tells_the_same_tokens_whether_it_steps_or_tells_and_runs_one_step_less_after_telling(
    tiny_model: Callable[..., Path], seed: int
) -> None:
    path, asked = tiny_model(), prompt(9, seed)
    expected, _ = reference(path, {"r": asked}, LENGTH)["r"]
    chance = random.Random(seed)

    def work() -> tuple[list[int], list[int], list[int]]:
        model, _ = mlxlm.load_lazy(path)
        counted, cache = Counted(model), kv_caches.make_cache(model)
        mlxlm.prefill_chunk(model, cache, asked[:-1])
        lane = decode_lanes.LoneDecode(counted, cache, asked[-1], make_sampler(Sampling()))
        tokens, surplus, held = [], [], []
        for _ in range(LENGTH):
            tokens.append(lane.tell() if chance.random() < 0.5 else lane.step())
            surplus.append(counted.runs - len(tokens) - (not lane.told))
            held.append(cache[0].offset - len(asked) - len(tokens) + lane.told)
        return tokens, surplus, held

    tokens, surplus, held = on_mlx_thread(work)
    assert tokens == expected
    assert set(surplus) == {0}, "each token is one run of the model, and one more when the next has been begun"
    assert set(held) == {0}, "the cache holds all tokens but one that is `told`"


def test_a_batch_tells_the_last_tokens_of_all_its_rows_without_another_step(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model()
    asked = {f"r{number}": prompt(9, number) for number in range(3)}
    expected = {name: tokens for name, (tokens, _) in reference(path, asked, 12).items()}

    def work() -> tuple[dict[int, list[int]], int, int]:
        model, _ = mlxlm.load_lazy(path)
        counted = Counted(model)
        batch = decode_lanes.DecodeBatch(counted)
        caches = []
        for tokens in asked.values():
            caches.append(kv_caches.make_cache(model))
            mlxlm.prefill_chunk(model, caches[-1], tokens[:-1])
        samplers = [make_sampler(Sampling()) for _ in asked]
        out: dict[int, list[int]] = {
            uid: [] for uid in batch.join([tokens[-1] for tokens in asked.values()], samplers, caches)
        }
        assert batch.step() == []  # what each joined with is no news
        for number in range(12):
            for uid, token in batch.tell() if number == 11 else batch.step():
                out[uid].append(token)
        runs, held = counted.runs, batch.extract(min(out))[0].offset
        assert batch.told == set(out)
        assert batch.tell() == []
        batch.close()
        return out, runs, held

    out, runs, held = on_mlx_thread(work)
    assert list(out.values()) == list(expected.values())
    assert runs == 12
    assert held == 9 + 11


@pytest.mark.parametrize("others", [0, 2])
def test_an_answer_that_ends_by_its_length_runs_no_step_behind_its_last_token(
    driver: Driver, tiny_model: Callable[..., Path], others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    for kind in (decode_lanes.LoneDecode, decode_lanes.DecodeBatch):
        for name in ("step", "tell"):
            method = getattr(kind, name)
            monkeypatch.setattr(kind, name, lambda self, name=name, method=method: (ran.append(name), method(self))[1])
    driver.load("m", tiny_model())
    names = [f"r{number}" for number in range(others + 1)]
    ended = driver.run(*(generation(name, "m", prompt(20, 7), 6) for name in names))
    assert len({text for text, _ in ended.values()}) == 1
    assert ran[-1] == "tell"
    assert "step" in ran
