"""Whether the hard limit holds when everything happens at once, and what happens without the guard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.report import Judged, Row, Target, beside
from tests.bench.scratch import Scratch
from tests.bench.servers import our_daemon
from tests.bench.traffic import End, Outcome, drive
from tests.engine.estimate_families import FAMILIES

MB = 1_000_000
SOFT_BYTES = 24 * MB
HARD_BYTES = SOFT_BYTES + 20 * MB
LIMITS = (7 * MB, 12 * MB, 18 * MB, SOFT_BYTES)
NARROW_HEADS = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16}
PEER = "reference, no guard"
NEVER = Target(0.0, Judged.WORST)


@dataclass(frozen=True, slots=True)
class _Run:
    """One daemon's answer to the load, and what it says of itself afterwards."""

    outcome: Outcome
    memory: Mapping[str, Any]
    decisions: int


def run(scratch: Scratch) -> Iterator[Row]:
    """Three models of 1 to 8 MB, four clients with prompts of 16 to 8,192 tokens, and an operator who never rests.

    The clients ask the same of both daemons. `llama` takes up to 17 MB of KV cache for one prompt, and a step of 256
    tokens up to 72 MB in passing: neither the batches nor the steps fit as they come.
    """
    models = {
        "llama": scratch.family("llama", FAMILIES["llama"] | NARROW_HEADS | {"max_position_embeddings": 32768}),
        "experts": scratch.tiny("qwen3_moe", 2, layers=2),
        "window": scratch.tiny("gemma3_text", 1, layers=3),
    }
    ours = _drive(scratch, models)
    peer = _drive(scratch, models, policy="reference", prefill_memory_guard=False)

    def row(figure: str, unit: str, mine: float, theirs: float, target: Target | None = None, note: str = "") -> Row:
        return beside(figure, unit, [mine], PEER, [theirs], target, note)

    note = f"of {ours.memory['samples']} and {peer.memory['samples']} samples; hard is soft + 20 MB"
    over = [each.memory["over_hard_samples"] for each in (ours, peer)]
    excess = [each.memory["over_hard_bytes"] / MB for each in (ours, peer)]
    yield row("active + cache over the hard limit, every 10 ms", "samples", over[0], over[1], NEVER, note)
    yield row("  by how much at worst", "MB", excess[0], excess[1], NEVER)
    for end in End:
        counts = [each.outcome.ends[end] for each in (ours, peer)]
        failures = "; ".join(ours.outcome.failures[:3]) if end is End.FAILED else ""
        yield row(f"  requests {end}", "", counts[0], counts[1], NEVER if end is End.FAILED else None, failures)
    yield row("  decisions (models unloaded, requests made to yield)", "", ours.decisions, peer.decisions)
    yield row("  until all were answered", "s", ours.outcome.seconds, peer.outcome.seconds)


def _drive(scratch: Scratch, models: Mapping[str, Path], **settings: Any) -> _Run:
    limits = {"max_memory": SOFT_BYTES, "hard_limit": HARD_BYTES}
    with our_daemon(scratch.home("adversarial"), models, **limits, **settings) as daemon:
        outcome = drive(daemon, list(models), clients=4, requests=scratch.rounds(24, 5), limits=LIMITS)
        status = daemon.status()
        return _Run(outcome, status["memory"], status["enforcer"]["decisions"])
