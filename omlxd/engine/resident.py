"""One loaded model with its requests: whose turn it is to prefill, who decodes alone, who decodes in the batch.

Prefill is ours, on a plain cache, one chunk at a time, first come first served; between two chunks everybody else
may take a step. A finished cache then decodes alone while it is the model's only one, and moves into the batch when a
second is ready. Short prompts that wait together skip this and go bare into the batch, which prefills them at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from omlxd.core.states import FinishReason
from omlxd.engine import mlxlm, sampling
from omlxd.engine.loader import LoadedModel
from omlxd.engine.protocol import EngineLimits, GenerationOrder, TokenLogprob
from omlxd.engine.sampling import Sampler, ShapingSampler
from omlxd.engine.text import StreamText


@dataclass
class Running:
    """A request on the engine's thread."""

    order: GenerationOrder
    sampler: Sampler
    text: StreamText
    end_ids: frozenset[int]
    prefilled: int = 0
    generated: int = 0
    kv_bytes: int = 0
    cache: list[Any] = field(default_factory=list)
    uid: int | None = None
    tokens: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.generated = len(self.order.generated)
        self.tokens = self.order.prompt + self.order.generated  # what an earlier stay made is run again
        for token in self.order.generated:
            self.text.add(token)  # told before; what it held back comes with the next token

    @property
    def length_tokens(self) -> int:
        """Tokens in its KV cache while it decodes."""
        return len(self.order.prompt) + self.generated

    def logprob(self) -> TokenLogprob | None:
        """How likely the token was that was taken last, if that is to be told; asked for once per token."""
        return self.sampler.report() if isinstance(self.sampler, ShapingSampler) else None

    def accept(self, token: int) -> tuple[str, FinishReason | None]:
        """Count a token and return the text that is certain now, and why the request is over if it is."""
        if token in self.end_ids:
            return self.text.finish(), FinishReason.STOP
        self.generated += 1
        text, stopped = self.text.add(token)
        if stopped:
            return text, FinishReason.STOP
        if self.generated >= self.order.max_tokens:
            return text + self.text.finish(), FinishReason.LENGTH
        return text, None


Take = Callable[[Running, int], bool]
"""Receives each token in order; returns whether the request goes on."""


