"""One timed load in a fresh process: `python -m tests.bench.load_child sliced|at_once MODEL WARM`; prints JSON.

WARM is a tiny model that is loaded and dropped first, so that imports and first evaluations are not counted.
"""

from __future__ import annotations

import json
import queue
import sys
import time
from pathlib import Path


def sliced(model: Path, warm: Path) -> dict[str, float]:
    """As the daemon loads: through the engine's thread, slice by slice."""
    from omlxd.engine.events import EngineEvent, LoadDone, LoadEnded, LoadProgress
    from omlxd.engine.orders import LoadOrder, Plan
    from omlxd.engine.thread import EngineThread

    news: queue.SimpleQueue[tuple[float, EngineEvent]] = queue.SimpleQueue()
    engine = EngineThread()
    engine.start(lambda events: [news.put((time.perf_counter(), event)) for event in events])

    def load(number: int, folder: Path) -> dict[str, float]:
        began_s, opened_s = time.perf_counter(), 0.0
        engine.apply(Plan(resident=frozenset({folder.name}), load=LoadOrder(number, folder.name, str(folder))))
        while True:
            at_s, event = news.get(timeout=300)
            if isinstance(event, LoadEnded):
                raise event.error
            if isinstance(event, LoadProgress) and not opened_s:
                opened_s = at_s
            if isinstance(event, LoadDone):
                active_bytes = event.reading.active_bytes
                return {"load_s": at_s - began_s, "weights_s": at_s - opened_s, "active_bytes": active_bytes}

    load(1, warm)
    engine.apply(Plan(seen_seq=2**40))
    engine.rest().result(60)
    figures = load(2, model)
    figures["peak_bytes"] = engine.peak_bytes()
    engine.close()
    return figures


def at_once(model: Path, warm: Path) -> dict[str, float]:
    """As mlx-lm loads: lazily, then everything by one evaluation."""
    import mlx.core as mx
    from mlx_lm.utils import load_model, load_tokenizer

    def load(folder: Path) -> dict[str, float]:
        began_s = time.perf_counter()
        module, config = load_model(folder, lazy=True)
        load_tokenizer(folder, eos_token_ids=config.get("eos_token_id"))
        opened_s = time.perf_counter()
        mx.eval(module.parameters())
        done_s = time.perf_counter()
        active_bytes = mx.get_active_memory()
        return {"load_s": done_s - began_s, "weights_s": done_s - opened_s, "active_bytes": active_bytes}

    load(warm)
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    figures = load(model)
    figures["peak_bytes"] = mx.get_peak_memory()
    mx.clear_streams()
    return figures


if __name__ == "__main__":
    how, *folders = sys.argv[1:]
    print(json.dumps({"sliced": sliced, "at_once": at_once}[how](*map(Path, folders))))
