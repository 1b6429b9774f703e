"""The one module that knows mlx-lm's internals: import, lazy load, prefill, the lone decode lane and the batch.

mlx-lm's `BatchGenerator` is not a public API and its signature changed in 0.29, 0.30, 0.31 and 0.32. Everything that
leans on it is here, and `tests/engine/test_mlxlm_contract.py` says what moved when an upgrade breaks it.
All functions and methods but those about tokenizers and the import run on the engine's thread.
"""

from __future__ import annotations

import copy
import gc
import glob
import resource
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omlxd.engine.patient_reading import patiently
from omlxd.engine.sampling import Sampler, ShapingSampler

if TYPE_CHECKING:
    import mlx.core as mx

NO_LIMIT_TOKENS = 1 << 40
"""max_tokens for mlx-lm: our requests count their own, so that a finished one never leaves lazy caches behind."""


_importing = threading.Lock()  # the engine's thread, and a thread that reads a tokenizer


def import_libraries() -> None:
    """Import MLX and mlx-lm (1 to 2 s) and keep the process's limit of open files.

    mlx-lm sets RLIMIT_NOFILE to (2048, 4096) on import; the lowered hard limit could not be raised again by a
    user's process, so the call is suppressed while it is imported. What the libraries made stays for good, so the
    garbage collector is told to leave it out: an unload's collection takes microseconds, not 130 ms with the
    interpreter's lock held.
    """
    with _importing:
        if "mlx_lm.utils" in sys.modules:
            return
        set_rlimit = resource.setrlimit
        resource.setrlimit = lambda *_: None
        try:
            import mlx_lm.generate
            import mlx_lm.sample_utils
            import mlx_lm.utils  # noqa: F401
        finally:
            resource.setrlimit = set_rlimit
        gc.collect()
        gc.freeze()


def stream() -> Any:
    """mlx-lm's generation stream; a thread-local one, so it is this thread's."""
    from mlx_lm.generate import generation_stream

    return generation_stream


def synchronize() -> None:
    """Wait until nothing is in flight on the engine's streams."""
    import mlx.core as mx

    mx.synchronize(stream())
    mx.synchronize()


