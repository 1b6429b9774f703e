"""One loaded model with its requests: who may prefill, who decodes alone, who decodes in the batch.

Prefill is ours, on a plain cache, one chunk at a time, of the prompt and the size that the executor says; between two
chunks everybody else may take a step. A finished cache then decodes alone while it is the model's only one, and moves
into the batch when a second is ready; of several that are read one shortly after the other each is told its first
token and stands by, until all join at once. Very short prompts that wait together skip this: they are read at once, as
rows of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from omlxd.core.costs import BLOCK_TOKENS
from omlxd.engine import decode_lanes, kv_caches, mlxlm, sampling
from omlxd.engine.loader import LoadedModel
from omlxd.engine.orders import EngineLimits, GenerationOrder, Plan
from omlxd.engine.prefix_cache import PrefixCaches
from omlxd.engine.running import Running, Take

_Entering = tuple[Running, int, list[Any]]
"""A request on its way into the batch, with the token that it runs next and its caches."""


class ResidentModel:
    """A loaded model and its lanes.

    Args:
        loaded: the materialised model.
        prefill_chunk_tokens: tokens of a prefill step.
        max_batch: requests that run at once; more wait here, in order.
        prefixes: what earlier requests of all models have left.

    Attributes:
        in_step: the requests that run in the step under way, or ran in the last one; an exception is theirs.
        limits: those in force (R5).
        group_tokens: what one step may read of several short prompts at once, padding included.
        coming: short prompts that will be here in moments.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prefill_chunk_tokens: int,
        max_batch: int,
        prefixes: PrefixCaches,
    ) -> None:
        self.name = loaded.name
        self.codec = loaded.codec
        self.weights_bytes = loaded.weights_bytes
        self.limits = EngineLimits()
        self.group_tokens = 0
        self.coming = 0
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.max_batch = max_batch
        self.in_step: set[str] = set()
        self._module = loaded.module
        self._prefixes = prefixes
        self._waiting: list[Running] = []  # may be very many; no decode step looks at them
        self._begun: list[Running] = []  # their prompts have a cache
        self._lone: dict[str, tuple[Running, decode_lanes.LoneDecode]] = {}
        self._rows: dict[int, Running] = {}
        self._first: dict[str, tuple[int, int]] = {}  # uid and first token of those that were read at once
        self._batch: decode_lanes.DecodeBatch | None = None
        self._shares_batch: bool | None = None  # not known before a request comes

    def obey(self, plan: Plan) -> None:
        """New limits, before the next step (R5)."""
        self.limits = plan.limits
        self.group_tokens, self.coming = plan.group_tokens.get(self.name, 0), plan.coming.get(self.name, 0)

    def add(self, order: GenerationOrder, now_s: float) -> None:
        """Queue a request."""
        sampler = sampling.sampler_of(order)
        text = self.codec.stream_text(order.stop)
        end_ids = frozenset() if order.ignore_eos else self.codec.end_ids
        request = Running(order, sampler, text, end_ids, came_s=now_s, moved_s=now_s)
        request.reused = self._reusable(request)
        self._waiting.append(request)

    @property
    def requests(self) -> list[str]:
        """Ids of all requests here, running first."""
        running = [*self._lone, *(row.order.request for row in self._rows.values())]
        return running + [prompt.order.request for prompt in (*self._begun, *self._waiting)]

    @property
    def batched(self) -> set[str]:
        """Ids of the requests that decode together."""
        return {row.order.request for row in self._rows.values()}

    @property
    def decoding(self) -> bool:
        """Whether a decode step would do something."""
        return bool(self._lone or self._rows)

    @property
    def shares_batch(self) -> bool:
        """Whether its requests run together; tried once, so only ask when there are several."""
        if self._shares_batch is None:
            self._shares_batch = decode_lanes.can_share(self._module)
        return self._shares_batch

    @property
    def unjoined(self) -> int:
        """Requests that are told their first token and wait for others to join the batch with them."""
        return sum(lane.told for _, lane in self._lone.values())

    @property
    def length_tokens(self) -> int:
        """Tokens of the longest request that decodes, which the whole batch is padded to; 0 when none does."""
        lone = [request for request, _ in self._lone.values()]
        return max((request.length_tokens for request in [*lone, *self._rows.values()]), default=0)

    @property
    def prompts(self) -> list[Running]:
        """Whose prompt may take a step: those that began, and others while there is room, in the order they came."""
        if not self._waiting or self._places <= 0:
            return self._begun
        return [*self._begun, *self._waiting]

    @property
    def prompts_soon(self) -> list[Running]:
        """Those that began, and as many of the others as there is room for: never very many."""
        return [*self._begun, *self._waiting[: max(0, self._places)]]

    def granted_chunk_tokens(self, request: Running) -> int:
        """Tokens of a prefill step that memory was reserved for."""
        return request.order.prefill_chunk_tokens or self.prefill_chunk_tokens

    @property
    def _places(self) -> int:
        """How many more may begin."""
        return self.max_batch - len(self._lone) - len(self._rows) - len(self._begun)

    @property
    def kv_bytes(self) -> int:
        """KV cache bytes of all requests here."""
        total = sum(kv_caches.cache_bytes(request.cache) for request in self._begun)
        total += sum(kv_caches.cache_bytes(lane.cache) for _, lane in self._lone.values())
        return total + (self._batch.nbytes if self._batch else 0)

    def prefill_step(
        self,
        request: Running,
        chunk_tokens: int,
        take: Take,
        *,
        group_tokens: int,
        least_reused: int,
        alone: bool = False,
    ) -> list[Running]:
        """Run the next chunk of this prompt, or it and other short ones at once.

        Args:
            request: one of `prompts`.
            chunk_tokens: at most so many tokens.
            take: receives the token of a request that moves into the batch on this occasion.
            group_tokens: at most so many of several prompts, padding included.
            least_reused: fewer kept tokens are run again.
            alone: once it is read it does not join the others yet, but waits for those who join them with it.

        Returns:
            The request, or all whose prompts were read at once.
        """
        self.in_step = {request.order.request}
        if group := self._short_group(request, group_tokens):
            self._read_together(group)
            return group
        tokens = request.tokens
        if not request.cache:
            if request.order.cache_prompt:
                request.reused, request.cache = self._prefixes.begin(self.name, tokens, least_reused)
            request.prefilled = request.reused
            request.cache = request.cache or kv_caches.make_cache(self._module)
            self._waiting.remove(request)
            self._begun.append(request)
        end = self._chunk_end(request, chunk_tokens)
        if end > request.prefilled:
            mlxlm.prefill_chunk(self._module, request.cache, tokens[request.prefilled : end])
            request.prefilled = end
            if end == request.order.shared_tokens:
                self._prefixes.keep_copy(self.name, tokens[:end], request.cache)
        request.kv_bytes = kv_caches.cache_bytes(request.cache)
        if request.prefilled == len(tokens) - 1:
            self._begun.remove(request)
            request.prefilled = len(tokens)
            if alone:
                self._decode_alone(request)
            else:
                self._join(request, take)
        return [request]

    def tell_first(self, requests: Sequence[Running], take: Take) -> None:
        """Tell requests that were just read their first tokens, but not who has joined a batch that decodes.

        A step begins the next token before it tells this one.
        """
        ended = []
        for request in requests:
            name = request.order.request
            self.in_step = {name}
            if name in self._lone:
                _, lane = self._lone[name]
                if not take(request, lane.tell()):
                    self._end_lone(request, lane)
            elif name in self._first:
                uid, token = self._first.pop(name)
                if not take(request, token):
                    ended.append(uid)
                    self._keep_row(uid, request.history[:-1])  # its last token was not run
        self._drop_rows(ended)

    def decode_step(self, take: Take) -> None:
        """One token for everybody who decodes; those who can share the batch join it first.

        What nobody will read is not computed: no step is begun behind tokens that are the last that were asked for.
        """
        if self._rows or (len(self._lone) > 1 and self.shares_batch):
            self._gather_lone(take)
        for request, lane in list(self._lone.values()):
            self.in_step = {request.order.request}
            if not take(request, lane.tell() if request.ends_next else lane.step()):
                self._end_lone(request, lane)
        if self._batch and self._rows:
            self.in_step = self.batched
            ended, batch = [], self._batch
            are_last = not batch.told and all(row.ends_next for row in self._rows.values())
            for uid, token in batch.tell() if are_last else batch.step():
                if not take(self._rows[uid], token):
                    ended.append(uid)
            for uid in ended:
                history = self._rows[uid].history
                self._keep_row(uid, history[:-1] if uid in batch.told else history)
            self._drop_rows(ended)

    def remove(self, requests: set[str]) -> list[str]:
        """Take requests out and give their KV caches back; the ids that were here."""
        here = [request for request in self.requests if request in requests]
        self._keep_prompts(requests)
        for request in here:
            if request in self._lone:
                self._drop_lone(request)
        self._drop_rows([uid for uid, row in self._rows.items() if row.order.request in requests])
        return here

    def close(self) -> list[str]:
        """Drop everything this object holds; the ids of the requests that were here."""
        here = self.requests
        arrays = mlxlm.every_array(self._module) if self._module is not None else []
        self._module = None
        self._waiting.clear()
        self._begun.clear()
        self._lone.clear()
        self._rows.clear()
        self._close_batch()
        mlxlm.free_one_by_one(arrays)
        return here

    def salvage(self, concerned: set[str]) -> None:
        """After an exception in a step of theirs: drop them and keep the others, and the model.

        mlx-lm's batch may have lost its rows or hold them in any state: with one of them concerned all are dropped.
        """
        self._keep_prompts(concerned)
        for request in concerned & self._lone.keys():
            running, lane = self._lone.pop(request)
            lane.cache, running.cache = [], []
        if concerned & self.batched:
            self._rows.clear()
            self._close_batch()

    def reset(self) -> None:
        """Drop all requests, keep the model."""
        self._waiting.clear()
        self._begun.clear()
        self._lone.clear()
        self._rows.clear()
        self._batch = None

    def _keep_prompts(self, gone: set[str]) -> None:
        """All but those whose prompts are given up."""
        self._waiting = [request for request in self._waiting if request.order.request not in gone]
        self._begun = [request for request in self._begun if request.order.request not in gone]

    def _short_group(self, first: Running, group_tokens: int) -> list[Running]:
        """This prompt and other short ones that one step can read at once; none when there are no others."""
        others = [request for request in self.prompts if request is not first and not request.cache]
        group: list[Running] = []
        for request in [first, *sorted(others, key=lambda other: other.left_tokens)]:
            longest = max(other.left_tokens for other in [*group, request])
            if request.cache or longest * (len(group) + 1) > group_tokens or len(group) >= self._places:
                break
            if self._reusable(request):
                break
            group.append(request)
        return group if len(group) > 1 and self.shares_batch else []

    def _read_together(self, group: Sequence[Running]) -> None:
        """Read short prompts as rows of the batch."""
        self.in_step = {request.order.request for request in group}
        read = self._open_batch().read([request.tokens for request in group], [request.sampler for request in group])
        self._first = {request.order.request: first for request, first in zip(group, read, strict=True)}
        for request, (uid, _) in zip(group, read, strict=True):
            self._waiting.remove(request)
            request.prefilled, self._rows[uid] = len(request.tokens), request

    def _chunk_end(self, request: Running, chunk_tokens: int) -> int:
        """Where the next chunk ends: also where the shared part of the prompt does, so that it can be kept there.

        A chunk that begins within a block of the cache ends with it at the latest: else the cache would grow by whole
        blocks from where it is, and hold up to a block too much from then on.
        """
        end = min(request.prefilled + chunk_tokens, len(request.tokens) - 1)
        if within := request.prefilled % BLOCK_TOKENS:
            end = min(end, request.prefilled + BLOCK_TOKENS - within)
        shared = request.order.shared_tokens if self._prefixes.enabled else 0
        return shared if request.prefilled < shared < end else end

    def _join(self, request: Running, take: Take) -> None:
        """Let a request that was read decode with the others, alone when there are none that it can share with."""
        if not (self._lone or self._rows) or not self.shares_batch:
            self._decode_alone(request)
            return
        cache, request.cache = request.cache, []
        self._gather_lone(take, (request, request.tokens[-1], cache))

    def _decode_alone(self, request: Running) -> None:
        cache, request.cache = request.cache, []
        lane = decode_lanes.LoneDecode(self._module, cache, request.tokens[-1], request.sampler)
        self._lone[request.order.request] = (request, lane)

    def _gather_lone(self, take: Take, *others: _Entering) -> None:
        """Move the lone requests that can share into the batch, with others; a token in flight is delivered on the way.

        Whoever raises on its way gets lost, and so do the others, but nobody who has left its lane before.
        """
        entering: list[_Entering] = []
        try:
            for name, (request, lane) in list(self._lone.items()):
                self.in_step = {name}
                del self._lone[name]
                told = lane.told
                token, cache = lane.leave()
                if told or take(request, token):
                    entering.append((request, token, cache))
                else:  # its last token was not run
                    self._keep(request, request.history[:-1], partial(list, cache))
            entering += others
        finally:
            self._enter(entering)

    def _enter(self, entering: Sequence[_Entering]) -> None:
        if not entering:
            return
        requests, tokens, caches = zip(*entering, strict=True)
        uids = self._open_batch().join(tokens, [request.sampler for request in requests], caches)
        self._rows.update(zip(uids, requests, strict=True))

    def _reusable(self, request: Running) -> int:
        """How many of its tokens the prefix cache has, and it may take."""
        return self._prefixes.reusable(self.name, request.tokens) if request.order.cache_prompt else 0

    def _keep(self, request: Running, tokens: Sequence[int], take_cache: Callable[[], list[Any]]) -> None:
        """Offer the caches of a request that has ended to later ones, unless it may leave nothing."""
        if request.order.cache_prompt:
            self._prefixes.keep(self.name, tokens, take_cache)

    def _keep_row(self, uid: int, tokens: Sequence[int]) -> None:
        self._keep(self._rows[uid], tokens, partial(self._open_batch().extract, uid))

    def _open_batch(self) -> decode_lanes.DecodeBatch:
        if self._batch is None:
            self._batch = decode_lanes.DecodeBatch(self._module)
        return self._batch

    def _end_lone(self, request: Running, lane: decode_lanes.LoneDecode) -> None:
        cache, run = lane.cache, request.history[:-1] if lane.told else request.history
        self._drop_lone(request.order.request)
        self._keep(request, run, partial(list, cache))

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
        batch, self._batch = self._batch, None  # whatever happens, it is not used again
        if batch is not None:
            batch.close()
