"""KV caches of what ended requests have run, kept for prompts that begin the same way: one budget for all models.

A prompt that begins with something kept gets a copy of its own and is prefilled from there. Kept are whole answers,
when they end well, and the shared beginning of a prompt (its system segment) as soon as it has been run: caches with a
window or a recurrent state cannot be cut back to it later. Everything kept is evaluated and in buffers of its own
before it counts, so that forgetting it gives the memory back at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omlxd.core.prefix_index import LEAST_TOKENS, PrefixIndex
from omlxd.engine import kv_caches


class PrefixCaches:
    """The prefix caches of all models; on the engine's thread, but for `by_model`.

    Attributes:
        by_model: bytes by model; replaced, never changed.
    """

    def __init__(self) -> None:
        self.by_model: Mapping[str, int] = {}
        self._index: PrefixIndex[list[Any]] = PrefixIndex()
        self._budget_bytes = 0

    @property
    def enabled(self) -> bool:
        """Whether anything may be kept."""
        return self._budget_bytes > 0

    def obey(self, budget_bytes: int) -> None:
        """Hold no more than this from now on; what is too much is forgotten, least recently used first."""
        self._budget_bytes = budget_bytes
        if self._index.nbytes > budget_bytes:
            self._index.shrink(budget_bytes)
            self._recount()

    def reusable(self, model: str, prompt: Sequence[int]) -> int:
        """How many tokens of the prompt need not be run; its last one always is: the first new token comes of it."""
        found = self._index.find(model, prompt[:-1])
        return found[1] if found is not None and found[1] >= LEAST_TOKENS else 0

    def begin(self, model: str, prompt: Sequence[int], least_tokens: int) -> tuple[int, list[Any]]:
        """How many tokens of the prompt are run already, and caches of the caller's own that hold them; 0 and none.

        Args:
            model: whose prompt it is.
            prompt: its tokens.
            least_tokens: fewer are not worth the copy.
        """
        found = self._index.find(model, prompt[:-1])
        if found is None or found[1] < least_tokens:
            return 0, []
        kept, tokens = found
        if tokens >= LEAST_TOKENS:
            self._index.touch(kept)  # the head of a template keeps nothing from being forgotten: all prompts have it
        return tokens, kv_caches.own_copy(kept.value, kept.tokens - tokens)

    def keep_copy(self, model: str, tokens: Sequence[int], cache: Sequence[Any]) -> None:
        """Keep a copy of caches that hold exactly `tokens` and are still in use."""
        if self.enabled and len(tokens) >= LEAST_TOKENS and kv_caches.is_copyable(cache):
            self._keep(model, tokens, kv_caches.share_copy(cache))

    def keep(self, model: str, tokens: Sequence[int], take_cache: Callable[[], list[Any]]) -> None:
        """Keep the caches of a request that has ended, which hold exactly `tokens`; nobody may use them any more.

        Args:
            take_cache: gives the caches away; asked only when there is a point in keeping them.
        """
        if self.enabled and len(tokens) >= LEAST_TOKENS and kv_caches.is_copyable(cache := take_cache()):
            self._keep(model, tokens, cache)

    def drop(self, model: str) -> None:
        """Forget all of a model's."""
        self._index.drop(model)
        self._recount()

    def _keep(self, model: str, tokens: Sequence[int], cache: list[Any]) -> None:
        try:
            self._settle(model, tokens, cache)
        except RuntimeError:  # the device has no memory for it (CUDA): that costs what is kept, and no request
            self._index.shrink(0)
            self._recount()

    def _settle(self, model: str, tokens: Sequence[int], cache: list[Any]) -> None:
        if not kv_caches.holds_tokens(cache, len(tokens)):
            return
        kv_caches.cut_room(cache)

        def settled() -> list[Any]:
            self._recount()
            kv_caches.make_contiguous(cache)
            return cache

        nbytes, cuttable = kv_caches.cache_bytes(cache), kv_caches.is_cuttable(cache)
        if self._index.add(model, tokens, nbytes, cuttable, settled, self._budget_bytes):
            self._recount()

    def _recount(self) -> None:
        self.by_model = self._index.by_model()