def load_lazy(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model with its weights still on disk, and its config. Code from the folder is never run."""
    from mlx_lm.utils import load_model

    with _without_glob_characters(folder) as plain:
        model, config = load_model(plain, lazy=True, trust_remote_code=False)
    return model, dict(config)


@contextmanager
def _without_glob_characters(folder: Path) -> Iterator[Path]:
    # mlx-lm looks for the weights with an unescaped glob over the whole path; the files stay open after it.
    if glob.escape(str(folder)) == str(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="omlxd-") as place:
        plain = Path(place) / "model"
        plain.symlink_to(folder.resolve(), target_is_directory=True)
        yield plain


def load_config(folder: Path) -> dict[str, Any]:
    """The model's config as mlx-lm reads it: with what `generation_config.json` says of the end of a text."""
    from mlx_lm.utils import load_config as load

    return dict(load(folder))


def load_tokenizer(folder: Path, config: dict[str, Any]) -> Any:
    """mlx-lm's tokenizer wrapper, with the end-of-text ids of the model's config; on any thread."""
    from mlx_lm.utils import load_tokenizer as load

    with patiently(folder):
        return load(folder, eos_token_ids=config.get("eos_token_id"))


def every_array(model: Any) -> list[mx.array]:
    """All arrays of the module tree once, also private ones (RoPE tables) that `parameters()` leaves out.

    A lazy array may not cross threads, and evaluating only the parameters would leave those lazy.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten

    found = [value for _, value in tree_flatten(model.parameters())]
    for module in model.modules():
        found += [value for value in dict(module).values() if isinstance(value, mx.array)]
        found += [value for value in vars(module).values() if isinstance(value, mx.array)]
    return list({id(array): array for array in found}.values())


def make_cache(model: Any) -> list[Any]:
    """A plain, empty KV cache for one request."""
    from mlx_lm.models.cache import make_prompt_cache

    return list(make_prompt_cache(model))


def prefill_chunk(model: Any, cache: list[Any], tokens: Sequence[int]) -> None:
    """Run `tokens` through the model into `cache`; no logits are computed, since only the caches are evaluated."""
    import mlx.core as mx

    with mx.stream(stream()):
        model(mx.array([list(tokens)]), cache=cache)
        mx.eval([layer.state for layer in cache])


def is_mergeable(cache: Sequence[Any]) -> bool:
    """Whether requests with such caches can share a decode batch."""
    return all(is_mergeable(layer.caches) if hasattr(layer, "caches") else hasattr(layer, "merge") for layer in cache)


def cache_bytes(cache: Sequence[Any]) -> int:
    """Bytes of a request's caches as mlx-lm counts them."""
    return sum(layer.nbytes for layer in cache)


def is_copyable(cache: Sequence[Any]) -> bool:
    """Whether a copy of such caches can serve another request."""
    from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

    return all(type(layer) in (KVCache, RotatingKVCache, ArraysCache) and not layer.empty() for layer in _plain(cache))


def is_cuttable(cache: Sequence[Any]) -> bool:
    """Whether tokens can be taken off the end: not once a window has moved on, and not from a recurrent state."""
    from mlx_lm.models.cache import can_trim_prompt_cache

    return bool(can_trim_prompt_cache(list(cache)))


def holds_tokens(cache: Sequence[Any], tokens: int) -> bool:
    """Whether the caches are at this position, as far as they know it (a recurrent state does not)."""
    return all(layer.offset == tokens for layer in _plain(cache) if hasattr(layer, "offset"))


def share_copy(cache: Sequence[Any]) -> list[Any]:
    """A copy of the caches that shares their memory until one of the two is written to."""
    return copy.deepcopy(list(cache))


def cut_room(cache: Sequence[Any]) -> None:
    """Cut off what the caches hold beyond their tokens: room to grow, and what a window has left behind.

    Nothing is evaluated: `cache_bytes` tells what `make_contiguous` will leave of them.
    """
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    with mx.stream(stream()):
        for layer in _plain(cache):
            if type(layer) is KVCache:
                _keep_rows(layer, slice(layer.offset))
            elif type(layer) is RotatingKVCache and layer.offset < layer.max_size:
                _keep_rows(layer, slice(layer._idx))
            elif type(layer) is RotatingKVCache and layer.keep == 0 and layer._idx == layer.keys.shape[2]:
                _keep_rows(layer, slice(-layer.max_size, None))  # they are in order: the last ones count
                layer._idx = layer.keys.shape[2]


def own_copy(cache: Sequence[Any], surplus_tokens: int) -> list[Any]:
    """A copy without the last `surplus_tokens` for a request to go on with, as if it had run the rest itself."""
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache, trim_prompt_cache

    own = share_copy(cache)
    if surplus_tokens:
        trim_prompt_cache(own, surplus_tokens)
        cut_room(own)
    with mx.stream(stream()):
        for layer in _plain(own):
            if type(layer) is KVCache:  # a plain cache ends at a multiple of its step, and so grows as was reserved
                room = [(0, 0), (0, 0), (0, -layer.offset % KVCache.step), (0, 0)]
                layer.keys, layer.values = mx.pad(layer.keys, room), mx.pad(layer.values, room)
    make_contiguous(own)
    return own


def _keep_rows(layer: Any, rows: slice) -> None:
    layer.keys, layer.values = layer.keys[..., rows, :], layer.values[..., rows, :]


def _plain(cache: Sequence[Any]) -> Iterator[Any]:
    """The layers' caches, also of layers that have several."""
    for layer in cache:
        if hasattr(layer, "caches"):
            yield from _plain(layer.caches)
        else:
            yield layer


def make_contiguous(cache: Sequence[Any]) -> None:
    """Copy each layer's rows into buffers of their own, one layer at a time, so that what was cut off is freed.

    Removing rows leaves lazy slices of the old buffers; evaluating them keeps those alive (55 of 74 MB measured).
    """
    import mlx.core as mx
    from mlx.utils import tree_map

    with mx.stream(stream()):
        for layer in cache:
            state = layer.state
            layer.state = tree_map(lambda leaf: mx.contiguous(leaf) if isinstance(leaf, mx.array) else leaf, state)
            del state
            mx.eval([leaf for leaf in _leaves(layer.state) if isinstance(leaf, mx.array)])


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, list | tuple):
        for branch in tree:
            yield from _leaves(branch)
    elif tree is not None:
        yield tree


