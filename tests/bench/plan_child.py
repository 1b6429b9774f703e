"""What a model really takes at some contexts: `python -m tests.bench.plan_child FOLDER CONTEXT...` prints JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from omlxd import EnginePool
from omlxd.engine.thread import EngineThread
from tests.bench.peak import Peak

ANSWER_TOKENS = 4
NAME = "model"


@dataclass(frozen=True, slots=True)
class Taken:
    """Measured bytes of one prompt with its answer, `context_tokens` together.

    Attributes:
        weights_bytes: active memory after the load.
        kv_bytes: its KV cache while it decodes.
        peak_bytes: the highest that active memory was.
        footprint_bytes: what the system charges the process beyond what it did before the load.
    """

    context_tokens: int
    weights_bytes: int
    kv_bytes: int
    peak_bytes: int
    footprint_bytes: int


async def measure(folder: Path, contexts: Sequence[int]) -> list[Taken]:
    """One request after the other, alone."""
    engine = EngineThread()
    peak, found = Peak(engine.gauges), list[Taken]()
    async with EnginePool({NAME: folder}, engine=engine) as pool:
        await pool.load(NAME)
        rest = await pool.read_rest()
        assert rest is not None
        for context in contexts:
            tokens = [7 + position % 200 for position in range(context - ANSWER_TOKENS)]
            kv_bytes, peak_bytes = await peak.of(_kv_bytes(pool, tokens))
            reading = engine.read()
            footprint_bytes = reading.footprint_bytes - reading.base_bytes
            found.append(Taken(context, rest.active_bytes, kv_bytes, peak_bytes, footprint_bytes))
    return found


async def _kv_bytes(pool: EnginePool, tokens: Sequence[int]) -> int:
    """Its KV cache at its largest."""
    largest = 0
    async for _ in pool.generate(NAME, tokens=tokens, max_tokens=ANSWER_TOKENS):
        await pool.read_rest()
        largest = max(largest, pool.engine.kv_bytes()[NAME])
    return largest


if __name__ == "__main__":
    folder, *contexts = sys.argv[1:]
    print(json.dumps([asdict(each) for each in asyncio.run(measure(Path(folder), [int(each) for each in contexts]))]))
