"""The seam between the pool (event loop) and whatever runs models (one thread): a plan down, events up.

The loop never tells the engine what to *do*; it replaces the `Plan`, which says what should *be*: which models
are resident, which one is loading, which requests run, under which limits. Between any two steps the engine
compares the newest plan with what it has and closes the difference, so an order can be repeated but never lost,
and an abort is delivered once however often it is asked for:

- a request that is in the plan and unknown starts; one that is running and no longer in the plan ends, its KV cache
  is freed, and `RequestGone` says so; one that ended by itself is not started again while the plan still names it;
- a model that is loaded and not in `Plan.resident` ends its requests, is unloaded, and `Unloaded` says when its memory
  is back; naming a model that is not loaded in `resident` means nothing: only a `LoadOrder` loads;
- a load whose order is no longer in the plan stops at its next slice, gives its memory back, and ends in
  `LoadEnded(error=LoadCancelled)`; a load that completes stays resident even if the plan does not name it *yet*
  (the loop learns of it only with `LoadDone`): it is unloaded only once a plan made after `LoadDone` leaves it out
  (`Plan.seen_seq`).

What may not be assumed: that events arrive one by one (they come in batches, in order), that a plan is ever seen (a
newer one may replace it first), or that the engine is at rest when `read` is called.

This module imports neither MLX nor mlx-lm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from omlxd.core.histogram import Histogram
from omlxd.core.memory import MemoryReading
from omlxd.engine.codec import TextCodec
from omlxd.engine.events import Post
from omlxd.engine.orders import LoadOrder, Plan


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the sampler has seen since the start, inside steps too.

    Attributes:
        samples: how often it looked.
        over_hard_samples: how often `active + cache` lay above the hard limit then.
        over_hard_bytes: by how much, at worst.
    """

    samples: int = 0
    over_hard_samples: int = 0
    over_hard_bytes: int = 0


class Engine(Protocol):
    """Runs models on one thread of its own, from the newest plan.

    `start` comes first and once; nothing heavy is imported before the first plan that loads something. `apply`, `read`,
    `rest` and `codec` may be called from the loop's thread at any time between `start` and `close`.
    """

    def start(self, post: Post) -> None:
        """Start the thread; `post` receives its events."""
        ...

    def apply(self, plan: Plan) -> None:
        """Replace the plan and wake the engine; never blocks."""
        ...

    def read(self) -> MemoryReading:
        """A reading now, cheap (microseconds), perhaps in the middle of a step (`at_rest` tells)."""
        ...

    def rest(self) -> Future[MemoryReading]:
        """A reading between two steps with nothing in flight; it waits for the step that runs.

        It is answered after the plan that was newest when it was asked for has been followed, and what following it
        caused is posted before the answer to the next `rest`: two in a row tell that a plan has had its effects.
        """
        ...

    def kv_bytes(self) -> Mapping[str, int]:
        """KV cache bytes of each resident model, as of the last step."""
        ...

    def prefix_bytes(self) -> Mapping[str, int]:
        """Bytes in the prefix cache of each resident model that keeps one, as of the last step."""
        ...

    def peak_bytes(self) -> int:
        """The highest `active` that the 100 Hz sampler saw."""
        ...

    def sampled(self) -> Sampled:
        """What was seen of `active + cache` while there was work."""
        ...

    def step_times(self) -> Histogram:
        """How long steps took, in seconds; it goes on counting."""
        ...

    def codec(self, model: str) -> TextCodec | None:
        """The tokenizer of a model, else None: from its load's first `LoadProgress`, or `read_codec`, on.

        It stays while the model is loaded, and of those that are not loaded the ones used last stay.
        """
        ...

    def read_codec(self, order: LoadOrder) -> TextCodec:
        """Read the tokenizer of a model folder without the model; blocks, for up to seconds, so call it in a thread.

        Raises LoadFailed.
        """
        ...

    def forget_codec(self, model: str) -> None:
        """Drop the tokenizer that is kept for a model which is not loaded: its next load is of another folder."""
        ...

    def device_cap(self) -> tuple[int, str] | None:
        """Bytes the device allows and what says so (`metal`, `cuda`), None when nothing does (CPU)."""
        ...

    def stalled_s(self) -> float:
        """Seconds since the last finished step while there is work; 0.0 when idle."""
        ...

    def stack(self) -> Sequence[str]:
        """Where the engine's thread is right now, innermost last: `file:line function`; empty when it does not run."""
        ...

    def close(self, timeout_s: float = 10.0) -> bool:
        """End all work, give the memory back and end the thread; True when it ended in time. Idempotent."""
        ...
