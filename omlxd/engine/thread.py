"""The thread that owns MLX: it runs the newest plan step by step and reports what happened.

A step is one decode step of one model, one prefill chunk, one slice of a load, or one unload, and is never interrupted.
Between two steps the thread closes the difference between the plan and what it has, answers who asked for a reading at
rest, keeps `active + cache` under the hard limit, and stands still while it is over the soft limit until the loop has
decided. With nothing to do for a while it gives MLX's freed buffers back. It runs by itself: a hop to the loop per step
would cost a third of the speed when the loop is busy.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

from omlxd.core.histogram import Histogram
from omlxd.core.memory import MemoryReading
from omlxd.engine import mlxlm
from omlxd.engine.backends import Backend, detect_backend
from omlxd.engine.codec import TextCodec
from omlxd.engine.codec_reading import read_codec
from omlxd.engine.events import OverLimit, Post
from omlxd.engine.executor import PlanExecutor
from omlxd.engine.gauges import Gauges
from omlxd.engine.memory_sampler import MemorySampler
from omlxd.engine.orders import LoadOrder, Plan
from omlxd.engine.protocol import Sampled

KEEPS_CACHE_S = 30.0
"""How long an engine that has nothing to do keeps MLX's freed buffers, for a client that reads and asks again."""
STEP_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class EngineThread:
    """Implements `protocol.Engine` with MLX.

    Args:
        backend: where MLX runs; found out when None.
        clock: monotonic seconds.

    Raises:
        StartFailed: MLX is installed without a backend.

    Attributes:
        gauges: memory readings; only `read` and `rest` are meant for decisions.
        sampler: what was seen inside steps.
    """

    def __init__(self, backend: Backend | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.gauges = Gauges(backend or detect_backend(), clock)
        self.sampler = MemorySampler(self.gauges)
        self._executor = PlanExecutor(self.gauges, clock)
        self._clock = clock
        self._wake = threading.Condition()
        self._plan = Plan()
        self._seen_plan: Plan | None = None
        self._stumbled_plan: Plan | None = None
        self._rest_asked: list[Future[MemoryReading]] = []
        self._closing = False
        self._post: Post | None = None
        self._thread = threading.Thread(target=self._run, name="omlxd-mlx", daemon=True)
        self._progress_at: float | None = None
        self._idle_since_s = clock()
        self._step_times = Histogram(STEP_BOUNDS_S)

    # --- called on the loop's thread

    def start(self, post: Post) -> None:
        """Start the thread; `post` receives its events."""
        self._post = post
        self.sampler.start()
        self._thread.start()
        _close_at_exit(self)

    def apply(self, plan: Plan) -> None:
        """Replace the plan and wake the thread."""
        with self._wake:
            self._plan = plan
            self._wake.notify()

    def read(self) -> MemoryReading:
        """A reading now; at rest only when the thread has nothing to do."""
        return self.gauges.read(at_rest=self._progress_at is None)

    def rest(self) -> Future[MemoryReading]:
        """A reading between two steps; at once when the engine is closed."""
        asked: Future[MemoryReading] = Future()
        with self._wake:
            if self._closing or not self._thread.is_alive():
                asked.set_result(self.gauges.read(at_rest=True))
                return asked
            self._rest_asked.append(asked)
            self._wake.notify()
        return asked

    def kv_bytes(self) -> Mapping[str, int]:
        """KV cache bytes by model, at most 0.1 s old."""
        return self._executor.kv_bytes

    def prefix_bytes(self) -> Mapping[str, int]:
        """Bytes in the prefix cache of each resident model."""
        return self._executor.prefixes.by_model

    def peak_bytes(self) -> int:
        """The highest `active` the sampler saw, inside steps too."""
        return self.sampler.peak_active_bytes

    def sampled(self) -> Sampled:
        """What the sampler has seen of `active + cache`."""
        return self.sampler.sampled

    def step_times(self) -> Histogram:
        """How long steps took, in seconds."""
        return self._step_times

    def codec(self, model: str) -> TextCodec | None:
        """The tokenizer of a model whose load has opened its files, or that was asked for it, at least once."""
        return self._executor.codecs.of_model(model)

    def read_codec(self, order: LoadOrder) -> TextCodec:
        """The tokenizer of a model folder without the model; on any thread, never the loop's."""
        return read_codec(order, self._executor.codecs, self.gauges)

    def forget_codec(self, model: str) -> None:
        """Drop the tokenizer kept for a model; the next load, or `read_codec`, brings another one."""
        self._executor.codecs.forget(model)

    def device_cap(self) -> tuple[int, str] | None:
        """Bytes the device allows; on an accelerator this imports MLX's core (20 ms)."""
        return self.gauges.backend.device_cap()

    def stalled_s(self) -> float:
        """Seconds since the last finished step while there is work."""
        since = self._progress_at
        return 0.0 if since is None else max(0.0, self._clock() - since)

    def stack(self) -> tuple[str, ...]:
        """Where the thread is right now, innermost last."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return ()
        frames = reversed(traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False))
        return tuple(f"{'/'.join(Path(each.filename).parts[-2:])}:{each.lineno} {each.name}" for each in frames)

    def close(self, timeout_s: float = 10.0) -> bool:
        """End the thread; True when it ended in time."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        self.sampler.stop()
        return not self._thread.is_alive()

    # --- the thread itself

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    self._round()
                except Exception as error:  # a bug of ours must not end the daemon's models in silence
                    self._executor.fail_everything(error)
                    self._follow_again()
                self._flush()
        finally:
            self._tear_down()

    def _round(self) -> None:
        self._follow()
        self._answer_rest()
        if not self._executor.has_work:
            self._idle()
            return
        if self._progress_at is None:
            self._progress_at = self._clock()
            self.sampler.work(True)
        began_s, waits = self._clock(), True
        for _ in self._executor.steps():
            waits = False
            self._progress_at = self._clock()
            self._step_times.add(self._progress_at - began_s)
            self._executor.keep_under_hard()
            self._executor.measure_kv()
            self._flush()
            self._sample_overhead()
            if self._stand_still_when_over() or self._closing:
                return
            began_s = self._clock()
        if waits:
            self._wait(self._executor.waits_s)

    def _follow(self) -> None:
        plan = self._plan
        if plan is not self._seen_plan:
            self._seen_plan = plan
            self.sampler.hard_bytes = plan.limits.hard_bytes
            self._executor.follow(plan)
            self._executor.keep_under_hard()  # an idle engine takes no step after which it would be looked at

    def _follow_again(self) -> None:
        """What it stumbled over, or something behind it in the plan, may still have to be done: try once more."""
        if self._seen_plan is not self._stumbled_plan:
            self._stumbled_plan, self._seen_plan = self._seen_plan, None

    def _idle(self) -> None:
        if self._progress_at is not None:
            self._idle_since_s, self._progress_at = self._clock(), None
        self.sampler.work(False)
        self._executor.measure_kv(now=True)
        keeps_s = self._idle_since_s + KEEPS_CACHE_S - self._clock()
        if keeps_s <= 0.0:
            self._executor.give_back()
        self._wait(keeps_s if keeps_s > 0.0 else None)

    def _wait(self, most_s: float | None) -> None:
        """Until there is news for it, or no longer than that."""
        self._flush()
        with self._wake:
            self._wake.wait_for(self._called, most_s)

    def _called(self) -> bool:
        return self._closing or self._plan is not self._seen_plan or bool(self._rest_asked)

    def _sample_overhead(self) -> None:
        """The overhead is seen while there is work too, though nobody asks for a reading at rest then."""
        if self.gauges.sample_due:
            mlxlm.synchronize()
            self.gauges.read(at_rest=True)

    def _stand_still_when_over(self) -> bool:
        """Over the soft limit, at rest: report and follow plans until one acknowledges it; True when it did so."""
        limit = self._plan.limits.pause_above_bytes
        if not limit or self.gauges.active_bytes() <= limit:
            return False
        mlxlm.synchronize()
        if self.gauges.active_bytes() <= limit:
            return False
        over = self._executor.report.tell(OverLimit, self.gauges.read(at_rest=True))
        while not self._closing and self._plan.seen_seq < over.seq:
            self._flush()
            with self._wake:
                self._wake.wait_for(self._called)
            self._follow()
            self._answer_rest()
        return True

    def _answer_rest(self) -> None:
        if not self._rest_asked:
            return
        with self._wake:
            asked, self._rest_asked = self._rest_asked, []
        if self._executor.started:
            mlxlm.synchronize()
        reading = self.gauges.read(at_rest=True)
        for future in asked:
            if future.set_running_or_notify_cancel():
                future.set_result(reading)

    def _flush(self) -> None:
        if self._executor.report.events and self._post:
            self._post(self._executor.report.take())

    def _tear_down(self) -> None:
        self._executor.close()
        self._flush()
        self._progress_at = None
        self._answer_rest()
        if self._executor.started:
            mlxlm.end_thread()


def _close_at_exit(engine: EngineThread) -> None:
    """End the thread before the interpreter goes, also when the user's program forgot to (else SIGABRT)."""
    alive = weakref.ref(engine)

    def close() -> None:
        if (still := alive()) is not None:
            still.close(5.0)

    atexit.register(close)