class ResidentModel:
    """A loaded model and its lanes.

    Args:
        loaded: the materialised model.
        prefill_chunk_tokens: tokens of a prefill step.
        max_batch: requests that run at once; more wait here, in order.
        limits: the limits in force when it was loaded (R5); `obey` changes them.
    """

    def __init__(self, loaded: LoadedModel, prefill_chunk_tokens: int, max_batch: int, limits: EngineLimits) -> None:
        self.name = loaded.name
        self.codec = loaded.codec
        self.weights_bytes = loaded.weights_bytes
        self.limits = limits
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.max_batch = max_batch
        self._module = loaded.module
        self._waiting: deque[Running] = deque()
        self._lone: dict[str, tuple[Running, mlxlm.LoneDecode]] = {}
        self._rows: dict[int, Running] = {}
        self._batch: mlxlm.DecodeBatch | None = None

    def obey(self, limits: EngineLimits) -> None:
        """New limits, before the next step (R5)."""
        self.limits = limits

    def add(self, order: GenerationOrder) -> None:
        """Queue a request."""
        self._waiting.append(
            Running(
                order,
                sampling.sampler_of(order),
                self.codec.stream_text(order.stop),
                self.codec.end_ids,
            )
        )

    @property
    def requests(self) -> list[str]:
        """Ids of all requests here, running first."""
        running = [*self._lone, *(row.order.request for row in self._rows.values())]
        return running + [waiting.order.request for waiting in self._waiting]

    @property
    def decoding(self) -> bool:
        """Whether a decode step would do something."""
        return bool(self._lone or self._rows)

    @property
    def length_tokens(self) -> int:
        """Tokens of the longest request that decodes, which the whole batch is padded to; 0 when none does."""
        lone = [request for request, _ in self._lone.values()]
        return max((request.length_tokens for request in [*lone, *self._rows.values()]), default=0)

    @property
    def prefilling(self) -> bool:
        """Whether a prefill step would do something."""
        return bool(self._waiting) and (bool(self._waiting[0].cache) or self._running < self.max_batch)

    @property
    def next_request(self) -> str:
        """The id of the request whose prompt is next."""
        return self._waiting[0].order.request

    @property
    def _running(self) -> int:
        return len(self._lone) + len(self._rows)

    @property
    def kv_bytes(self) -> int:
        """KV cache bytes of all requests here."""
        total = sum(mlxlm.cache_bytes(waiting.cache) for waiting in self._waiting)
        total += sum(mlxlm.cache_bytes(lane.cache) for _, lane in self._lone.values())
        return total + (self._batch.nbytes if self._batch else 0)

    def prefill_step(self, take: Take) -> Running | None:
        """Run one chunk of the first prompt in the queue; the request it belonged to, None when it went elsewhere."""
        if self._start_together():
            return None
        request = self._waiting[0]
        tokens = request.tokens
        if not request.cache:
            request.cache = mlxlm.make_cache(self._module)
        end = min(request.prefilled + self._chunk_tokens(request), len(tokens) - 1)
        if end > request.prefilled:
            mlxlm.prefill_chunk(self._module, request.cache, tokens[request.prefilled : end])
            request.prefilled = end
            request.kv_bytes = mlxlm.cache_bytes(request.cache)
        if request.prefilled == len(tokens) - 1:
            self._waiting.popleft()
            request.prefilled = len(tokens)
            self._join(request, take)
        return request

    def decode_step(self, take: Take) -> None:
        """One token for everybody who decodes."""
        for request, lane in list(self._lone.values()):
            if not take(request, lane.step()):
                self._drop_lone(request.order.request)
        if self._batch and self._rows:
            ended = []
            for uid, token in self._batch.step():
                if not take(self._rows[uid], token):
                    ended.append(uid)
            self._drop_rows(ended)

    def remove(self, requests: set[str]) -> list[str]:
        """Take requests out and give their KV caches back; the ids that were here."""
        here = [request for request in self.requests if request in requests]
        self._waiting = deque(waiting for waiting in self._waiting if waiting.order.request not in requests)
        for request in here:
            if request in self._lone:
                self._drop_lone(request)
        self._drop_rows([uid for uid, row in self._rows.items() if row.order.request in requests])
        return here

    def close(self) -> list[str]:
        """Drop everything this object holds; the ids of the requests that were here."""
        here = self.requests
        self._waiting.clear()
        self._lone.clear()
        self._rows.clear()
        self._close_batch()
        self._module = None
        return here

    def reset(self) -> list[str]:
        """After an exception in a step: drop all requests, keep the model; the ids that were lost."""
        here = self.requests
        self._waiting.clear()
        self._lone.clear()
        self._rows.clear()
        self._close_batch()
        mlxlm.release_memory()
        return here

    def _start_together(self) -> bool:
        """Hand short prompts that wait together to the batch as they are (8 of 30 tokens: 1.5 times faster)."""
        group: list[Running] = []
        for request in self._waiting:
            longest = max(len(other.tokens) for other in [*group, request])
            if request.cache or longest * (len(group) + 1) > self._chunk_tokens(request):
                break
            if self._running + len(group) >= self.max_batch:
                break
            group.append(request)
        if len(group) < 2 or not mlxlm.is_mergeable(mlxlm.make_cache(self._module)):
            return False
        batch = self._open_batch()
        for request in group:
            self._waiting.popleft()
            request.prefilled = len(request.tokens)
            request.uid = batch.insert(request.tokens, request.sampler)
            self._rows[request.uid] = request
        return True

    def _chunk_tokens(self, request: Running) -> int:
        return request.order.prefill_chunk_tokens or self.prefill_chunk_tokens

    def _join(self, request: Running, take: Take) -> None:
        mergeable = mlxlm.is_mergeable(request.cache)
        last, cache = request.tokens[-1], request.cache
        request.cache = []
        if mergeable:
            self._gather_lone(take)
        if not mergeable or not (self._rows or self._batch):
            lane = mlxlm.LoneDecode(self._module, cache, last, request.sampler)
            self._lone[request.order.request] = (request, lane)
            return
        batch = self._open_batch()
        request.uid = batch.insert([last], request.sampler, cache, request.tokens[:-1])
        self._rows[request.uid] = request

    def _gather_lone(self, take: Take) -> None:
        """Move the lone request, if it can share, into the batch; its token in flight is delivered on the way."""
        for name, (request, lane) in list(self._lone.items()):
            if not mlxlm.is_mergeable(lane.cache):
                continue
            del self._lone[name]
            token, cache = lane.leave()
            if take(request, token):
                request.uid = self._open_batch().insert([token], request.sampler, cache)
                self._rows[request.uid] = request

    def _open_batch(self) -> mlxlm.DecodeBatch:
        if self._batch is None:
            self._batch = mlxlm.DecodeBatch(self._module, self.max_batch, self.prefill_chunk_tokens)
        return self._batch

    def _drop_lone(self, request: str) -> None:
        running, lane = self._lone.pop(request)
        mlxlm.synchronize()  # its next token is in flight and holds the cache
        lane.cache, running.cache = [], []

    def _drop_rows(self, uids: list[int]) -> None:
        if not uids or not self._batch:
            return
        for uid in uids:
            del self._rows[uid]
        if self._rows:
            self._batch.remove(uids)
        else:
            self._close_batch()

    def _close_batch(self) -> None:
        if self._batch is not None:
            self._batch.close()
            self._batch = None
