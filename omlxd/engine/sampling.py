"""How the next token is chosen: greedy, by chance, with penalties for what was said, and with its log probability told.

Random numbers depend on the seed and the position alone: mlx-lm's samplers draw from MLX's global random state, where
one request's tokens depend on its neighbours. All of this runs on the engine's thread, inside a step, where an
exception would end every request of a batch: what is in a `Sampling` has been checked before, and what is raised all
the same ends the one request that it belongs to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from omlxd.engine.events import TokenLogprob
from omlxd.engine.orders import GenerationOrder, Sampling

if TYPE_CHECKING:
    import mlx.core as mx

_GOLDEN = 0x9E3779B97F4A7C15
_LEAST_LOGPROB = -9999.0
"""Told instead of minus infinity, which JSON has no word for."""

Sampler = Callable[[Any], Any]
"""Takes the log probabilities of rows and returns their tokens."""


def make_sampler(sampling: Sampling, position: int = 0) -> Sampler:
    """Greedy at temperature 0, one function for all such requests; else one that counts positions from there on."""
    import mlx.core as mx
    from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, greedy_sampler

    if sampling.temperature <= 0:
        return greedy_sampler  # type: ignore[no-any-return]

    def sample(logprobs: mx.array) -> mx.array:
        nonlocal position
        key = mx.random.key((sampling.seed + _GOLDEN * position) & 0xFFFF_FFFF_FFFF_FFFF)
        position += 1
        if 0 < sampling.top_p < 1:
            logprobs = apply_top_p(logprobs, sampling.top_p)
        if sampling.min_p > 0:
            logprobs = apply_min_p(logprobs, sampling.min_p)
        if 0 < sampling.top_k < logprobs.shape[-1]:
            logprobs = apply_top_k(logprobs, sampling.top_k)
        return mx.random.categorical(logprobs * (1 / sampling.temperature), key=key)

    return sample


def sampler_of(order: GenerationOrder) -> Sampler:
    """The sampler of a request, which goes on behind the tokens it has generated already."""
    sampler = make_sampler(order.sampling, len(order.generated))
    if order.top_logprobs is not None or order.sampling.shapes_logits or order.constraint is not None:
        return ShapingSampler(order, sampler)
    # Greedy requests share one function, which mlx-lm then calls once for all of them.
    return sampler if order.sampling.temperature <= 0 else OwnSampler(sampler)


class OwnSampler:
    """The sampler of one request. An exception in it is kept for that request, and its row goes on greedily until then:

    raised inside a step it would end all requests of the batch.

    Attributes:
        error: what was raised; its request ends with it.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.error: Exception | None = None
        self._sampler = sampler

    def __call__(self, logprobs: mx.array) -> mx.array:
        """The next token."""
        import mlx.core as mx

        if self.error is None:
            try:
                return self._choose(logprobs)
            except Exception as error:
                self.error = error.with_traceback(None)  # its frames hold arrays
        return mx.argmax(logprobs, axis=-1)

    def _choose(self, logprobs: mx.array) -> mx.array:
        return self._sampler(logprobs)


