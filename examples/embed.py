"""Several models under a memory limit, inside your own asyncio program.

    python examples/embed.py MODEL_FOLDER MODEL_FOLDER ...

Streams a short answer from each model, then lowers the limit to what one of them needs: the least recently used ones
are unloaded, and the events say why.
"""

import argparse
import asyncio
from pathlib import Path

from omlxd import EnginePool, ProcessMemoryEnforcer
from omlxd.core.events import Event

GIB = 1024**3


def show(event: Event) -> None:
    """One line per event, but for the requests' own; `event.fields` has the numbers."""
    if event.request is None:
        print(f"  [{event.event}]", event.model or "", event.fields.get("reason") or "")


async def answer(pool: EnginePool, name: str, question: str) -> None:
    """Stream one answer; the model is loaded when it is asked for."""
    generation = pool.generate(name, messages=[{"role": "user", "content": question}], max_tokens=24)
    await generation.wait()
    print(f"{name}: ", end="")
    async for chunk in generation:
        print(chunk.text, end="", flush=True)
    print(f"\n  ({generation.generated_tokens} tokens, first after {generation.first_token_s:.2f} s)")


async def main(folders: list[Path], question: str) -> None:
    pool = EnginePool({folder.name: folder for folder in folders}, emit=show)
    enforcer = ProcessMemoryEnforcer(
        engine_pool=pool,
        max_bytes=8 * GIB,
        poll_interval=1.0,
        prefill_memory_guard=True,
    )
    async with pool:
        enforcer.start()
        for name in pool.entries:
            await answer(pool, name, question)

        largest = max(entry.weights_bytes or 0 for entry in pool.entries.values())
        enforcer.max_bytes = largest + largest // 8  # takes effect at once; no need to wait for the next poll
        print(f"limit: {enforcer.max_bytes:,} bytes, enough for the largest model alone")
        await enforcer.settle()
        for name, entry in pool.entries.items():
            print(f"  {name}: {entry.state.value}")
        await enforcer.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="several models under a memory limit in one asyncio program")
    parser.add_argument("folders", nargs="+", type=Path, metavar="MODEL_FOLDER")
    parser.add_argument("--question", default="Why is the sky blue?")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.folders, arguments.question))
