"""Drives a real engine from a test: plans down, events up, everything with a deadline."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from omlxd.core.states import FinishReason
from omlxd.engine.events import (
    EngineEvent,
    Finished,
    Generated,
    LoadDone,
    LoadEnded,
    RequestFailed,
    RequestGone,
    Unloaded,
)
from omlxd.engine.orders import GenerationOrder, LoadOrder, Plan, Sampling
from omlxd.engine.thread import EngineThread

E = TypeVar("E", bound=EngineEvent)
DEADLINE_S = 60.0


class Driver:
    """An engine thread with the loop's side of the seam played by the test."""

    def __init__(self, engine: EngineThread | None = None) -> None:
        self.engine = engine or EngineThread()
        self.plan = Plan()
        self.seen: list[EngineEvent] = []
        self._queue: queue.SimpleQueue[EngineEvent] = queue.SimpleQueue()
        self._orders = 0
        self.engine.start(lambda events: [self._queue.put(event) for event in events])

    def apply(self, **changes: Any) -> None:
        """Change the plan; `seen_seq` follows what the test has seen."""
        seen_seq = self.seen[-1].seq if self.seen else 0
        self.plan = replace(self.plan, **{"seen_seq": seen_seq, **changes})
        self.engine.apply(self.plan)

    def next(self) -> EngineEvent:
        event = self._queue.get(timeout=DEADLINE_S)
        self.seen.append(event)
        return event

    def until(self, kind: type[E], wanted: Callable[[E], bool] = lambda _: True) -> E:
        """The next event of this kind that is wanted."""
        while True:
            event = self.next()
            if isinstance(event, kind) and wanted(event):
                return event

    def order(self, model: str, path: Path | str, **more: Any) -> LoadOrder:
        self._orders += 1
        return LoadOrder(self._orders, model, str(path), **more)

    def load(self, model: str, path: Path | str, **more: Any) -> LoadDone | LoadEnded:
        """Load and keep; how it ended."""
        order = self.order(model, path, **more)
        self.apply(load=order, resident=self.plan.resident | {model})
        while not isinstance(event := self.next(), LoadDone | LoadEnded):
            pass
        resident = self.plan.resident if isinstance(event, LoadDone) else self.plan.resident - {model}
        self.apply(load=None, resident=resident)
        return event

    def unload(self, model: str) -> Unloaded:
        kept = {name: order for name, order in self.plan.requests.items() if order.model != model}
        self.apply(resident=self.plan.resident - {model}, requests=kept)
        return self.until(Unloaded)

    def start(self, *orders: GenerationOrder) -> None:
        self.apply(requests={**self.plan.requests, **{order.request: order for order in orders}})

    def drop(self, *requests: str) -> None:
        self.apply(requests={name: o for name, o in self.plan.requests.items() if name not in requests})

    def run(self, *orders: GenerationOrder) -> dict[str, tuple[str, FinishReason | Exception]]:
        """Run requests to their ends: text and how each ended."""
        self.start(*orders)
        return self.collect({order.request for order in orders})

    def collect(self, names: set[str]) -> dict[str, tuple[str, FinishReason | Exception]]:
        texts: dict[str, str] = dict.fromkeys(names, "")
        ends: dict[str, FinishReason | Exception] = {}
        while ends.keys() != names:
            event = self.next()
            if isinstance(event, Generated) and event.request in names:
                texts[event.request] += event.text
            elif isinstance(event, Finished | RequestFailed | RequestGone) and event.request in names:
                assert event.request not in ends, "a request ended twice"
                ends[event.request] = (
                    event.reason
                    if isinstance(event, Finished)
                    else event.error
                    if isinstance(event, RequestFailed)
                    else KeyError(event.request)
                )
        self.drop(*names)
        return {name: (texts[name], ends[name]) for name in names}


def generation(
    request: str, model: str, prompt: Sequence[int], max_tokens: int = 32, stop: tuple[str, ...] = (), **sampling: Any
) -> GenerationOrder:
    return GenerationOrder(request, model, tuple(prompt), max_tokens, Sampling(**sampling), stop)


def on_mlx_thread(function: Callable[[], Any]) -> Any:
    """Run MLX work of the test itself on a thread that ends cleanly.

    MLX's compile cache is per thread; one left on the main thread is destroyed after the interpreter and crashes it.
    """
    box: dict[str, Any] = {}

    def work() -> None:
        import mlx.core as mx

        try:
            box["result"] = function()
        except BaseException as error:
            box["error"] = error
        finally:
            mx.clear_streams()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if "error" in box:
        raise box["error"]
    return box["result"]


def reference(
    path: Path, prompts: Mapping[str, Sequence[int]], max_tokens: int
) -> dict[str, tuple[list[int], list[float]]]:
    """mlx-lm's own greedy tokens for each prompt alone, and the margin of each choice in logits."""

    def work() -> dict[str, tuple[list[int], list[float]]]:
        import mlx.core as mx
        from mlx_lm.generate import generate_step
        from mlx_lm.utils import load_model

        model, _ = load_model(path)
        results = {}
        for name, prompt in prompts.items():
            tokens, margins = [], []
            for token, logprobs in generate_step(mx.array(list(prompt)), model, max_tokens=max_tokens):
                top = mx.sort(logprobs)[-2:]
                tokens.append(int(token))
                margins.append(float((top[1] - top[0]).item()))
            results[name] = (tokens, margins)
        return results

    return on_mlx_thread(work)
