"""The two ways to decode: a request alone on its plain cache, and several in one batch of mlx-lm's.

mlx-lm's `BatchGenerator` is not a public API and its signature changed in 0.29, 0.30, 0.31 and 0.32: nobody else leans
on it, and `tests/engine/test_mlxlm_contract.py` says what moved when an upgrade breaks it. All methods run on the
engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from omlxd.engine import kv_caches, mlxlm
from omlxd.engine.sampling import Sampler, ShapingSampler

NO_LIMIT_TOKENS = 1 << 40
"""max_tokens for mlx-lm: our requests count their own, so that a finished one never leaves lazy caches behind."""


class LoneDecode:
    """One request that decodes on its own plain cache: on a GPU nearly twice as fast as a batch of one.

    One token is always in flight: `step` returns the last one and starts the next.

    Attributes:
        cache: the request's caches.
        told: whether `tell` has returned the token in flight.
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
        import mlx.core as mx

        logits = self._model(token[None], cache=self.cache)[:, -1, :]
        if isinstance(self._sampler, ShapingSampler):
            logits = self._sampler.shape(logits)
        return self._sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True))

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
        """The token in flight, sampled but not yet run: nothing is in flight then. Once, until the next `step`."""
        self.told = True
        return int(self._ahead.item())

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
        mlxlm.synchronize()
        self._generator.remove(list(uids))
        self.rows -= len(uids)
        kv_caches.make_contiguous(self._generator._generation_batch.prompt_cache)

    def extract(self, uid: int) -> list[Any]:
        """A row's caches, which hold every token that `step` has returned for it; lazy, so that their size is free."""
        import mlx.core as mx

        with mx.stream(mlxlm.stream()):
            cache, _ = self._generator.extract_cache([uid])[uid]
        return list(cache)

    @property
    def nbytes(self) -> int:
        """KV cache bytes of all rows."""
        return int(self._generator.prompt_cache_nbytes)

    def close(self) -> None:
        """Drop the generator and all its rows."""
        mlxlm.synchronize()
        self._generator.close()
        self._generator = None
        self.rows = 0


def _processor(sampler: ShapingSampler) -> Callable[[Any, Any], Any]:
    return lambda _tokens, logits: sampler.shape(logits)  # it counts its tokens by itself
