"""Caches of mlx-lm's: what one can do, what it takes, and how it is copied, cut and given buffers of its own.

All functions run on the engine's thread. `tests/engine/test_mlxlm_contract.py` says what moved when an upgrade of
mlx-lm breaks one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from omlxd.engine import mlxlm


def make_cache(model: Any) -> list[Any]:
    """A plain, empty KV cache for one request."""
    from mlx_lm.models.cache import make_prompt_cache

    return list(make_prompt_cache(model))


def is_mergeable(cache: Sequence[Any]) -> bool:
    """Whether requests with such caches can share a decode batch."""
    return all(is_mergeable(layer.caches) if hasattr(layer, "caches") else hasattr(layer, "merge") for layer in cache)


def merge(caches: Sequence[Sequence[Any]]) -> list[Any]:
    """The caches of a batch, a row of each request's; lazy."""
    return [layers[0].merge(layers) for layers in zip(*caches, strict=True)]


def extended(cache: Sequence[Any], added: Sequence[Any]) -> list[Any]:
    """The caches of a batch with more rows behind those it has; lazy."""
    for layer, more in zip(cache, added, strict=True):
        layer.extend(more)
    return list(cache)


def read_together(model: Any, prompts: Sequence[Sequence[int]]) -> list[Any]:
    """Run prompts through the model at once; the caches of a batch with a row of each.

    No logits are computed. The shorter ones are padded on the right, since all begin at position 0, and then moved;
    to two tokens at least, since a step of one is taken for a decode step, which may have no such padding.
    """
    import mlx.core as mx

    cache = merge([make_cache(model) for _ in prompts])
    lengths = [len(prompt) for prompt in prompts]
    width = max(lengths) if len(set(lengths)) == 1 else max(2, *lengths)
    padding = [width - length for length in lengths]
    if any(padding):
        for layer in cache:
            layer.prepare(lengths=lengths, right_padding=padding)
    if width:
        rows = [[*prompt, *[0] * pad] for prompt, pad in zip(prompts, padding, strict=True)]
        model(mx.array(rows), cache=cache)
        mx.eval([layer.state for layer in cache])
    if any(padding):
        for layer in cache:  # one at a time, so that no more than one is there twice
            layer.finalize()
            mx.eval(layer.state)
    return cache


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

    with mx.stream(mlxlm.stream()):
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
    with mx.stream(mlxlm.stream()):
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

    with mx.stream(mlxlm.stream()):
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