class ShapingSampler(OwnSampler):
    """A sampler that also changes the logits before the choice, and remembers how likely each choice was.

    It keeps count of the tokens it has chosen by itself, in lazy arrays, so that no step waits for the one before;
    but an answer that is held to a grammar has to be read up to its last token before the next one can be chosen.

    Attributes:
        guide: walks the answer through its grammar; None for one that is free.
    """

    def __init__(self, order: GenerationOrder, sampler: Sampler) -> None:
        super().__init__(sampler)
        self._sampling, self._top = order.sampling, order.top_logprobs
        self.guide = order.constraint.begin(order.generated) if order.constraint is not None else None
        self._position = len(order.generated)
        self._last: mx.array | None = None
        self._prompt, self._generated = order.prompt, order.generated
        self._counts: mx.array | None = None
        self._seen: mx.array | None = None
        self._bias: mx.array | None = None
        self._raw: mx.array | None = None
        self._told: deque[tuple[mx.array, mx.array, mx.array | None, mx.array | None]] = deque()

    def shape(self, logits: mx.array) -> mx.array:
        """The logits of one row with bias and penalties; comes before each choice."""
        if self.error is None:
            try:
                return self._shaped(logits)
            except Exception as error:
                self.error = error.with_traceback(None)
        return logits

    def _shaped(self, logits: mx.array) -> mx.array:
        import mlx.core as mx

        sampling = self._sampling
        if self._top is not None:
            self._raw = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if not sampling.shapes_logits:
            return self._guided(logits)
        if self._counts is None:
            self._begin(logits.shape[-1])
        assert self._counts is not None
        if sampling.repetition_penalty != 1:
            assert self._seen is not None
            penalty = sampling.repetition_penalty
            seen = mx.logical_or(self._seen, self._counts > 0)
            logits = mx.where(seen, mx.where(logits < 0, logits * penalty, logits / penalty), logits)
        if sampling.frequency_penalty:
            logits = logits - sampling.frequency_penalty * self._counts
        if sampling.presence_penalty:
            logits = logits - sampling.presence_penalty * (self._counts > 0)
        return self._guided(logits if self._bias is None else logits + self._bias)

    def _choose(self, logprobs: mx.array) -> mx.array:
        """The next token, counted."""
        import mlx.core as mx

        token = self._sampler(logprobs)
        if self.guide is not None:
            self._last, self._position = token, self._position + 1
        if self._counts is not None:
            self._counts = self._counts.at[:, token].add(1)
        if self._top is not None and self._raw is not None:
            self._remember(token, self._raw)
            self._raw = None
        if self._counts is not None:
            mx.async_eval(self._counts)
        return token

    def report(self) -> TokenLogprob | None:
        """How likely the oldest token was that has not been reported yet; None when nobody wants to know."""
        if not self._told:
            return None
        token, chosen, ids, values = self._told.popleft()
        top: tuple[tuple[int, float], ...] = ()
        if ids is not None and values is not None:
            pairs = zip(ids.reshape(-1).tolist(), values.reshape(-1).tolist(), strict=True)
            top = tuple(sorted(((int(i), max(_LEAST_LOGPROB, v)) for i, v in pairs), key=lambda pair: -pair[1]))
        return TokenLogprob(int(token.item()), max(_LEAST_LOGPROB, float(chosen.item())), top)

    def _guided(self, logits: mx.array) -> mx.array:
        """The logits with those of all tokens taken out that the grammar has no place for."""
        import mlx.core as mx

        if self.guide is None:
            return logits
        mx.async_eval(logits)  # the model runs while the mask is made
        if self._last is not None:
            self.guide.take(self._position - 1, int(self._last.item()))
        allowed = self.guide.allowed(logits.shape[-1])
        return logits if allowed is None else mx.where(mx.array(allowed), logits, -mx.inf)

    def _remember(self, token: mx.array, raw: mx.array) -> None:
        import mlx.core as mx

        chosen = mx.take_along_axis(raw, token.reshape(1, 1), axis=-1)
        ids = values = None
        if self._top:
            top = min(self._top, raw.shape[-1])
            ids = mx.argpartition(-raw, kth=top - 1, axis=-1)[:, :top]
            values = mx.take_along_axis(raw, ids, axis=-1)
        mx.async_eval(token, chosen, *(array for array in (ids, values) if array is not None))
        self._told.append((token, chosen, ids, values))

    def _begin(self, vocab: int) -> None:
        """Count what was there before, once the width of the logits is known."""
        import mlx.core as mx

        self._counts = _counted(self._generated, vocab)
        if self._sampling.repetition_penalty != 1:
            self._seen = _counted(self._prompt, vocab) > 0
        bias = [(token, value) for token, value in self._sampling.logit_bias if token < vocab]
        if bias:
            tokens, values = zip(*bias, strict=True)
            self._bias = mx.zeros((1, vocab)).at[:, mx.array(tokens)].add(mx.array(values, dtype=mx.float32))
        mx.eval([array for array in (self._counts, self._seen, self._bias) if array is not None])


def _counted(tokens: Sequence[int], vocab: int) -> mx.array:
    import mlx.core as mx

    counts = mx.zeros((1, vocab))
    known = [token for token in tokens if token < vocab]
    return counts.at[:, mx.array(known)].add(1) if known else counts
