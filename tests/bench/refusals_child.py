"""Random prompts under random caps, each run to its end or refused, and what the refused ones would have taken.

`python -m tests.bench.refusals_child FOLDER CASES SEED FAMILY...` prints JSON; folders of models are made in FOLDER.
A refused request is run again alone without a cap, in the smallest chunks, until it has grown into the block that is
reserved for it: so what is measured is the least that it could have been run with.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from omlxd import EnginePool, ProcessMemoryEnforcer
from omlxd.core.admission import CHUNKS
from omlxd.core.costs import BLOCK_TOKENS, KvCosts
from omlxd.core.errors import PrefillMemoryExceeded
from omlxd.core.ledger import reserved_tokens
from omlxd.core.limits import Machine
from omlxd.core.manifest import DaemonSettings
from omlxd.engine.thread import EngineThread
from tests.bench.family_folders import make_family
from tests.bench.peak import Peak
from tests.engine.estimate_families import FAMILIES

SHORTEST_TOKENS, LONGEST_TOKENS = 16, 1500
MACHINE = Machine(ram_bytes=2**36)
POLL_S = 3600.0


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt under one cap; bytes.

    Attributes:
        estimated_bytes: what the refusal said, 0 when it was admitted.
        peak_bytes: the highest `active` while it ran; of a refused one without a cap.
    """

    family: str
    prompt_tokens: int
    cap_bytes: int
    estimated_bytes: int
    peak_bytes: int


async def hunt(folders: Path, families: Sequence[str], cases: int, seed: int) -> list[Case]:
    """So many cases, in equal parts of each family."""
    random, found = Random(seed), list[Case]()
    for number, family in enumerate(families):
        engine = EngineThread()
        peak = Peak(engine.gauges)
        async with EnginePool({family: make_family(folders / str(number), FAMILIES[family])}, engine=engine) as pool:
            await pool.load(family)
            share = len(range(number, cases, len(families)))
            found += [await _try(pool, peak, family, random) for _ in range(share)]
    return found


async def _try(pool: EnginePool, peak: Peak, family: str, random: Random) -> Case:
    tokens = round(SHORTEST_TOKENS * (LONGEST_TOKENS / SHORTEST_TOKENS) ** random.random())
    entry = pool.resolve(family)
    least_bytes = _least_bytes(entry.costs, tokens)
    cap_bytes = (entry.weights_bytes or 0) + round(least_bytes * random.uniform(0.6, 1.6))
    prompt = [random.randrange(4, 256) for _ in range(tokens)]
    try:
        async with _under(pool, cap_bytes):
            _, peak_bytes = await peak.of(pool.generate(family, tokens=prompt, max_tokens=2).text())
            return Case(family, tokens, cap_bytes, 0, peak_bytes)
    except PrefillMemoryExceeded as refused:
        estimated_bytes = int(refused.details["estimated_bytes"])
    usual, pool.link.prefill_chunk_tokens = pool.link.prefill_chunk_tokens, CHUNKS[-1]
    grown = reserved_tokens(tokens) - BLOCK_TOKENS + 1
    async with _under(pool, None):
        whole = pool.generate(family, tokens=prompt, max_tokens=max(2, grown - tokens))
        _, peak_bytes = await peak.of(whole.text())
    pool.link.prefill_chunk_tokens = usual
    return Case(family, tokens, cap_bytes, estimated_bytes, peak_bytes)


@asynccontextmanager
async def _under(pool: EnginePool, cap_bytes: int | None) -> AsyncIterator[None]:
    """The guard with this as the soft and the hard limit; with None only the machine is one."""
    policy = DaemonSettings().policy
    enforcer = ProcessMemoryEnforcer(pool, cap_bytes or 0, POLL_S, hard_limit=cap_bytes, machine=MACHINE, policy=policy)
    enforcer.start()
    try:
        yield
    finally:
        await enforcer.stop()


def _least_bytes(costs: KvCosts, tokens: int) -> int:
    chunk = min(CHUNKS[-1], tokens)
    return costs.kv_bytes(reserved_tokens(tokens)) + costs.prefill_transient_bytes(chunk, tokens)


if __name__ == "__main__":
    folders, cases, seed, *families = sys.argv[1:]
    found = asyncio.run(hunt(Path(folders), families, int(cases), int(seed)))
    print(json.dumps([asdict(case) for case in found]))
