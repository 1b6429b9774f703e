"""The two ways to decode: a request alone on its plain cache, and several in one batch on mlx-lm's batch caches.

In both the next step is begun before the token of the last one is looked at, so that the device never waits for us.
All methods run on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from omlxd.engine import kv_caches, mlxlm
from omlxd.engine.sampling import Sampler, ShapingSampler

TRIAL_ROWS = 7
"""No model has so many key heads: rows that were taken for heads, or the other way round, do not fit each other."""


def can_share(model: Any) -> bool:
    """Whether several requests can run through the model at once: nothing is computed, shapes are put together.

    Not every architecture can. Some caches cannot be merged; and gemma2 in mlx-lm 0.32 cannot apply a mask that differs
    from row to row, or where there are as many rows as key heads applies it to the wrong ones.
    """
    import mlx.core as mx

    plain = [kv_caches.make_cache(model) for _ in range(TRIAL_ROWS)]
    if not kv_caches.is_mergeable(plain[0]):
        return False
    width, padding = TRIAL_ROWS + 1, list(range(TRIAL_ROWS))
    try:
        with mx.stream(mlxlm.stream()):
            cache = kv_caches.merge(plain)
            for layer in cache:
                layer.prepare(lengths=[width - pad for pad in padding], right_padding=padding)
            model(mx.zeros((TRIAL_ROWS, width), mx.uint32), cache=cache)
            for layer in cache:
                layer.finalize()
            logits = model(mx.zeros((TRIAL_ROWS, 1), mx.uint32), cache=cache)
    except Exception:
        return False
    return bool(logits.shape[:2] == (TRIAL_ROWS, 1))


class LoneDecode:
    """One request that decodes on its own plain cache: on a GPU nearly twice as fast as a batch of one.

    One token is always in flight: `step` returns the last one and starts the next.

    Attributes:
        cache: the request's caches.
        told: whether the last token that was returned has not been run, and nothing is in flight.
    """

    def __init__(self, model: Any, cache: list[Any], last_token: int, sampler: Sampler) -> None:
        import mlx.core as mx

        self._model, self._sampler = model, sampler
        self.cache = cache
        self.told = False
        with mx.stream(mlxlm.stream()):
            self._ahead = self._forward(mx.array([last_token]))
            mx.async_eval(self._ahead)

    def _forward(self, token: Any) -> Any:
        return _chosen(self._model(token[None], cache=self.cache)[:, -1, :], [self._sampler])

    def step(self) -> int:
        """The next token id."""
        import mlx.core as mx

        with mx.stream(mlxlm.stream()):
            if self.told:
                self.told, self._ahead = False, self._forward(self._ahead)
            token, self._ahead = self._ahead, self._forward(self._ahead)
            mx.async_eval(self._ahead)
            return int(token.item())

    def tell(self) -> int:
        """The next token id, without the next step: for one that may be, or is, the last of a lane."""
        import mlx.core as mx

        with mx.stream(mlxlm.stream()):
            if self.told:
                self._ahead = self._forward(self._ahead)
            self.told = True
            return int(self._ahead.item())

    def leave(self) -> tuple[int, list[Any]]:
        """The token in flight, sampled but not yet run, and the cache: what a batch needs to go on."""
        token = int(self._ahead.item())
        cache, self.cache = self.cache, []
        return token, cache


class DecodeBatch:
    """The requests of one model that decode together, on mlx-lm's batch caches; rows are named by uid.

    mlx-lm's `BatchGenerator` would do this too, but it is no public API (its signature changed in 0.29, 0.30, 0.31 and
    0.32), copies whoever joins three times on the way, and takes a step of the new rows alone first.

    Attributes:
        told: the rows whose last token that was returned has not been run.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._next_uid = count()
        self._rows: list[tuple[int, Sampler]] = []
        self.told: set[int] = set()
        self._cache: list[Any] = []
        self._ahead: Any = None  # of each row the token that is sampled, and not yet run

    def join(self, tokens: Sequence[int], samplers: Sequence[Sampler], caches: Sequence[list[Any]]) -> list[int]:
        """Add requests that have run alone.

        Args:
            tokens: the last token of each, sampled or of the prompt and not yet run; `step` does not return it.
            samplers: choose each one's tokens.
            caches: mergeable plain ones, which hold what each has run.

        Returns:
            Their uids.
        """
        import mlx.core as mx

        with mx.stream(mlxlm.stream()):
            return self._extend(mx.array(tokens), samplers, kv_caches.merge(caches))

    def read(self, prompts: Sequence[Sequence[int]], samplers: Sequence[Sampler]) -> list[tuple[int, int]]:
        """Run short prompts all at once, and add them.

        Returns:
            (uid, first token id) of each: sampled and not yet run; `step` does not return it.
        """
        import mlx.core as mx

        with mx.stream(mlxlm.stream()):
            cache = kv_caches.read_together(self._model, [prompt[:-1] for prompt in prompts])
            last = mx.array([[prompt[-1]] for prompt in prompts])
            first = _chosen(self._model(last, cache=cache)[:, -1, :], samplers)
            tokens = first.tolist()
            return list(zip(self._extend(first, samplers, cache), tokens, strict=True))

    def step(self) -> list[tuple[int, int]]:
        """One decode step of all rows: (uid, token id) of each row that has a token which was not told before."""
        import mlx.core as mx

        ran, told, self.told = self._ahead, self.told, set()
        with mx.stream(mlxlm.stream()):
            logits = self._model(ran[:, None], cache=self._cache)[:, -1, :]
            self._ahead = _chosen(logits, [sampler for _, sampler in self._rows])
            mx.async_eval(self._ahead)
            tokens = ran.tolist()
        return [(uid, token) for (uid, _), token in zip(self._rows, tokens, strict=True) if uid not in told]

    def tell(self) -> list[tuple[int, int]]:
        """The tokens that the next step would return, without that step: when they are the last of all rows."""
        told, tokens = self.told, self._ahead.tolist()
        self.told = {uid for uid, _ in self._rows}
        return [(uid, token) for (uid, _), token in zip(self._rows, tokens, strict=True) if uid not in told]

    def remove(self, uids: Sequence[int]) -> None:
        """Take rows out, but not all, and give their memory back now."""
        import mlx.core as mx

        mlxlm.synchronize()
        kept = [at for at, (uid, _) in enumerate(self._rows) if uid not in uids]
        self._rows = [self._rows[at] for at in kept]
        with mx.stream(mlxlm.stream()):
            self._ahead = self._ahead[mx.array(kept)]
            for layer in self._cache:
                layer.filter(kept)
        kv_caches.make_contiguous(self._cache)

    def extract(self, uid: int) -> list[Any]:
        """A row's caches: all tokens told for it, but the last of one that is `told`; lazy, so their size is free."""
        import mlx.core as mx

        at = [row for row, _ in self._rows].index(uid)
        with mx.stream(mlxlm.stream()):
            return [layer.extract(at) for layer in self._cache]

    @property
    def nbytes(self) -> int:
        """KV cache bytes of all rows."""
        return kv_caches.cache_bytes(self._cache)

    def close(self) -> None:
        """Drop all rows."""
        mlxlm.synchronize()
        self._rows, self._cache, self._ahead = [], [], None

    def _extend(self, ahead: Any, samplers: Sequence[Sampler], cache: list[Any]) -> list[int]:
        import mlx.core as mx

        if self._rows:
            ahead = mx.concatenate([self._ahead, ahead])
            cache = kv_caches.extended(self._cache, cache)
        uids = [next(self._next_uid) for _ in samplers]
        self._rows += zip(uids, samplers, strict=True)
        self.told.update(uids)
        self._cache, self._ahead = cache, ahead
        return uids


def _chosen(logits: Any, samplers: Sequence[Sampler]) -> Any:
    """The next token of each row, by its sampler; one that all share is called once."""
    import mlx.core as mx

    if any(isinstance(sampler, ShapingSampler) for sampler in samplers):
        rows = ((sampler, logits[at : at + 1]) for at, sampler in enumerate(samplers))
        shaped = [sampler.shape(row) if isinstance(sampler, ShapingSampler) else row for sampler, row in rows]
        logits = mx.concatenate(shaped, axis=0)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if all(sampler is samplers[0] for sampler in samplers):
        return samplers[0](logprobs)
    return mx.concatenate([sampler(logprobs[at : at + 1]) for at, sampler in enumerate(samplers)], axis=0)
