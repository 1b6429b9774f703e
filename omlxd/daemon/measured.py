"""What is measured of a request whose client wants to know: when each token came, and its memory as predicted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omlxd.core.costs import KvCosts
from omlxd.engine.events import Prefilled


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """One prefill step of one request; tokens and bytes, each figure beside what was predicted.

    Attributes:
        chunk_tokens: tokens of the step.
        context_tokens: tokens in the request's KV cache after it.
        kv_bytes: what that takes.
        transient_bytes: what the step held at its peak beyond what it left behind.
    """

    chunk_tokens: int
    context_tokens: int
    kv_bytes: int
    predicted_kv_bytes: int
    transient_bytes: int
    predicted_transient_bytes: int


@dataclass(slots=True)
class Measured:
    """Grows with its request; touched on the loop's thread only.

    Attributes:
        token_s: seconds from the request's arrival to each of its tokens.
        last: its last prefill step; None while there is none, and of short prompts that are run several at a time.
        largest: the step that held the most in passing.
        peak_bytes: how far memory rose while its prompt was run; also for others, if they ran meanwhile.
        predicted_peak_bytes: the most that its KV cache and a step together were predicted to take.
        model_kv_bytes: what the KV caches of all its model's requests took when it ended.
    """

    token_s: list[float] = field(default_factory=list)
    last: PrefillStep | None = None
    largest: PrefillStep | None = None
    peak_bytes: int = 0
    predicted_peak_bytes: int = 0
    model_kv_bytes: int = 0
    _live_bytes: int = 0

    def generated(self, after_s: float, tokens: int) -> None:
        """So many tokens came, this long after the request did."""
        self.token_s += [after_s] * tokens

    def prefilled(self, costs: KvCosts, event: Prefilled, run_tokens: int) -> None:
        """A prefill step of `run_tokens` has been run; a prompt's last token is left to the first decode step."""
        left = 1 if event.done == event.total else 0
        chunk_tokens, context_tokens = run_tokens - left, event.done - left
        if chunk_tokens <= 0 or event.kv_bytes <= 0:
            return
        step = PrefillStep(
            chunk_tokens=chunk_tokens,
            context_tokens=context_tokens,
            kv_bytes=event.kv_bytes,
            predicted_kv_bytes=costs.kv_bytes(context_tokens, 1, chunk_tokens),
            transient_bytes=event.transient_bytes,
            predicted_transient_bytes=costs.prefill_transient_bytes(chunk_tokens, context_tokens),
        )
        if self.last is None:
            self._live_bytes = event.live_bytes
        self.last = step
        if self.largest is None or step.transient_bytes > self.largest.transient_bytes:
            self.largest = step
        self.peak_bytes = max(self.peak_bytes, event.peak_bytes - self._live_bytes)
        predicted_bytes = step.predicted_kv_bytes + step.predicted_transient_bytes
        self.predicted_peak_bytes = max(self.predicted_peak_bytes, predicted_bytes)

    def to_json(self) -> dict[str, Any]:
        """As the last frame of a stream tells it; null where nothing was measured."""
        last, largest = self.last, self.largest
        kv = None if last is None else _figure(last.context_tokens, last.kv_bytes, last.predicted_kv_bytes)
        transient = peak = None
        if last is not None and largest is not None:
            transient = _figure(largest.context_tokens, largest.transient_bytes, largest.predicted_transient_bytes)
            transient["chunk_tokens"] = largest.chunk_tokens
            peak = _figure(last.context_tokens, self.peak_bytes, self.predicted_peak_bytes)
        return {
            "token_s": [round(each, 6) for each in self.token_s],
            "kv": kv,
            "transient": transient,
            "peak": peak,
            "model_kv_bytes": self.model_kv_bytes,
        }


def _figure(tokens: int, measured_bytes: int, predicted_bytes: int) -> dict[str, int]:
    return {"tokens": tokens, "bytes": measured_bytes, "predicted_bytes": predicted_bytes}
