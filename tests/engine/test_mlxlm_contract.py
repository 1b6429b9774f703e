"""What omlxd leans on inside mlx-lm; a failure here says which piece an upgrade has moved."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from omlxd.engine import decode_lanes, kv_caches, mlxlm, patient_reading
from omlxd.engine.glibc import trim_heap
from omlxd.engine.orders import Sampling
from omlxd.engine.sampling import make_sampler
from tests.engine.driver import on_mlx_thread, reference

pytestmark = pytest.mark.mlx


def parameters(function: Callable[..., object]) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_the_caches_of_a_batch_have_the_methods_we_call() -> None:
    from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

    def work() -> list[set[str]]:
        batched = [type(cache.merge([cache, cache])) for cache in (KVCache(), RotatingKVCache(8), ArraysCache(1))]
        return [set(dir(kind)) for kind in (*batched, CacheList)]

    called = {"extend", "extract", "filter", "prepare", "finalize", "nbytes", "state"}
    for methods in on_mlx_thread(work):
        assert called <= methods, "mlx-lm's batch caches changed: see decode_lanes.DecodeBatch and kv_caches"


def test_what_is_loaded_again_and_again_leaves_nothing_behind(tiny_model: Callable[..., Path]) -> None:
    """Of each load 67 KB stayed, in the chain of the random state: 4 MB of these."""
    model = tiny_model("llama", 5_000_000)

    def work() -> int:
        def load(times: int) -> int:
            for _ in range(times):
                mlxlm.load_lazy(model)
            mlxlm.release_memory()
            trim_heap()
            return psutil.Process().memory_info().rss

        return -load(20) + load(60)

    assert on_mlx_thread(work) < 2**20


def test_the_names_that_stand_for_a_patient_reading_of_tokenizers_are_there() -> None:
    import importlib
    import json

    import tokenizers

    for name in patient_reading.JSON_READERS:
        assert importlib.import_module(name).json is json, f"{name} reads JSON otherwise: see patient_reading"
    backend = importlib.import_module(patient_reading.BACKEND)
    moved = "transformers makes its tokenizers otherwise: see patient_reading"
    assert backend.TokenizerFast is tokenizers.Tokenizer, moved
    assert "get_vocab" in vars(backend.TokenizersBackend), moved


def test_load_model_never_runs_code_unless_asked() -> None:
    from mlx_lm.utils import load_model

    assert inspect.signature(load_model).parameters["trust_remote_code"].default is False


def test_importing_mlx_lm_through_us_leaves_the_limit_of_open_files_alone() -> None:
    import subprocess
    import sys

    code = (
        "import resource; before = resource.getrlimit(resource.RLIMIT_NOFILE);"
        "from omlxd.engine import mlxlm; mlxlm.import_libraries();"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == before;"
        "import mlx_lm.generate; assert resource.setrlimit.__module__ != 'omlxd.engine.mlxlm'"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_removed_rows_give_their_memory_back_at_once(tiny_model: Callable[..., Path]) -> None:
    def work() -> tuple[int, int, int]:
        import mlx.core as mx

        model, _ = mlxlm.load_lazy(tiny_model())
        mx.eval(mlxlm.every_array(model))
        weights = mx.get_active_memory()
        batch = decode_lanes.DecodeBatch(model)
        uids = []
        for length in (1500, 20, 20, 20):
            cache = kv_caches.make_cache(model)
            mlxlm.prefill_chunk(model, cache, [7] * length)
            uids += batch.join([5], [make_sampler(Sampling())], [cache])
            del cache
            batch.step()
        batch.step()
        mlxlm.release_memory()
        before = mx.get_active_memory() - weights
        batch.remove(uids[:1])
        after = mx.get_active_memory() - weights
        rows = len(batch.step())
        batch.close()
        return before, after, rows

    before, after, rows = on_mlx_thread(work)
    assert after < before / 8, f"{before} bytes with the long row, {after} after it was removed"
    assert rows == 3


def test_a_lone_request_moves_into_a_batch_at_any_step(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model()
    prompt = [9, 30, 77, 12, 200]
    expected, _ = reference(path, {"r": prompt}, 30)["r"]

    def work(at: int) -> list[int]:
        model, _ = mlxlm.load_lazy(path)
        cache, sampler = kv_caches.make_cache(model), make_sampler(Sampling())
        mlxlm.prefill_chunk(model, cache, prompt[:-1])
        lane = decode_lanes.LoneDecode(model, cache, prompt[-1], sampler)
        out = [lane.step() for _ in range(at)]
        token, cache = lane.leave()
        out.append(token)
        batch = decode_lanes.DecodeBatch(model)
        batch.join([token], [sampler], [cache])
        while len(out) < 30:
            out += [token for _, token in batch.step()]
        batch.close()
        return out

    for at in (0, 1, 17):
        assert on_mlx_thread(lambda at=at: work(at)) == expected


def test_caches_that_cannot_be_merged_are_known(tiny_model: Callable[..., Path]) -> None:
    from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache

    assert kv_caches.is_mergeable([KVCache(), RotatingKVCache(64), ArraysCache(2), CacheList(KVCache(), KVCache())])
    for lone in (QuantizedKVCache(), ChunkedKVCache(64), CacheList(KVCache(), QuantizedKVCache())):
        assert not kv_caches.is_mergeable([KVCache(), lone])


def test_the_caches_we_copy_have_the_fields_we_touch() -> None:
    from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, can_trim_prompt_cache

    plain, window, state = KVCache(), RotatingKVCache(64), ArraysCache(2)
    assert {"keys", "values", "offset"} <= vars(plain).keys(), "KVCache changed: see kv_caches.cut_room and own_copy"
    assert {"keys", "values", "offset", "max_size", "keep", "_idx"} <= vars(window).keys(), "RotatingKVCache changed"
    assert KVCache.step == 256, "the ledger reserves blocks of 256"
    assert not hasattr(state, "offset"), "a recurrent cache knows its position now: see kv_caches.holds_tokens"
    assert CacheList(plain, window).caches == (plain, window)
    assert can_trim_prompt_cache([plain, window])
    assert not can_trim_prompt_cache([plain, state])
    assert all(cache.empty() for cache in (plain, window, state))


def test_only_caches_that_we_know_how_to_copy_are_copied() -> None:
    def work() -> list[bool]:
        import mlx.core as mx
        from mlx_lm.models.cache import CacheList, ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache

        caches: list[Any] = [KVCache(), RotatingKVCache(64), CacheList(KVCache(), KVCache()), ChunkedKVCache(64)]
        for cache in caches:
            for inner in getattr(cache, "caches", [cache]):
                inner.update_and_fetch(mx.zeros((1, 1, 8, 4)), mx.zeros((1, 1, 8, 4)))
        return [kv_caches.is_copyable([cache]) for cache in [*caches, QuantizedKVCache(), KVCache()]]

    assert on_mlx_thread(work) == [True, True, True, False, False, False]


def test_copies_share_memory_until_they_are_written_to(tiny_model: Callable[..., Path]) -> None:
    def work() -> tuple[list[int], list[int]]:
        import mlx.core as mx

        model, _ = mlxlm.load_lazy(tiny_model())
        cache = kv_caches.make_cache(model)
        mlxlm.prefill_chunk(model, cache, [7] * 600)
        held = [mx.get_active_memory()]
        copy = kv_caches.share_copy(cache)
        held.append(mx.get_active_memory())
        mlxlm.prefill_chunk(model, copy, [8] * 10)
        return held, [cache[0].offset, copy[0].offset]

    (alone, shared), offsets = on_mlx_thread(work)
    assert shared == alone
    assert offsets == [600, 610]


def test_a_row_is_extracted_with_every_token_that_was_returned_for_it(tiny_model: Callable[..., Path]) -> None:
    def work() -> list[tuple[int, int]]:
        model, _ = mlxlm.load_lazy(tiny_model())
        batch, sampler = decode_lanes.DecodeBatch(model), make_sampler(Sampling())
        read = batch.read([[9, 30, 77, 12], [5, 6]], [sampler, sampler])
        lengths = {uid: 1 for uid, _ in read}
        prompts = dict(zip(lengths, (4, 2), strict=True))
        for _ in range(5):
            for uid, _token in batch.step():
                lengths[uid] += 1
        held = [(batch.extract(uid)[0].offset, prompts[uid] + lengths[uid]) for uid in lengths]
        batch.close()
        return held

    assert all(held == returned > 4 for held, returned in on_mlx_thread(work))
