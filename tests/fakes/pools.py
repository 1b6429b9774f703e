"""Pools over the fake engine, with invented model folders."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omlxd.core.costs import NO_COSTS
from omlxd.core.errors import LoadFailed
from omlxd.core.events import Event, EventName
from omlxd.core.limits import Machine
from omlxd.core.manifest import ModelSettings
from omlxd.core.states import RequestState
from omlxd.daemon.enforcer import ProcessMemoryEnforcer
from omlxd.daemon.model_files import ModelFiles
from omlxd.daemon.pool import EnginePool
from omlxd.daemon.request import Generation
from omlxd.engine.orders import MIB
from tests.fakes.engine import GIB, FakeEngine

BIG_MACHINE = Machine(ram_bytes=64 * GIB)


class FakeFolders:
    """Reads a model's size from `sizes` (MiB by the folder's name); one that is not there has no folder."""

    def __init__(self, sizes: Mapping[str, float]) -> None:
        self.sizes = dict(sizes)
        self.reads: list[str] = []

    def __call__(self, settings: ModelSettings) -> ModelFiles:
        self.reads.append(settings.name)
        path = Path(settings.path or settings.name)
        if path.name not in self.sizes:
            raise LoadFailed(f"`{path}` does not exist", details={"kind": "missing_folder"})
        weights_bytes = int(self.sizes[path.name] * MIB)
        return ModelFiles(path, {}, weights_bytes, "llama", 4096, 1000, str(self.fingerprint(settings)), 10)

    def fingerprint(self, settings: ModelSettings) -> str | None:
        """Changes with the size."""
        return f"files-{self.sizes.get(Path(settings.path or settings.name).name)}"


class Scene:
    """A pool with its fake engine and enforcer on the running loop's time, and what they told."""

    def __init__(self, sizes: Mapping[str, float], *, pinned: tuple[str, ...] = (), **options: Any) -> None:
        engine_options = {key: options.pop(key) for key in _ENGINE_OPTIONS & options.keys()}
        self.engine = FakeEngine(options.pop("drive", "loop"), **engine_options)
        costs = options.pop("costs", NO_COSTS)
        self.events: list[Event] = []
        self.on_event: Callable[[Event], None] = _ignore
        self.folders = FakeFolders(sizes)
        clock = asyncio.get_running_loop().time
        names = (*sizes, *options.pop("without_folder", ()))
        self.pool = EnginePool(
            {name: ModelSettings(name=name, path=f"/models/{name}", pin=name in pinned) for name in names},
            engine=self.engine,
            clock=clock,
            emit=self._hear,
            read_folder=self.folders,
            fingerprint=self.folders.fingerprint,
            costs_of=lambda files, learned, backend: costs,
            **options,
        )
        self.clock = clock

    def enforcer(self, max_mib: float, hard_mib: float | None = None, **options: Any) -> ProcessMemoryEnforcer:
        """An enforcer of this pool; limits in MiB."""
        hard_limit = None if hard_mib is None else int(hard_mib * MIB)
        options = {"machine": BIG_MACHINE, "clock": self.clock, **options}
        return ProcessMemoryEnforcer(self.pool, int(max_mib * MIB), hard_limit=hard_limit, **options)

    def _hear(self, event: Event) -> None:
        self.events.append(event)
        self.on_event(event)

    def named(self, *names: EventName) -> list[Event]:
        """The events of these names, in order."""
        return [event for event in self.events if event.event in names]

    @property
    def states(self) -> dict[str, str]:
        """The state of every model."""
        return {name: entry.state.value for name, entry in self.pool.entries.items()}


def _ignore(event: Event) -> None:
    """Nobody listens."""


_ENGINE_OPTIONS = {
    "step_s",
    "kv_bytes_per_token",
    "slice_bytes",
    "answer_tokens",
    "context_length",
    "vocab_size",
    "device_cap",
}


async def until_decoding(generation: Generation) -> None:
    """Wait for the first token."""
    assert await generation.wait(100.0)
    assert generation.state is RequestState.DECODE, generation.error


async def until(condition: Callable[[], bool], at_most_s: float = 100.0) -> None:
    """Let time pass until the condition holds."""
    for _ in range(int(at_most_s / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never happened")


async def turns(count: int = 5) -> None:
    """Let the loop run what is ready."""
    for _ in range(count):
        await asyncio.sleep(0)
