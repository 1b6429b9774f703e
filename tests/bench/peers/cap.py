"""A long prompt under a limit: whether it is answered, and how far memory goes above the limit meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from omlxd.core.costs import costs_of_config
from omlxd.daemon.model_files import read_model_folder
from tests.bench.peers.asking import Reply
from tests.bench.peers.catalogue import Needs
from tests.bench.peers.contest import OURS, contest
from tests.bench.peers.footprint import Sampler, at_rest
from tests.bench.peers.processes import Running
from tests.bench.peers.rows import rows
from tests.bench.report import Judged, Row, Target
from tests.bench.scratch import Scratch

MIB: Final = 1024 * 1024
PROMPT_TOKENS: Final = 3000
ROOM_BYTES: Final = 32 * MIB
MODEL_MB, WARM_MB = 3, 1
MAX_TOKENS: Final = 8
HOLDS: Final = Target(1.0, Judged.WORST)
ALL: Final = Target(1.0, Judged.WORST, at_most=False)
AS_SOON: Final = Target(1.0, Judged.RATIO)


@dataclass(frozen=True, slots=True)
class _Seen:
    reply: Reply
    peak_bytes: int


def run(scratch: Scratch) -> Iterator[Row]:
    """Weights, the KV cache of the prompt and its answer, and 32 MiB: less than a step of 2,048 tokens takes.

    The base is the footprint after a model of 1 MB has answered: so imports are in it, whoever does them when.
    """
    models = {"warm": scratch.llama(WARM_MB), "chat": scratch.tiny("llama", MODEL_MB, layers=2)}
    files = read_model_folder(models["chat"])
    costs = costs_of_config(files.config, files.element_bytes, None, "cpu")
    limit_bytes = files.weights_bytes + costs.kv_bytes(PROMPT_TOKENS + 256) + ROOM_BYTES
    step_bytes = costs.prefill_transient_bytes(2048, PROMPT_TOKENS)
    needs = Needs(several=True, limit_bytes=limit_bytes)
    with contest(scratch, models, needs, warm=["warm"], settings={"hard_limit": limit_bytes}) as up:
        base_bytes = {name: at_rest(server.process) for name, server in up.running.items()}
        found = up.turns(scratch.rounds(3, 1), _ask)
    said = f"limit {limit_bytes / 1e6:.0f} MB; a step of 2,048 tokens would take {step_bytes / 1e6:.0f} MB"
    over = {name: [(each.peak_bytes - base_bytes[name]) / limit_bytes for each in seen] for name, seen in found.items()}
    figure = f"{PROMPT_TOKENS:,} tokens under a limit"
    yield from rows(up, needs, f"{figure}: peak, of the limit", "×", over, target=HOLDS, note=lambda name: said)
    whole = {name: [float(each.reply.whole) for each in seen] for name, seen in found.items()}

    def trouble(name: str) -> str:
        return next((each.reply.trouble for each in found[name] if each.reply.trouble), "")

    yield from rows(up, needs, "  answered", "", whole, target=ALL, note=trouble, counts=True)
    for name, seen in found.items():
        if name != OURS and not all(each.reply.whole for each in seen):
            up.absent[name] = f"refused: {trouble(name)}"
    took = {name: [each.reply.first_token_s for each in seen] for name, seen in found.items()}
    yield from rows(up, needs, "  first token", "s", took, target=AS_SOON)


def _ask(server: Running, number: int) -> _Seen:
    with Sampler(server.process) as sampler:
        reply = server.ask("chat", f"{number} " + "x" * PROMPT_TOKENS, MAX_TOKENS)
    return _Seen(reply, sampler.peak_bytes)
