"""Work that goes on beside what is measured."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def again_and_again(*works: Callable[[], object]) -> Iterator[list[list[None]]]:
    """Do each without a pause, on a thread of its own, until the block ends; what fails there fails the bench.

    Yields a list for each work, with one entry for each time that it was done.
    """
    over, failures = threading.Event(), list[BaseException]()
    done: list[list[None]] = [[] for _ in works]

    def repeat(work: Callable[[], object], times: list[None]) -> None:
        try:
            while not over.is_set():
                work()
                times.append(None)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=repeat, args=each) for each in zip(works, done, strict=True)]
    for thread in threads:
        thread.start()
    try:
        yield done
    finally:
        over.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
