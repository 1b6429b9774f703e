"""The engine without pool, event loop and HTTP: `python -m tests.bench.overhead_child MODEL`.

For each line `{"prompts": [...], "max_tokens": N}` on stdin it runs all prompts at once, greedy, and prints a line with
`tokens_per_s` (from the order to the last token, prefill included, as a client over HTTP sees it) and `texts`.

With a `port` it connects to it for each prompt first, and the engine's thread itself writes a frame to that connection
for each token: what any server has to do at least.
"""

from __future__ import annotations

import json
import queue
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omlxd.core.group_budget import SIZES
from omlxd.engine.events import EngineEvent, Finished, Generated, LoadDone, LoadEnded, RequestFailed
from omlxd.engine.orders import GenerationOrder, LoadOrder, Plan, Sampling
from omlxd.engine.thread import EngineThread

MODEL = "chat"
TIMEOUT_S = 300.0
FRAME = b"d" * 240
"""As long as the frame of a token is."""


class _Bare:
    """An engine thread and the queue of its events."""

    def __init__(self, folder: Path) -> None:
        self._news: queue.SimpleQueue[tuple[float, EngineEvent]] = queue.SimpleQueue()
        self.engine = EngineThread()
        self.engine.start(self._take)
        self._seen_seq = 0
        self._number = 0
        self._sockets: dict[str, socket.socket] = {}
        self._apply(load=LoadOrder(1, MODEL, str(folder)))
        while not isinstance(event := self._next()[1], LoadDone):
            if isinstance(event, LoadEnded):
                raise event.error

    def run(self, prompts: Sequence[str], max_tokens: int, port: int | None = None) -> dict[str, Any]:
        """Run them all at once, to their ends."""
        connections = [socket.create_connection(("127.0.0.1", port)) for _ in prompts if port]
        codec = self.engine.codec(MODEL)
        assert codec is not None
        began_s = last_s = time.perf_counter()
        orders = {}
        for prompt in prompts:
            self._number += 1
            tokens = tuple(codec.encode_chat([{"role": "user", "content": prompt}]))
            name = f"r{self._number}"
            orders[name] = GenerationOrder(name, MODEL, tokens, max_tokens, Sampling(temperature=0.0), ())
        self._sockets = dict(zip(orders, connections, strict=False))
        self._apply(requests=orders, group_tokens={MODEL: SIZES[0]})  # as the pool lets it where memory is free
        texts, running = dict.fromkeys(orders, ""), set(orders)
        while running:
            at_s, event = self._next()
            if isinstance(event, RequestFailed):
                raise event.error
            if isinstance(event, Generated):
                texts[event.request] += event.text
                last_s = at_s
            elif isinstance(event, Finished):
                running.discard(event.request)
        self._apply()
        for connection in connections:
            connection.close()
        return {"tokens_per_s": len(prompts) * max_tokens / (last_s - began_s), "texts": list(texts.values())}

    def _take(self, events: Sequence[EngineEvent]) -> None:
        at_s = time.perf_counter()
        for event in events:
            if isinstance(event, Generated) and event.request in self._sockets:
                self._sockets[event.request].sendall(FRAME)
            self._news.put((at_s, event))

    def _next(self) -> tuple[float, EngineEvent]:
        at_s, event = self._news.get(timeout=TIMEOUT_S)
        self._seen_seq = event.seq
        return at_s, event

    def _apply(self, **changes: Any) -> None:
        self.engine.apply(Plan(resident=frozenset({MODEL}), seen_seq=self._seen_seq, **changes))


if __name__ == "__main__":
    bare = _Bare(Path(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps(bare.run(**json.loads(line))), flush=True)
    bare.engine.close()
