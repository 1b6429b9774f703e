"""What `bench` works out of the tokens' times and the daemon's measurements: speeds, and memory beside predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from omlxd.cli.bench_disturbances import Meanwhile

NOTHING_ELSE: Final = Meanwhile()
LEAST_TOKENS: Final = 3  # of each stream, while all of them decode: fewer, or in less time, say nothing about a speed
LEAST_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Stream:
    """One answer: tokens, seconds from the request to each token of the answer, and what the daemon has measured."""

    prompt_tokens: int
    token_s: tuple[float, ...]
    measured: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Round:
    """Answers that were asked for at the same moment, and what else went on meanwhile."""

    streams: tuple[Stream, ...]
    meanwhile: Meanwhile = NOTHING_ELSE

    @property
    def first_token_s(self) -> float:
        """Seconds to the first token: of several streams the median."""
        return median(stream.token_s[0] for stream in self.streams)

    @property
    def prefill_tokens_per_s(self) -> float:
        """All prompts' tokens over the time until each stream had its first token."""
        return sum(stream.prompt_tokens for stream in self.streams) / self._all_decode_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens of all streams together while each of them decoded; None when that was too short to tell."""
        began_s, ended_s = self._all_decode_s, min(stream.token_s[-1] for stream in self.streams)
        counts = [sum(began_s < each <= ended_s for each in stream.token_s) for stream in self.streams]
        if min(counts) < LEAST_TOKENS or ended_s - began_s < LEAST_S:
            return None
        return sum(counts) / (ended_s - began_s)

    @property
    def gap_p99_s(self) -> float | None:
        """Of the times between two tokens of a stream, after all had begun, the 99th percentile; None without any."""
        began_s = self._all_decode_s
        gaps: list[float] = []
        for stream in self.streams:
            pairs = zip(stream.token_s, stream.token_s[1:], strict=False)
            gaps += [later_s - earlier_s for earlier_s, later_s in pairs if earlier_s >= began_s]
        return sorted(gaps)[min(len(gaps) - 1, len(gaps) * 99 // 100)] if gaps else None

    @property
    def _all_decode_s(self) -> float:
        """When the last prompt had been run."""
        return max(stream.token_s[0] for stream in self.streams)

    def to_json(self) -> dict[str, Any]:
        """Its figures."""
        other = {"disturbances": list(self.meanwhile.told), "other_programs_cores": self.meanwhile.cores}
        return {name: of(self) for name, of in FIGURES.items()} | other


FIGURES: Final[Mapping[str, Callable[[Round], float | None]]] = {
    "prefill_tokens_per_s": lambda each: each.prefill_tokens_per_s,
    "first_token_s": lambda each: each.first_token_s,
    "decode_tokens_per_s": lambda each: each.decode_tokens_per_s,
    "gap_p99_s": lambda each: each.gap_p99_s,
}


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of a figure over the rounds, and its range."""

    median: float
    least: float
    most: float

    def to_json(self) -> dict[str, float]:
        """Three numbers."""
        return {"median": self.median, "min": self.least, "max": self.most}


def spread(values: Sequence[float | None]) -> Spread | None:
    """Of the values there are; None when there is none."""
    known = [value for value in values if value is not None]
    return Spread(median(known), min(known), max(known)) if known else None


@dataclass(frozen=True, slots=True)
class Speed:
    """So many streams at the same time, measured in several rounds."""

    streams: int
    rounds: tuple[Round, ...]

    def of(self, figure: str) -> Spread | None:
        """One of `FIGURES` over the rounds."""
        return spread([FIGURES[figure](each) for each in self.rounds])

    def to_json(self) -> dict[str, Any]:
        """Medians and ranges, and each round's figures."""
        found = {figure: self.of(figure) for figure in FIGURES}
        told = {figure: None if each is None else each.to_json() for figure, each in found.items()}
        return {"streams": self.streams, **told, "rounds": [each.to_json() for each in self.rounds]}


@dataclass(frozen=True, slots=True)
class Memory:
    """One thing that takes memory: bytes as predicted and as measured.

    Attributes:
        what: `weights`, `prompt_kv`, `step`, `peak` or `kv`.
        tokens: tokens of a stream that the figure was measured at; None for the weights.
        streams: how many decoded at the same time.
        chunk_tokens: tokens of the step, where it is one.
        reserved_bytes: what is reserved for it, so that it can grow and be copied; None where that is the prediction.
    """

    what: str
    predicted_bytes: int
    measured_bytes: int
    tokens: int | None = None
    streams: int = 1
    chunk_tokens: int | None = None
    reserved_bytes: int | None = None

    @property
    def error(self) -> float | None:
        """By what part of the measured figure the prediction is too large, negative when too small."""
        return self.predicted_bytes / self.measured_bytes - 1 if self.measured_bytes else None

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "what": self.what,
            "tokens": self.tokens,
            "streams": self.streams,
            "chunk_tokens": self.chunk_tokens,
            "predicted_bytes": self.predicted_bytes,
            "measured_bytes": self.measured_bytes,
            "reserved_bytes": self.reserved_bytes,
            "error": self.error,
        }


def prompt_memory(stream: Stream, weights: Memory) -> list[Memory]:
    """What running one prompt took: its KV cache, its largest step, and all at the worst moment; empty if unknown."""
    kv, step, peak = (stream.measured.get(key) for key in ("kv", "transient", "peak"))
    if not (kv and step and peak):
        return []
    return [
        Memory("prompt_kv", kv["predicted_bytes"], kv["bytes"], kv["tokens"]),
        Memory("step", step["predicted_bytes"], step["bytes"], step["tokens"], chunk_tokens=step["chunk_tokens"]),
        Memory(
            "peak",
            weights.predicted_bytes + peak["predicted_bytes"],
            weights.measured_bytes + peak["bytes"],
            peak["tokens"],
        ),
    ]


def decode_memory(round_: Round, plan: Mapping[str, Any]) -> list[Memory]:
    """The KV caches of all streams when the first of them ended, beside the daemon's plan; empty if unknown."""
    first = min(round_.streams, key=lambda stream: stream.token_s[-1])
    measured_bytes = first.measured.get("model_kv_bytes")
    if not measured_bytes or any(stream.token_s[0] > first.token_s[-1] for stream in round_.streams):
        return []  # not all of them were there then
    tokens = first.prompt_tokens + len(first.token_s)
    predicted_bytes = plan["kv_bytes"]
    reserved_bytes = predicted_bytes + plan["growth_bytes"]
    return [Memory("kv", predicted_bytes, measured_bytes, tokens, len(round_.streams), reserved_bytes=reserved_bytes)]
