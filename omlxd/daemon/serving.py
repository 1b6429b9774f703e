"""From a request to the engine and back: its model, its tokens, its end, whatever is evicted or parked in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from omlxd.core.errors import (
    Busy,
    DoesNotFit,
    EngineFailed,
    LoadCancelled,
    OmlxError,
    PrefillMemoryExceeded,
    ShuttingDown,
)
from omlxd.core.events import Event, EventName
from omlxd.core.snapshot import Limits
from omlxd.core.states import EntryState, FinishReason
from omlxd.core.waits import parked_waits_for
from omlxd.daemon.entry import EnginePoolEntry
from omlxd.daemon.model_files import model_folder
from omlxd.daemon.model_watch import ModelWatch
from omlxd.daemon.refusals import aborted, decision_behind, fresh, parked_too_long, shutting_down, weights_alone
from omlxd.daemon.request import Cut, Generation
from omlxd.daemon.tokenizing import DaemonThreads, tokenize
from omlxd.daemon.turnstile import Turnstile
from omlxd.daemon.wish import Prompt, Wish, tokens_left
from omlxd.engine.codec import TextCodec
from omlxd.engine.orders import GenerationOrder, LoadOrder

if TYPE_CHECKING:
    from omlxd.daemon.load_ticket import LoadStatus, OnProgress
    from omlxd.daemon.pool import EnginePool
    from omlxd.engine.grammars import Constraint

_NOT_READY = {
    EntryState.UNLOADED: "is not loaded",
    EntryState.LOADING: "is being loaded",
    EntryState.LOADED: "is about to be unloaded",
    EntryState.UNLOADING: "is being unloaded",
    EntryState.FAILED: "failed to load before",
}
FAILED_FOR_S = 30.0  # how long a failed load answers for the next request without being tried again
AGAIN_S = 1.0  # after which a parked request tries again what was in vain; twice as long each time
MOST_AGAIN_S = 8.0
ADMITTED_AT_ONCE = 8  # in one turn of the loop: each takes a millisecond where there are a thousand models
SHORT_CHARACTERS = 4096  # such a prompt may be read together with others, and its tokens are there in milliseconds


@dataclass
class Request:
    """A request from its arrival to its end; `tokens` once there is a tokenizer, `told` once it was said to wait.

    `codec` made the tokens: when the model's files are others by the time it is loaded, they are made again. `refusal`
    is why it stays parked under the limits and pins in force.
    """

    entry: EnginePoolEntry
    generation: Generation
    asked: Prompt
    wish: Wish
    tokens: tuple[int, ...] | None = None
    codec: TextCodec | None = None
    told: bool = False
    constraint: Constraint | None = None
    refusal: OmlxError | None = None

    def drop_stale_tokens(self, codec: TextCodec | None) -> None:
        """Forget tokens that another tokenizer made, unless an answer to them has begun."""
        if codec is not self.codec and not self.generation.generated:
            self.tokens = None


class Serving:
    """One task per request of the pool; the request's memory is back when its task is over.

    Args:
        pool: whose requests these are.
        park_deadline_s: seconds that a parked request waits until it fits again.
    """

    def __init__(self, pool: EnginePool, park_deadline_s: float) -> None:
        self._pool = pool
        self.park_deadline_s = park_deadline_s
        self._threads = DaemonThreads(2, "omlxd-tokenizer")
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._watch = ModelWatch(pool)
        self._turnstile = Turnstile(ADMITTED_AT_ONCE)

    def begin(self, entry: EnginePoolEntry, generation: Generation, asked: Prompt, wish: Wish) -> None:
        """Take the request in; from now on its entry is in use."""
        entry.requests[generation.id] = generation
        task = asyncio.create_task(self._serve(Request(entry, generation, asked, wish)), name=f"omlxd-{generation.id}")
        self._tasks[generation.id] = task
        task.add_done_callback(lambda _: self._ended(entry, generation, wish))
        self._pool.notify()

    def abort(self, generation: Generation, error: OmlxError) -> bool:
        """End it with this error now; False when it had ended."""
        if not self._fail(generation, error):
            return False
        if not self._pool.dispatch.remove(generation) and (task := self._tasks.get(generation.id)) is not None:
            task.cancel()  # it waits for its model; nothing of it is in the engine
        return True

    async def drain(self, generations: Iterable[Generation], timeout_s: float, reason: str) -> list[str]:
        """Let these end by themselves; abort those that do not in time, and return the model of each of them."""
        loop = asyncio.get_running_loop()
        ends_s, cut = loop.time() + timeout_s, list[str]()
        for generation in tuple(generations):
            await generation.wait_ended(max(0.0, ends_s - loop.time()))
            if not generation.ended:
                cut.append(generation.model)
            self.abort(generation, aborted(generation.model, reason))
        return cut

    async def until_loaded(
        self, entry: EnginePoolEntry, *, request: str | None = None, on_progress: OnProgress | None = None
    ) -> None:
        """Wait until the entry takes this request; without a request, a failed load is tried again at once."""
        while not entry.takes(request):
            if entry.loaded or entry.state is EntryState.UNLOADING:
                await self._watch.changed(entry)
                continue
            if entry.state is EntryState.FAILED and request is not None:
                await self._check_failed(entry)
            await self._pool.loads.join(entry, on_progress, request=request)
            if request is None:
                return  # it was loaded; that another load may want its memory already is no reason to load it again

    async def count(self, entry: EnginePoolEntry, asked: Prompt) -> int:
        """The tokens of a prompt; of a model that was never loaded the tokenizer is read for it."""
        engine, settings = self._pool.engine, entry.settings

        def read() -> TextCodec:
            return engine.read_codec(
                LoadOrder(0, entry.name, str(model_folder(settings)), max_context=settings.max_context)
            )

        codec = engine.codec(entry.name)
        if codec is None:
            codec = await asyncio.get_running_loop().run_in_executor(self._threads, read)
        return len((await tokenize(self._threads, entry.name, asked, codec)).tokens)

    async def close(self) -> None:
        """End all with ShuttingDown, without waiting for the engine."""
        for generation in self._pool.generations:
            self._fail(generation, shutting_down())
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._watch.close()
        self._threads.shutdown()

    async def _serve(self, request: Request) -> None:
        """The life of one request; it goes round again when it was parked, or its model was evicted first."""
        generation = request.generation
        try:
            while not generation.ended:
                if generation.cut_short is not None:
                    await self._end_early(request, generation.cut_short)
                    break
                if generation.parked_at_s is None:
                    order = await self._admitted(request)
                else:
                    order = await self._back_from_parking(request, generation.parked_at_s)
                if order is not None:
                    await self._pool.dispatch.run(request.entry, generation, order)
        except OmlxError as error:
            self._fail(generation, error)
        except Exception as unexpected:
            # Its name and not its words, which may quote the prompt.
            what = type(unexpected).__name__
            self._fail(generation, EngineFailed(f"the request to `{request.entry.name}` failed unexpectedly ({what})"))

    async def _admitted(self, request: Request) -> GenerationOrder | None:
        """Its order, once its model is loaded and its memory is reserved; None when it has to be looked at again."""
        pool, entry, generation = self._pool, request.entry, request.generation
        codec = pool.engine.codec(entry.name)
        request.drop_stale_tokens(codec)
        if request.tokens is None and codec is not None:
            is_short = request.asked.characters <= SHORT_CHARACTERS
            with pool.link.coming(entry.name) if is_short else nullcontext():
                encoded = await tokenize(self._threads, entry.name, request.asked, codec)
                await self._turnstile.through()
            request.tokens, request.codec, generation.shared_tokens = encoded.tokens, codec, encoded.shared_tokens
            generation.prompt, generation.prompt_tokens = request.tokens, len(request.tokens)
            request.wish.check(codec)
            asked, wish = request.asked, request.wish
            tokens_left(entry.name, len(request.tokens), wish.max_tokens, codec.context_length, asked.param)
            request.constraint = await self._constraint(request, request.tokens, codec)
        if request.tokens is not None:
            pool.door.check(entry, generation, len(request.tokens) + len(generation.generated))
            generation.prompt_fits()
        if not entry.takes(generation.id) and not request.told:
            request.told = True
            self._tell_waiting(entry, generation)
        if request.tokens is None:
            await self._until_tokenizer(entry, generation)
            return None
        await self.until_loaded(entry, request=generation.id)
        request.drop_stale_tokens(pool.engine.codec(entry.name))
        if not entry.takes(generation.id) or request.tokens is None:
            return None  # it was evicted between its load and now, or is another model since
        return await pool.door.admit(entry, generation, self._order(request, request.tokens))

    async def _constraint(self, request: Request, tokens: tuple[int, ...], codec: TextCodec) -> Constraint | None:
        """What holds its answer to the form that it asks for; raises InvalidRequest when the model cannot be held."""
        if (form := request.wish.form) is None:
            return None
        constrain = partial(codec.constrain, form, tokens, is_chat=request.asked.messages is not None)
        return await asyncio.get_running_loop().run_in_executor(self._threads, constrain)

    async def _until_tokenizer(self, entry: EnginePoolEntry, generation: Generation) -> None:
        """Wait for the model's tokenizer, which its load brings before its weights: then the prompt can be judged.

        The load itself tells: many may wait for one, and are not to look at whatever else changes in the pool.
        """
        engine, there = self._pool.engine, asyncio.Event()

        def look(status: LoadStatus) -> None:
            if engine.codec(entry.name) is not None:
                there.set()

        loading = asyncio.ensure_future(self.until_loaded(entry, request=generation.id, on_progress=look))
        judged = asyncio.ensure_future(there.wait())
        try:
            await asyncio.wait({loading, judged}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
        finally:
            judged.cancel()
            loading.cancel()  # only the wait for it: the load goes on
            await asyncio.gather(loading, judged, return_exceptions=True)

    async def _back_from_parking(self, request: Request, parked_at_s: float) -> GenerationOrder | None:
        """The same for a parked request: it is in no hurry, and what can never go on ends with the text it has.

        What outgrew the limits ends at once. What does not fit because they were lowered under it waits for better
        ones, or for who is pinned to make room, as long as a parked request may wait; while it is drained it ends at
        once too.

        Raises:
            Busy, DoesNotFit, PrefillMemoryExceeded: it has no text yet.
        """
        pool, generation = self._pool, request.generation
        left_s = max(0.0, parked_at_s + self.park_deadline_s - generation.vain_s - pool.clock())
        try:
            async with asyncio.timeout(left_s):
                if generation.vain_parks > 1:  # it takes more than was predicted: not again and again at once
                    await asyncio.sleep(min(AGAIN_S * 2 ** (generation.vain_parks - 2), MOST_AGAIN_S))
                try:
                    return await self._admitted(request)
                except Busy as error:
                    by_user = isinstance(error, LoadCancelled) and decision_behind(error) is None
                    if by_user or isinstance(error, ShuttingDown):
                        raise
                    await asyncio.sleep(AGAIN_S)  # its load had to wait too long for others, or to make way for them
                    return None
                except (DoesNotFit, PrefillMemoryExceeded) as error:
                    if generation.ran_under is None or not pool.limits.below(generation.ran_under):
                        raise  # it has outgrown them
                    await self._until_it_may_fit(request, error)
                    return None
        except TimeoutError:
            end: OmlxError = parked_too_long(generation.model, self.park_deadline_s, request.refusal)
        except (DoesNotFit, PrefillMemoryExceeded) as error:
            end = error
        if not generation.generated:
            raise end
        so_far = "" if isinstance(end, Busy) else "going on takes its text so far as part of the prompt, and "
        generation.cut_short = Cut(so_far + end.message)
        return None

    async def _until_it_may_fit(self, request: Request, refusal: OmlxError) -> None:
        """Wait for other limits, or for a pinned model to go or lose its pin; raises `refusal` while it is drained."""
        pool, generation, bound = self._pool, request.generation, self._bound()
        generation.waits_for = parked_waits_for(refusal.details.get("pinned", ()), refusal.message)
        pool.dispatch.log.waits(generation, "; ".join(filter(None, [refusal.message, refusal.hint])))
        request.refusal = refusal
        try:
            while self._bound() == bound:
                if self._drains(request):
                    raise refusal  # better limits are not waited for
                await pool.change.wait()
            request.refusal = None
        finally:
            generation.waits_for = None

    def _bound(self) -> tuple[Limits, frozenset[str]]:
        """What may keep a model or a prompt out for good: the limits, and the pinned models that are there."""
        absent = (EntryState.UNLOADED, EntryState.FAILED)
        entries = self._pool.entries.values()
        return self._pool.limits, frozenset(each.name for each in entries if each.pinned and each.state not in absent)

    def _drains(self, request: Request) -> bool:
        draining = request.entry.draining
        return self._pool.draining or (draining is not None and request.generation.id in draining)

    async def _end_early(self, request: Request, cut: Cut) -> None:
        """End it well, with what it has generated: also the text that was held back for more to come."""
        generation, codec = request.generation, self._pool.engine.codec(request.entry.name) or request.codec
        if codec is not None:
            tokens, stop = tuple(generation.generated), request.wish.stop
            rest = await asyncio.get_running_loop().run_in_executor(self._threads, codec.held_back, tokens, stop)
            if rest:
                generation.push(rest, 0)
        self._pool.dispatch.finish(generation, FinishReason.LENGTH, cut)

    def _order(self, request: Request, tokens: tuple[int, ...]) -> GenerationOrder:
        entry, generation, wish, limits = request.entry, request.generation, request.wish, self._pool.limits
        if 0 < limits.soft_bytes < (weights_bytes := entry.weights_bytes or 0):
            raise weights_alone(entry.name, weights_bytes, limits)
        codec = self._pool.engine.codec(entry.name)
        context_length = codec.context_length if codec is not None else entry.context_length
        max_tokens = tokens_left(entry.name, len(tokens), wish.max_tokens, context_length, request.asked.param)
        return GenerationOrder(
            generation.id,
            entry.name,
            tokens,
            max_tokens,
            wish.sampling,
            wish.stop,
            generated=tuple(generation.generated),
            shared_tokens=generation.shared_tokens if wish.cache_prompt else 0,
            top_logprobs=wish.top_logprobs,
            constraint=request.constraint,
            ignore_eos=wish.ignore_eos,
            cache_prompt=wish.cache_prompt,
            arrival=generation.order,
        )

    def _tell_waiting(self, entry: EnginePoolEntry, generation: Generation) -> None:
        fields = {"reason": f"`{entry.name}` {_NOT_READY[entry.state]}"}
        self._pool.emit(Event(EventName.REQUEST_WAITING, model=entry.name, request=generation.id, fields=fields))

    async def _check_failed(self, entry: EnginePoolEntry) -> None:
        """Answer with the reason of the last failure, unless that was a while ago or the files have changed since."""
        error = entry.error
        if error is None or self._pool.clock() - (entry.failed_at_s or 0.0) >= FAILED_FOR_S:
            return
        if await asyncio.to_thread(self._pool.fingerprint, entry.settings) == entry.fingerprint:
            raise fresh(error)

    def _fail(self, generation: Generation, error: OmlxError) -> bool:
        failed = generation.fail(fresh(error))
        if failed:
            self._pool.dispatch.log.failed(generation, error)
        return failed

    def _ended(self, entry: EnginePoolEntry, generation: Generation, wish: Wish) -> None:
        """Its task is over and its memory is back; without an end of its own it was cancelled with its loop."""
        self._fail(generation, shutting_down())
        del entry.requests[generation.id], self._tasks[generation.id]
        entry.touch()
        if generation.stays:
            entry.keep(wish.keep_alive_s)
        self._pool.door.wake()  # its model may be idle now
        self._pool.notify()
