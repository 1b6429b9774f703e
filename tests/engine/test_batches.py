"""Every family that is known, several requests at once: the same logits as alone, or one after the other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from omlxd.core.states import FinishReason
from omlxd.engine import decode_lanes, kv_caches, mlxlm
from omlxd.engine.sampling import Sampler
from tests.engine.driver import Driver, generation, on_mlx_thread, reference
from tests.engine.estimate_families import CANNOT_SHARE, FAMILIES, build
from tests.engine.test_generation import prompt, same_until_a_tie

pytestmark = pytest.mark.mlx

PROMPTS = ([7, 9, 200, 31, 5], list(range(40, 57)), [3])


@pytest.mark.parametrize("family", FAMILIES)
def test_whoever_is_read_and_decodes_with_others_gets_the_logits_it_has_alone(family: str) -> None:
    def work() -> tuple[bool, float]:
        model = build(FAMILIES[family], "float32")
        if not decode_lanes.can_share(model):
            return False, 0.0
        import mlx.core as mx

        alone, together = [_alone(model, tokens) for tokens in PROMPTS], _together(model, PROMPTS)
        far = [
            float(mx.abs(a - b).max().item())
            for mine, ours in zip(alone, together, strict=True)
            for a, b in zip(mine, ours, strict=True)
        ]
        return True, max(far)

    shares, off = on_mlx_thread(work)
    assert shares == (family not in CANNOT_SHARE), "mlx-lm has changed: see decode_lanes.can_share"
    assert off < 1e-3


def test_requests_of_a_model_that_cannot_run_several_at_once_run_one_by_one(
    driver: Driver, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = _folder(FAMILIES["gemma2"], tiny_model(), tmp_path / "gemma2")
    prompts = {f"r{at}": prompt(5 + at, at) for at in range(3)}
    expected = reference(folder, prompts, 12)
    driver.load("m", folder)
    driver.apply(group_tokens={"m": 256})
    texts = driver.run(*(generation(name, "m", tokens, 12) for name, tokens in prompts.items()))
    codec = driver.engine.codec("m")
    for name, (text, end) in texts.items():
        assert end is FinishReason.LENGTH
        assert same_until_a_tie(text, codec, *expected[name])


STEPS = 4


class _Recorder:
    """A sampler that keeps what it is shown, row by row, and chooses a token that depends on the step alone."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, logprobs: Any) -> Any:
        import mlx.core as mx

        self.seen.append(logprobs)
        return mx.full((logprobs.shape[0],), 11 + len(self.seen), dtype=mx.uint32)


def _alone(model: Any, tokens: Sequence[int]) -> list[Any]:
    sampler, cache = _Recorder(), kv_caches.make_cache(model)
    if tokens[:-1]:
        mlxlm.prefill_chunk(model, cache, tokens[:-1])
    lane = decode_lanes.LoneDecode(model, cache, tokens[-1], sampler)
    for _ in range(STEPS - 1):
        lane.step()
    return [logprobs[0] for logprobs in sampler.seen[:STEPS]]


def _together(model: Any, prompts: Sequence[Sequence[int]]) -> list[list[Any]]:
    sampler: Sampler = (recorder := _Recorder())
    batch = decode_lanes.DecodeBatch(model)
    batch.read(prompts, [sampler] * len(prompts))
    for _ in range(STEPS - 1):
        batch.step()
    batch.close()
    return [[logprobs[row] for logprobs in recorder.seen[:STEPS]] for row in range(len(prompts))]


def _folder(config: dict[str, Any], tokenizer_from: Path, folder: Path) -> Path:
    """A model folder of this configuration, with random weights and somebody else's tokenizer."""
    vocab_size = json.loads((tokenizer_from / "config.json").read_text())["vocab_size"]
    config = {**config, "vocab_size": vocab_size, "tie_word_embeddings": True}
    shutil.copytree(tokenizer_from, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    (folder / "config.json").write_text(json.dumps(config))

    def save() -> None:
        import mlx.core as mx
        from mlx.utils import tree_flatten

        parameters = build(config, "float32").parameters()
        mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(parameters)))

    on_mlx_thread(save)
    return folder
