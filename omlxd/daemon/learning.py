"""What a model's requests take: by formula where its architecture is known, else measured from its first chunks."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from omlxd.core.costs import KvCosts, costs_of_config
from omlxd.core.events import Event, EventName
from omlxd.core.learned_costs import ChunkSample, LearnedCosts, learn
from omlxd.daemon.entry import EnginePoolEntry
from omlxd.daemon.model_files import ModelFiles
from omlxd.engine.events import Prefilled

if TYPE_CHECKING:
    from omlxd.daemon.pool import EnginePool

ENOUGH_SAMPLES = 4
LEAST_CHUNK_TOKENS = 16
NOISE = 0.02


def costs_of_files(files: ModelFiles, learned: LearnedCosts | None, backend: str | None) -> KvCosts:
    """The costs of the model in these files, on a backend that may not be known yet (the CPU is the dearest)."""
    return costs_of_config(files.config, files.element_bytes, learned, backend)


def learn_from(pool: EnginePool, entry: EnginePoolEntry, event: Prefilled, chunk_tokens: int) -> None:
    """Take a measured prefill step over, where no checked formula says what it costs."""
    if entry.files is None or event.kv_bytes <= 0 or (entry.costs.certain and entry.learned is None):
        return
    # A prompt's last token is left to the first decode step, and its last chunk is measured together with that step.
    left = 1 if event.done == event.total else 0
    if chunk_tokens - left < LEAST_CHUNK_TOKENS:
        return
    sample = ChunkSample(chunk_tokens - left, event.done - left, event.kv_bytes, event.transient_bytes)
    entry.samples.append(sample)
    if entry.learned is not None and len(entry.samples) < ENOUGH_SAMPLES:
        return  # what an earlier process has learned is worth more than a chunk or two
    learned = learn(entry.samples)
    if learned is None or (entry.learned is not None and not _differ(learned, entry.learned)):
        return
    entry.learned = learned
    entry.costs = pool.costs_of(entry.files, learned, pool.dispatch.backend)
    pool.ledger.recost(entry.name, entry.costs)
    pool.door.wake()
    pool.emit(Event(EventName.COSTS_LEARNED, model=entry.name, fields=asdict(learned)))


def _differ(new: LearnedCosts, old: LearnedCosts) -> bool:
    return any(abs(value - asdict(old)[key]) > NOISE * abs(value) for key, value in asdict(new).items())
