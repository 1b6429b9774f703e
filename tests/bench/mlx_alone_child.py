"""mlx-lm's own batch, without server, memory guard or streams: `python -m tests.bench.mlx_alone_child MODEL`.

For each line `{"prompts": [...], "max_tokens": N}` on stdin it answers all prompts in one call of `batch_generate`,
greedy, and prints the tokens per second, prefill included: what any server that uses it can come to at most.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

from omlxd.engine.glibc import tame_glibc
from omlxd.engine.mlxlm import end_thread, import_libraries


def main(folder: Path) -> None:
    """Answer until stdin ends."""
    tame_glibc()
    import_libraries()
    from mlx_lm import load
    from mlx_lm.generate import batch_generate

    model, tokenizer = load(str(folder))[:2]
    tokenizer.eos_token_ids = set()  # the tiny models of all benches never end by themselves
    for line in sys.stdin:
        asked = json.loads(line)
        chats = [[{"role": "user", "content": prompt}] for prompt in asked["prompts"]]
        prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
        began_s = time.perf_counter()
        done = batch_generate(model, tokenizer, prompts, max_tokens=asked["max_tokens"], return_token_ids=True)
        took_s = time.perf_counter() - began_s
        print(sum(map(len, done.token_ids)) / took_s, flush=True)
    end_thread()


if __name__ == "__main__":
    worker = threading.Thread(target=main, args=(Path(sys.argv[1]),))  # MLX on the main thread may hang at its end
    worker.start()
    worker.join()
    os._exit(0)  # OpenBLAS now and then waits for ever for its own thread when the libraries are unloaded
