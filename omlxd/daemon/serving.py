"""From a request to the engine and back: its model, its tokens, its end, whatever is evicted in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from omlxd.core.errors import EngineFailed, OmlxError
from omlxd.core.events import Event, EventName
from omlxd.core.states import EntryState
from omlxd.daemon.entry import EnginePoolEntry
from omlxd.daemon.refusals import aborted, fresh, shutting_down, weights_alone
from omlxd.daemon.request import Generation
from omlxd.daemon.tokenizing import DaemonThreads, tokenize
from omlxd.daemon.wish import Prompt, Wish, tokens_left
from omlxd.engine.protocol import GenerationOrder

if TYPE_CHECKING:
    from omlxd.daemon.load_ticket import OnProgress
    from omlxd.daemon.pool import EnginePool

_NOT_READY = {
    EntryState.UNLOADED: "is not loaded",
    EntryState.LOADING: "is being loaded",
    EntryState.LOADED: "is about to be unloaded",
    EntryState.UNLOADING: "is being unloaded",
    EntryState.FAILED: "failed to load before",
}
FAILED_FOR_S = 30.0  # how long a failed load answers for the next request without being tried again


class Serving:
    """One task per request of the pool; the request's memory is back when its task is over."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._threads = DaemonThreads(2, "omlxd-tokenizer")
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(self, entry: EnginePoolEntry, generation: Generation, asked: Prompt, wish: Wish) -> None:
        """Take the request in; from now on its entry is in use."""
        entry.requests[generation.id] = generation
        task = asyncio.create_task(self._serve(entry, generation, asked, wish), name=f"omlxd-{generation.id}")
        self._tasks[generation.id] = task
        task.add_done_callback(lambda _: self._ended(entry, generation))

    def abort(self, generation: Generation, error: OmlxError) -> bool:
        """End it with this error now; False when it had ended."""
        if not self._fail(generation, error):
            return False
        if not self._pool.dispatch.remove(generation) and (task := self._tasks.get(generation.id)) is not None:
            task.cancel()  # it waits for its model; nothing of it is in the engine
        return True

    async def drain(self, generations: Iterable[Generation], timeout_s: float, reason: str) -> None:
        """Let these end by themselves; abort those that do not in time."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + timeout_s
        for generation in tuple(generations):
            await generation.wait_ended(max(0.0, ends_s - loop.time()))
            self.abort(generation, aborted(generation.model, reason))

    async def until_loaded(
        self, entry: EnginePoolEntry, *, request: str | None = None, on_progress: OnProgress | None = None
    ) -> None:
        """Wait until the entry takes this request; without a request, a failed load is tried again at once."""
        while not entry.takes(request):
            if entry.loaded or entry.state is EntryState.UNLOADING:
                await self._pool.change.wait()
                continue
            if entry.state is EntryState.FAILED and request is not None:
                await self._check_failed(entry)
            await self._pool.loads.join(entry, on_progress, request=request)
            if request is None:
                return  # it was loaded; that another load may want its memory already is no reason to load it again

    async def close(self) -> None:
        """End all with ShuttingDown, without waiting for the engine."""
        for generation in self._pool.generations:
            self._fail(generation, shutting_down())
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._threads.shutdown()

    async def _serve(self, entry: EnginePoolEntry, generation: Generation, asked: Prompt, wish: Wish) -> None:
        """The life of one request; it goes round again when its model was evicted before its first step."""
        pool = self._pool
        tokens: tuple[int, ...] | None = None
        told = False
        try:
            while not generation.ended:
                if tokens is None and (codec := pool.engine.codec(entry.name)) is not None:
                    encoded = await tokenize(self._threads, entry.name, asked, codec)
                    wish.check(codec.vocab_size)
                    tokens, generation.shared_tokens = encoded.tokens, encoded.shared_tokens
                    generation.prompt, generation.prompt_tokens = tokens, len(tokens)
                    tokens_left(entry.name, len(tokens), wish.max_tokens, codec.context_length)
                    pool.door.check(entry, len(tokens))
                if not entry.takes(generation.id) and not told:
                    told = True
                    self._tell_waiting(entry, generation)
                await self.until_loaded(entry, request=generation.id)
                if tokens is None or not entry.takes(generation.id):
                    continue  # the tokenizer is there now; or it was evicted between its load and now
                order = self._order(entry, generation, tokens, wish)
                if (admitted := await pool.door.admit(entry, generation.id, order)) is not None:
                    await pool.dispatch.run(entry, generation, admitted)
        except OmlxError as error:
            self._fail(generation, error)
        except Exception as unexpected:
            self._fail(generation, EngineFailed(f"the request to `{entry.name}` failed: {unexpected}"))

    def _order(
        self, entry: EnginePoolEntry, generation: Generation, tokens: tuple[int, ...], wish: Wish
    ) -> GenerationOrder:
        limits, weights_bytes = self._pool.limits, entry.weights_bytes or 0
        if 0 < limits.soft_bytes < weights_bytes:
            raise weights_alone(entry.name, weights_bytes, limits)
        codec = self._pool.engine.codec(entry.name)
        context_length = codec.context_length if codec is not None else entry.context_length
        max_tokens = tokens_left(entry.name, len(tokens), wish.max_tokens, context_length)
        return GenerationOrder(
            generation.id,
            entry.name,
            tokens,
            max_tokens,
            wish.sampling,
            wish.stop,
            shared_tokens=generation.shared_tokens,
            top_logprobs=wish.top_logprobs,
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
            self._pool.dispatch.tell_end(generation, error)
        return failed

    def _ended(self, entry: EnginePoolEntry, generation: Generation) -> None:
        """Its task is over and its memory is back; without an end of its own it was cancelled with its loop."""
        self._fail(generation, shutting_down())
        del entry.requests[generation.id], self._tasks[generation.id]
        entry.touch()
        self._pool.door.wake()  # its model may be idle now
        self._pool.notify()
