"""One generation as its caller sees it: an asynchronous stream of text that ends well, or with exactly one error."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from omlxd.core.errors import OmlxError
from omlxd.core.snapshot import Limits
from omlxd.core.states import FinishReason, RequestState, RequestView
from omlxd.daemon.measured import Measured
from omlxd.daemon.patience import Patience
from omlxd.daemon.told_logprobs import ToldLogprobs
from omlxd.engine.events import TokenLogprob

LEAST_TOKENS = 3  # fewer after the first, or in less time, and the speed is that of their delivery
LEAST_S = 0.05


@dataclass(frozen=True, slots=True)
class Chunk:
    """New text, and the number of tokens behind it (text may be empty: half a character, a possible stop).

    `logprobs` tells how likely the tokens were whose text is told with it, when that was asked for.
    """

    text: str
    tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Cut:
    """Why a request is parked or ends early and well, and the id of the decision behind it, if there was one."""

    why: str
    decision: str | None = None


Taker: TypeAlias = Callable[[Chunk], bool]
"""Is offered a chunk and says whether it took it."""


class Owner(Protocol):
    """Who runs a generation and can stop it (the pool)."""

    def abort(self, request_id: str, reason: str) -> bool: ...


class Generation:
    """One request in flight: iterate over it for its `Chunk`s; an error is raised once, from the iteration.

    Leaving early costs a step at most: `aclose()`, the end of an `async with` block and cancelling the task that waits
    for the next chunk all abort it. Use `wait` to look at it with a timeout without aborting it.

    Attributes:
        id: short and unique while the process lives.
        model: the entry's name.
        state: waiting, prefill, decode, parked, finished or aborted.
        prompt: its token ids, once they are known.
        order: its place among all requests of the pool, in the order they came.
        prompt_tokens, prefilled_tokens, generated_tokens: counts so far.
        generated: the tokens of the answer so far.
        parks: how often it was parked.
        waits_for: what it waits for at the door, or parked under limits that keep it out, in words; else None.
        parked_at_s: since when it is parked, on the pool's clock; None when it is not.
        ran_under: the highest limits while the engine had it.
        vain_parks, vain_s: how often and how long it was parked since its last token.
        cut_short: why it is to end with the text it has; None while it goes on.
        reused_tokens: how many of the prompt's tokens an earlier request had run.
        shared_tokens: how many of them are likely to begin other prompts too.
        finish_reason: set when it ended well.
        stop: the stop sequence that ended it, if one did.
        error: set when it did not.
        measured: what is measured of it, when its client has asked for that.
    """

    def __init__(self, request_id: str, model: str, owner: Owner, clock: Callable[[], float], order: int = 0) -> None:
        self.id = request_id
        self.order = order
        self.model = model
        self.state = RequestState.WAITING
        self.prompt: tuple[int, ...] = ()
        self.prompt_tokens = 0
        self.prefilled_tokens = 0
        self.generated: list[int] = []
        self.reused_tokens = 0
        self.shared_tokens = 0
        self.generated_tokens = 0
        self.parks = 0
        self.waits_for: str | None = None
        self.parked_at_s: float | None = None
        self.ran_under: Limits | None = None
        self.vain_parks = 0
        self.vain_s = 0.0
        self.cut_short: Cut | None = None
        self.finish_reason: FinishReason | None = None
        self.stop: str | None = None
        self.error: OmlxError | None = None
        self.measured: Measured | None = None
        self.stays = 0  # how often it was given to the engine
        self.started = False  # the engine has told something about it
        self.turn_told = False  # it was said that it waits for its turn in the engine
        self._owner = owner
        self._clock = clock
        self._started_s = clock()
        self.waits_since_s = self._started_s  # for its model, or for a place
        self.entered_s = self._started_s  # when the engine was given it last
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._first_tokens = 0
        self._paused_s = 0.0
        self._chunks: deque[Chunk] = deque()
        self._logprobs = ToldLogprobs()
        self._news = asyncio.Event()
        self._taker: Taker | None = None  # only while somebody waits
        self._patience = Patience(self._news.set)
        self._judged = asyncio.Event()
        self._error_told = False
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.state in (RequestState.FINISHED, RequestState.ABORTED)

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the request to its first token; None before it."""
        return None if self._first_s is None else self._first_s - self._started_s

    @property
    def age_s(self) -> float:
        """Seconds since it came."""
        return self._clock() - self._started_s

    @property
    def tokens_per_s(self) -> float | None:
        """Decode speed, without the first token's wait and without pauses; None while there is too little to tell."""
        later = self.generated_tokens - self._first_tokens
        if self._first_s is None or self._last_s is None or later < LEAST_TOKENS:
            return None
        decoded_s = self._last_s - self._first_s - self._paused_s
        return later / decoded_s if decoded_s >= LEAST_S else None

    def view(self, waits_for: str | None = None) -> RequestView:
        """The request as `status` shows it, and what it waits for in words."""
        return RequestView(
            id=self.id,
            model=self.model,
            state=self.state,
            prompt_tokens=self.prompt_tokens,
            prefilled_tokens=self.prefilled_tokens,
            generated_tokens=self.generated_tokens,
            age_s=self.age_s,
            parks=self.parks,
            waits_for=waits_for,
        )

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk; raises the request's error once, and then StopAsyncIteration."""
        try:
            await self._wait()
        except asyncio.CancelledError:
            self._owner.abort(self.id, "the caller went away")
            raise
        if (chunk := self.take()) is None:
            raise StopAsyncIteration
        return chunk

    def take(self) -> Chunk | None:
        """What `wait` has found: the next chunk, None at the end; raises the request's error, once."""
        if self._chunks:
            return self._chunks.popleft()
        if self.error is not None and not self._error_told:
            self._error_told = True
            raise self.error
        return None

    async def wait(self, timeout_s: float | None = None, taker: Taker | None = None) -> bool:
        """Wait until a chunk, the end or the error is there, at most `timeout_s`; True when it is. Aborts nothing.

        Args:
            timeout_s: seconds without a chunk; None for no end.
            taker: with a timeout, is offered each chunk as it comes, on the loop's thread. The wait is for what it
                leaves, and up to twice as long where it has taken some.
        """
        if timeout_s is None:
            await self._wait()
        elif not self._chunks and not self.ended:
            self._patience.begin(timeout_s)
            self._news.clear()
            self._taker = taker
            try:
                await self._news.wait()
            finally:
                self._taker = None
                self._patience.end()
        return bool(self._chunks) or self.ended

    async def wait_judged(self, timeout_s: float) -> bool:
        """Wait until its prompt is known to fit or it has ended, at most `timeout_s`; True when one of them is so."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._judged.wait()
        except TimeoutError:
            return False
        return True

    async def text(self) -> str:
        """The whole answer; raises the request's error."""
        return "".join([chunk.text async for chunk in self])

    async def aclose(self) -> None:
        """Abort it if it still runs; returns at once, its memory is back after the engine's next step."""
        self._owner.abort(self.id, "the caller went away")
        self._error_told = True
        self._chunks.clear()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def wait_ended(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing more will come, at most `timeout_s`; True when it ended."""
        done, _ = await asyncio.wait([self._ended], timeout=timeout_s)
        return bool(done)

    # What follows is for the pool, on the event loop's thread.

    def prompt_fits(self) -> None:
        """Its prompt is not one that has to be refused, whatever it waits for now."""
        self._judged.set()

    def runs_under(self, limits: Limits) -> None:
        """The engine has it, while these limits are in force."""
        self.entered_s = self._clock()
        if self.ran_under is None or self.ran_under.below(limits):
            self.ran_under = limits

    def prefilled(self, done: int, reused: int = 0) -> None:
        """`done` tokens have been run: of the prompt, and behind it of what was generated before it was parked.

        The first `reused` of them were run by an earlier request.
        """
        if not self.ended:
            self.prefilled_tokens = min(done, self.prompt_tokens)
            if not self.generated_tokens:
                self.reused_tokens = reused
            self.state = RequestState.PREFILL

    def push(
        self,
        text: str,
        tokens: int,
        token_ids: Sequence[int] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        held_characters: int = 0,
    ) -> None:
        """New text arrived; more of it may be held back."""
        if self.ended:
            return
        now_s, last_s = self._clock(), self._last_s
        if self.state is not RequestState.DECODE and last_s is not None:
            self._paused_s += now_s - last_s  # it was parked, and is back
        self._last_s = now_s
        if self._first_s is None:
            self._first_s, self._first_tokens = now_s, tokens
        self.state = RequestState.DECODE
        self.prefilled_tokens = self.prompt_tokens
        self.vain_parks, self.vain_s = 0, 0.0
        self.generated += token_ids
        self.generated_tokens += tokens
        if self.measured is not None:
            self.measured.generated(now_s - self._started_s, tokens)
        chunk = Chunk(text, tokens, self._logprobs.add(text, held_characters, logprobs))
        if self._taker is not None and not self._news.is_set() and self._taker(chunk):
            self._patience.go_on()
        else:
            self._chunks.append(chunk)
            self._news.set()

    def park(self) -> None:
        """Its memory is given back and its tokens are kept; it waits until they fit again."""
        self.state = RequestState.PARKED
        self.parked_at_s = self.waits_since_s = self._clock()
        self.prefilled_tokens = 0
        self.parks += 1
        self.vain_parks += 1

    def resume(self) -> float | None:
        """The engine has it again: the seconds it was parked; None when it was not."""
        since_s, self.parked_at_s = self.parked_at_s, None
        if since_s is None:
            return None
        parked_s = self._clock() - since_s
        self.vain_s += parked_s
        return parked_s

    def finish(self, reason: FinishReason) -> bool:
        """It ended well; False when it had ended before."""
        if self.ended:
            return False
        self.finish_reason = reason
        if logprobs := self._logprobs.finish(is_cut=self.stop is not None):
            self._chunks.append(Chunk("", 0, logprobs))
        self._end(RequestState.FINISHED)
        return True

    def fail(self, error: OmlxError) -> bool:
        """It ended with this error; False when it had ended before (R15: one end only)."""
        if self.ended:
            return False
        self.error = error
        self._end(RequestState.ABORTED)
        return True

    def _end(self, state: RequestState) -> None:
        self.state = state
        self._patience.close()
        self._news.set()
        self._judged.set()
        if not self._ended.done():
            self._ended.set_result(None)

    async def _wait(self) -> None:
        while not self._chunks and not self.ended:
            self._news.clear()
            await self._news.wait()
