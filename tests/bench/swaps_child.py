"""Closed-loop clients of two models that do not fit together, inside the process: swaps, waits and latencies.

`python -m tests.bench.swaps_child MODEL MODEL CLIENTS REQUESTS FAIR_WAIT_S` prints JSON; `none` as the last one for a
pool that swaps whenever a model is idle.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from omlxd import EnginePool, ProcessMemoryEnforcer
from omlxd.core.errors import OmlxError
from omlxd.core.events import Event, EventName

ANSWER_TOKENS = 8
PROMPT = "Hi"
THINK_S = 0.01  # a client beyond a socket is not back in the same instant


def main(models: list[str], clients: int, requests: int, fair_wait_s: float | None) -> dict[str, Any]:
    """What the clients saw, `requests` of them in all."""
    return asyncio.run(_play([Path(each) for each in models], clients, requests, fair_wait_s))


async def _play(models: list[Path], clients: int, requests: int, fair_wait_s: float | None) -> dict[str, Any]:
    loads: list[float] = []

    def hear(event: Event) -> None:
        if event.event is EventName.LOAD_FINISHED:
            loads.append(event.fields["load_s"])

    largest_bytes = max(each.stat().st_size for model in models for each in model.glob("*.safetensors"))
    pool = EnginePool(
        {f"m{number}": model for number, model in enumerate(models)},
        emit=hear,
        fair_wait_s=fair_wait_s,
        load_wait_s=60.0,
    )
    enforcer = ProcessMemoryEnforcer(pool, int(1.6 * largest_bytes))
    async with pool:
        enforcer.start()
        for name in pool.entries:  # mlx-lm is imported, each tokenizer read, each load time known
            await pool.load(name)
        loads.clear()
        begun_s = time.perf_counter()
        shares = [requests // clients + (number < requests % clients) for number in range(clients)]
        asked = [_client(pool, f"m{number % len(models)}", share) for number, share in enumerate(shares)]
        answers = [answer for each in await asyncio.gather(*asked) for answer in each]
        took_s = time.perf_counter() - begun_s
        await enforcer.stop()
    return {
        "took_s": took_s,
        "swaps": len(loads),
        "load_s": loads,
        "failed": sum(answer is None for answer in answers),
        "waits_s": [answer[0] for answer in answers if answer],
        "latencies_s": [answer[1] for answer in answers if answer],
    }


async def _client(pool: EnginePool, model: str, requests: int) -> list[tuple[float, float] | None]:
    """Asks again as soon as it has its answer: seconds to the first token and to the end, None where it failed."""
    answers: list[tuple[float, float] | None] = []
    for _ in range(requests):
        begun_s = time.perf_counter()
        generation = pool.generate(model, prompt=PROMPT, max_tokens=ANSWER_TOKENS)
        try:
            await generation.text()
        except OmlxError:
            answers.append(None)
        else:
            answers.append((generation.first_token_s or 0.0, time.perf_counter() - begun_s))
        await asyncio.sleep(THINK_S)
    return answers


if __name__ == "__main__":
    fair_wait = None if sys.argv[5] == "none" else float(sys.argv[5])
    print(json.dumps(main(sys.argv[1:3], int(sys.argv[3]), int(sys.argv[4]), fair_wait)))
