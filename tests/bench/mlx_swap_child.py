"""A swap with mlx-lm alone, without server, streams or memory guard: `python -m tests.bench.mlx_swap_child A B TOKENS`.

Two models in turns, one in memory at a time: the last one is let go, the next one read, a prompt of so many tokens run,
and its first token chosen. Prints the milliseconds of each swap after the first two: what any server comes to at least
that gives the memory back before it reads.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from omlxd.engine import kv_caches, mlxlm
from omlxd.engine.decode_lanes import LoneDecode
from omlxd.engine.glibc import tame_glibc
from omlxd.engine.orders import Sampling
from omlxd.engine.sampling import make_sampler

SWAPS = 22


def main(folders: list[Path], tokens: int) -> None:
    """Swap and print."""
    import mlx.core as mx

    tame_glibc()
    mlxlm.import_libraries()
    sampler, prompt = make_sampler(Sampling()), [5 + at % 50 for at in range(tokens)]
    model, lane, cache = None, None, None
    for number in range(SWAPS):
        began_s = time.perf_counter()
        del model, lane, cache
        mlxlm.release_memory()
        model, _ = mlxlm.load_lazy(folders[number % 2])
        mx.eval(mlxlm.every_array(model))
        cache = kv_caches.make_cache(model)
        mlxlm.prefill_chunk(model, cache, prompt[:-1])
        lane = LoneDecode(model, cache, prompt[-1], sampler)
        lane.tell()
        if number > 1:
            print(1000 * (time.perf_counter() - began_s), flush=True)


if __name__ == "__main__":
    arguments = ([Path(each) for each in sys.argv[1:3]], int(sys.argv[3]))
    worker = threading.Thread(target=main, args=arguments)  # MLX on the main thread may hang at its end
    worker.start()
    worker.join()
    os._exit(0)  # OpenBLAS now and then waits for ever for its own thread when the libraries are unloaded
