"""The result of a benchmark: what was measured, with what, and its JSON form."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Self

from omlxd.cli.bench_disturbances import Meanwhile, summary
from omlxd.cli.bench_figures import Memory, Speed
from omlxd.core.states import SCHEMA

if TYPE_CHECKING:
    from omlxd.cli.bench_session import Session


@dataclass(frozen=True, slots=True)
class Load:
    """One load: seconds, bytes of weights, and how many of them came from the disk (None where nobody counts).

    `measured_now` is False of a model that was loaded before the benchmark: then it is its last load.
    """

    load_s: float
    weights_bytes: int
    disk_bytes: int | None
    measured_now: bool

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes of weights a second; None of a load too short to tell."""
        return self.weights_bytes / self.load_s if self.load_s > 0 else None

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "load_s": self.load_s,
            "weights_bytes": self.weights_bytes,
            "bytes_per_s": self.bytes_per_s,
            "disk_bytes": self.disk_bytes,
            "measured_now": self.measured_now,
        }


@dataclass(slots=True)
class Report:
    """What a benchmark has found so far."""

    model: str
    version: str
    prompt_tokens: int
    generate_tokens: int
    rounds: int
    weights: Memory
    load: Load | None
    backend: str | None = None
    speeds: list[Speed] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    _beside: list[Meanwhile] = field(default_factory=list)

    @classmethod
    def begin(
        cls, session: Session, daemon_version: str, prompt_tokens: int, generate_tokens: int, rounds: int
    ) -> Self:
        """Of a model that is loaded."""
        view = session.view
        predicted_bytes = session.plan(None, 1)["weights_bytes"]
        weights = Memory("weights", predicted_bytes, view["weights_bytes"])
        load = None
        if view["load_s"] is not None:
            load = Load(view["load_s"], view["weights_bytes"], view["load_disk_bytes"], session.loaded_now)
        lengths = (prompt_tokens, generate_tokens, rounds)
        return cls(view["name"], daemon_version, *lengths, weights, load, memory=[weights])

    @property
    def disturbances(self) -> list[str]:
        """What else went on, in words, each once."""
        return summary([*(each.meanwhile for speed in self.speeds for each in speed.rounds), *self._beside])

    def beside(self, meanwhile: Meanwhile) -> None:
        """What else went on while memory was measured."""
        self._beside.append(meanwhile)

    def to_json(self) -> dict[str, Any]:
        """The schema of `bench --json`: integer bytes, seconds as floats, null where nothing is known."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "version": self.version,
            "backend": self.backend,
            "machine": machine(),
            "prompt_tokens": self.prompt_tokens,
            "generate_tokens": self.generate_tokens,
            "load": None if self.load is None else self.load.to_json(),
            "speed": [speed.to_json() for speed in self.speeds],
            "memory": [each.to_json() for each in self.memory],
            "disturbances": self.disturbances,
        }


def machine() -> dict[str, Any]:
    """What the figures depend on beside the model: the system, its processors, and the versions of MLX."""
    return {
        "system": platform.system(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "mlx": _version("mlx"),
        "mlx_lm": _version("mlx-lm"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