class LoneDecode:
    """One request that decodes on its own plain cache: on a GPU nearly twice as fast as a batch of one.

    One token is always in flight: `step` returns the last one and starts the next.
    """

    def __init__(self, model: Any, cache: list[Any], last_token: int, sampler: Sampler) -> None:
        import mlx.core as mx

        self._model, self._sampler = model, sampler
        self.cache = cache
        with mx.stream(stream()):
            self._ahead = self._forward(mx.array([last_token]))
            mx.async_eval(self._ahead)

    def _forward(self, token: Any) -> Any:
        import mlx.core as mx

        logits = self._model(token[None], cache=self.cache)[:, -1, :]
        if isinstance(self._sampler, ShapingSampler):
            logits = self._sampler.shape(logits)
        return self._sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True))

    def step(self) -> int:
        """The next token id."""
        import mlx.core as mx

        with mx.stream(stream()):
            token, self._ahead = self._ahead, self._forward(self._ahead)
            mx.async_eval(self._ahead)
            return int(token.item())

    def leave(self) -> tuple[int, list[Any]]:
        """The token in flight, sampled but not yet run, and the cache: what a batch needs to go on."""
        token = int(self._ahead.item())
        cache, self.cache = self.cache, []
        return token, cache


class DecodeBatch:
    """mlx-lm's `BatchGenerator` for one model, from finished caches or bare short prompts; rows are named by uid."""

    def __init__(self, model: Any, max_rows: int, prefill_chunk_tokens: int) -> None:
        from mlx_lm.generate import BatchGenerator

        self._generator = BatchGenerator(
            model,
            max_tokens=NO_LIMIT_TOKENS,
            completion_batch_size=max_rows,
            prefill_batch_size=min(8, max_rows),
            prefill_step_size=prefill_chunk_tokens,
        )
        # On Metal it saves the wired limit and would restore it on close, un-nested; the gauges own that limit.
        self._generator._old_wired_limit = None
        self.rows = 0

    def insert(
        self, tokens: Sequence[int], sampler: Sampler, cache: list[Any] | None = None, seen: Sequence[int] = ()
    ) -> int:
        """Add a request: its last token with its finished cache, or a bare prompt. Returns its uid.

        Args:
            tokens: token ids still to be run; the last one is the first input of the decode.
            sampler: chooses this row's tokens.
            cache: caches that hold `seen`, or None for a bare prompt.
            seen: the tokens in the cache; copied, mlx-lm appends to what it is given.
        """
        (uid,) = self._generator.insert(
            [list(tokens)],
            max_tokens=[NO_LIMIT_TOKENS],
            caches=[cache] if cache is not None else None,
            all_tokens=[list(seen)],
            samplers=[sampler],
            logits_processors=[[_processor(sampler)] if isinstance(sampler, ShapingSampler) else []],
        )
        self.rows += 1
        return int(uid)

    def step(self) -> list[tuple[int, int]]:
        """One decode step of all rows: (uid, token id) of each row that has a token."""
        _, responses = self._generator.next()
        return [(response.uid, response.token) for response in responses]

    def remove(self, uids: Sequence[int]) -> None:
        """Take rows out and give their memory back now; `remove` alone frees nothing until the next step."""
        synchronize()
        self._generator.remove(list(uids))
        self.rows -= len(uids)
        make_contiguous(self._generator._generation_batch.prompt_cache)

    def extract(self, uid: int) -> list[Any]:
        """A row's caches, which hold every token that `step` has returned for it; lazy, so that their size is free."""
        import mlx.core as mx

        with mx.stream(stream()):
            cache, _ = self._generator.extract_cache([uid])[uid]
        return list(cache)

    @property
    def nbytes(self) -> int:
        """KV cache bytes of all rows."""
        return int(self._generator.prompt_cache_nbytes)

    def close(self) -> None:
        """Drop the generator and all its rows."""
        synchronize()
        self._generator.close()
        self._generator = None
        self.rows = 0


def _processor(sampler: ShapingSampler) -> Callable[[Any, Any], Any]:
    return lambda _tokens, logits: sampler.shape(logits)  # it counts its tokens by itself


def free_one_by_one(arrays: list[Any]) -> None:
    """Empty a list of arrays that nobody else holds any more.

    The interpreter's lock is held while an array is freed, 0.2 s for a GB: whoever answers meanwhile gets his turn
    between two of them, and not behind the whole model.
    """
    while arrays:
        arrays.pop()


def release_memory() -> None:
    """Collect garbage, wait for the device, then give MLX's freed buffers back.

    The order matters: clearing before synchronizing is behind kernel panics on Metal.
    """
    import mlx.core as mx

    gc.collect()
    synchronize()
    mx.clear_cache()


def end_thread() -> None:
    """The last act of the thread that ran MLX; without it the process often ends in SIGABRT."""
    import mlx.core as mx

    mx.clear_streams()
