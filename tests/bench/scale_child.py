"""Steps of an engine that has many models and many requests: `python -m tests.bench.scale_child MODEL`.

For each line `{"loaded": N, "waiting": M, "tokens": T}` on stdin it loads the folder under N names, lets one request
decode T tokens while M others wait for a place that they do not get, and prints `{"step_ms": ...}`: the milliseconds a
token, of the quickest tenth of them.
"""

from __future__ import annotations

import json
import queue
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omlxd.engine.events import EngineEvent, Generated, LoadDone, LoadEnded, RequestFailed
from omlxd.engine.orders import GenerationOrder, LoadOrder, Plan, Sampling
from omlxd.engine.thread import EngineThread

TIMEOUT_S = 120.0
PROMPT = tuple(range(1, 17))


class _Crowded:
    """An engine thread, the models it has, and the queue of its events."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._news: queue.SimpleQueue[EngineEvent] = queue.SimpleQueue()
        self.engine = EngineThread()
        self.engine.start(self._take)
        self._seen_seq = 0
        self._resident: list[str] = []
        self._numbers = 0

    def measure(self, loaded: int, waiting: int, tokens: int) -> float:
        """Milliseconds a token of the one that runs."""
        while len(self._resident) < loaded:
            self._load(f"model-{len(self._resident)}")
        runs = self._order(tokens)
        requests = {each.request: each for each in (runs, *(self._order(tokens) for _ in range(waiting)))}
        self._apply(requests=requests, max_batch=1)
        took_s, last_s = [], 0.0
        while len(took_s) < tokens - 1:
            event, now_s = self._next(), time.perf_counter()
            if isinstance(event, RequestFailed):
                raise event.error
            if isinstance(event, Generated):
                took_s += [now_s - last_s] if last_s else []
                last_s = now_s
        self._apply(max_batch=1)
        took_s.sort()
        return 1000 * took_s[len(took_s) // 10]

    def _load(self, name: str) -> None:
        self._numbers += 1
        self._resident.append(name)
        self._apply(load=LoadOrder(self._numbers, name, str(self._folder)), max_batch=1)
        while not isinstance(event := self._next(), LoadDone):
            if isinstance(event, LoadEnded):
                raise event.error

    def _order(self, tokens: int) -> GenerationOrder:
        self._numbers += 1
        return GenerationOrder(f"r{self._numbers}", "model-0", PROMPT, tokens, Sampling(temperature=0.0), ())

    def _take(self, events: Sequence[EngineEvent]) -> None:
        for event in events:
            self._news.put(event)

    def _next(self) -> EngineEvent:
        event = self._news.get(timeout=TIMEOUT_S)
        self._seen_seq = event.seq
        return event

    def _apply(self, **changes: Any) -> None:
        self.engine.apply(Plan(resident=frozenset(self._resident), seen_seq=self._seen_seq, **changes))


if __name__ == "__main__":
    crowded = _Crowded(Path(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps({"step_ms": crowded.measure(**json.loads(line))}), flush=True)
    crowded.engine.close()
