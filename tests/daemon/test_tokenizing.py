"""Tokenizing off the loop: bounded, skipped for who has gone, refused for what cannot fit, and never waited for."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from omlxd.core.errors import ContextExceeded
from omlxd.daemon.tokenizing import CHARACTERS_PER_TOKEN, DaemonThreads, tokenize
from omlxd.daemon.wish import Prompt


class Codec:
    """One token a character; remembers whether it was asked."""

    vocab_size = 1000
    context_length: int | None = 100

    def __init__(self) -> None:
        self.asked = 0

    def encode_text(self, text: str) -> list[int]:
        self.asked += 1
        return [1] * len(text)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.encode_text("".join(message["content"] for message in messages))


@pytest.fixture
def threads() -> Iterator[DaemonThreads]:
    threads = DaemonThreads(2, "test-tokenizer")
    yield threads
    threads.shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test-tokenizer")]


async def test_a_prompt_is_tokenized_on_another_thread_that_ends_when_it_is_told_to(threads: DaemonThreads) -> None:
    assert (await tokenize(threads, "chat", Prompt(text="hello"), Codec())).tokens == (1,) * 5


async def test_what_cannot_fit_the_context_is_refused_without_being_tokenized(threads: DaemonThreads) -> None:
    codec = Codec()
    fits, too_long = "x" * (100 * CHARACTERS_PER_TOKEN), "x" * (100 * CHARACTERS_PER_TOKEN + 1)
    assert len((await tokenize(threads, "chat", Prompt(text=fits), codec)).tokens) == len(fits)
    for prompt in (Prompt(text=too_long), Prompt(messages=({"role": "user", "content": too_long},))):
        with pytest.raises(ContextExceeded, match="characters"):
            await tokenize(threads, "chat", prompt, codec)
    assert codec.asked == 1


def test_no_more_threads_run_than_allowed_and_all_work_is_done() -> None:
    threads, gate, running, most = DaemonThreads(2, "test"), threading.Event(), [], []
    lock = threading.Lock()

    def work(at: int) -> int:
        with lock:
            running.append(at)
            most.append(len(running))
        gate.wait(10)
        with lock:
            running.remove(at)
        return at

    futures = [threads.submit(work, at) for at in range(6)]
    gate.set()
    assert [future.result(10) for future in futures] == list(range(6))
    assert max(most) <= 2


def test_work_that_was_given_up_before_its_turn_is_skipped() -> None:
    threads, gate, done = DaemonThreads(1, "test"), threading.Event(), []
    first = threads.submit(gate.wait, 10)
    gone = threads.submit(done.append, "gone")
    stays = threads.submit(done.append, "stays")
    assert gone.cancel()
    gate.set()
    stays.result(10)
    assert first.result(10)
    assert done == ["stays"]


def test_a_process_does_not_wait_for_a_tokenizer_that_still_runs() -> None:
    program = (
        "import asyncio, threading\n"
        "from omlxd.daemon.tokenizing import DaemonThreads\n"
        "threads = DaemonThreads(2, 'test')\n"
        "started = threading.Event()\n"
        "def forever():\n"
        "    started.set()\n"
        "    threading.Event().wait()\n"
        "async def main():\n"
        "    asyncio.get_running_loop().run_in_executor(threads, forever)\n"
        "    await asyncio.to_thread(started.wait)\n"
        "    threads.shutdown()\n"
        "asyncio.run(main())\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
