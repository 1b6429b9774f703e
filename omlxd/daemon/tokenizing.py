"""Tokenizes prompts off the loop, on two threads of its own that nobody has to wait for at the end.

A tokenizer cannot be stopped once it runs: so no more than two run at a time, a request that has gone away before its
turn is skipped, and what cannot fit the context whatever its tokens are is refused without being tokenized.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from omlxd.core.errors import ContextExceeded
from omlxd.daemon.wish import Encoded, Prompt
from omlxd.engine.codec import TextCodec

T = TypeVar("T")
CHARACTERS_PER_TOKEN = 64
"""More than any text has on average: longer tokens are runs of blanks or dashes."""
LONG_CHARACTERS = 1_000_000
SHUTDOWN_S = 0.2


class DaemonThreads(Executor):
    """At most `count` threads that end with the process, whatever they are doing.

    The interpreter waits for the threads of a `ThreadPoolExecutor` when it exits: a long prompt would hold up the
    daemon's end after everything else is gone.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run the function in its turn; cancelling the future before then skips it."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        self._work.put(run)
        if not self._idle.acquire(blocking=False) and len(self._threads) < self._count:
            thread = threading.Thread(target=self._serve, name=f"{self._name}-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads that are idle; one that is busy is given a moment and ends with the process otherwise."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._work.put(None)
        for thread in threads if wait else ():
            thread.join(SHUTDOWN_S)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            self._idle.release()


async def tokenize(threads: Executor, model: str, asked: Prompt, codec: TextCodec) -> Encoded:
    """The prompt's tokens, made on one of `threads`.

    Raises:
        ContextExceeded: it has more characters than the context could hold; it was not tokenized.
        InvalidRequest: see `Prompt.encode`.
    """
    characters, context_length = asked.characters, codec.context_length
    if context_length is not None and characters > context_length * CHARACTERS_PER_TOKEN:
        raise ContextExceeded(
            f"the prompt has {characters} characters, more than the context of `{model}` ({context_length} tokens)"
            " can hold",
            hint="shorten the prompt",
            details={"prompt_characters": characters, "context_length": context_length, "param": asked.param},
        )
    return await asyncio.get_running_loop().run_in_executor(threads, _encode, asked, codec)


def _encode(asked: Prompt, codec: TextCodec) -> Encoded:
    encoded = asked.encode(codec)
    if asked.characters >= LONG_CHARACTERS:
        from omlxd.engine.glibc import trim_heap

        trim_heap()  # a tokenizer takes a hundred times the text, and glibc would keep it
    return encoded
