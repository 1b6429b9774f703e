"""The list of benches, and how they are run one after the other."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench import (
    adversarial,
    answers,
    cap,
    cycles,
    decide,
    estimate,
    forms,
    hour,
    idle,
    latency,
    load,
    overhead,
    plan,
    prefix,
    react,
    refusals,
    scale,
    startup,
    status,
    swaps,
    throughput,
)
from tests.bench.peers import cap as peers_cap
from tests.bench.peers import enforcer, impatient, mix, names, streams
from tests.bench.peers import latency as peers_latency
from tests.bench.peers import swaps as peers_swaps
from tests.bench.report import Row
from tests.bench.scratch import Scratch


@dataclass(frozen=True, slots=True)
class Bench:
    """One file of this package; those of a folder in it have its name before theirs."""

    name: str
    what: str
    run: Callable[[Scratch], Iterator[Row]]


BENCHES = (
    Bench("throughput", "tokens/s and time to first token over HTTP, against mlx_lm.server", throughput.run),
    Bench("overhead", "what the server costs: streams over HTTP, against the engine without it", overhead.run),
    Bench("answers", "`/health` and `status` while a long prompt is prefilled and a model loads", answers.run),
    Bench("latency", "first token of a small resident model: idle, beside loads, beside a long prompt", latency.run),
    Bench("load", "loading in slices, against one evaluation of all weights", load.run),
    Bench("status", "`omlxd status --json` and the daemon's share of it, idle and busy", status.run),
    Bench("startup", "help, one Tab and a page of status, against an empty Python", startup.run),
    Bench("idle", "memory, processor time and threads of a daemon that nobody uses", idle.run),
    Bench("cycles", "what is left after ten times load, generate, unload", cycles.run),
    Bench("decide", "the enforcer's decision for up to 10,000 models", decide.run),
    Bench("scale", "what up to 1,000 models and waiting requests cost, and how that grows", scale.run),
    Bench("estimate", "what a model of 100 shards will take, from its headers", estimate.run),
    Bench("forms", "what holding answers to a schema costs, with a vocabulary of 49,152", forms.run),
    Bench("hour", "three models under a cap for one and a half, `graceful` beside `reference`", hour.run),
    Bench(
        "adversarial", "whether the hard limit holds when everything happens at once, against no guard", adversarial.run
    ),
    Bench("cap", "what a cap costs: throughput when all fits, time when a prompt barely does", cap.run),
    Bench("refusals", "random prompts under random caps: who is refused or admitted wrongly", refusals.run),
    Bench("prefix", "time to first token behind a repeated long system prompt, with and without the cache", prefix.run),
    Bench("swaps", "two models that do not fit together, in turns and without", swaps.run),
    Bench("plan", "`omlxd plan` for a real model, against what it then takes", plan.run),
    Bench("react", "from pressure to memory back: a lowered limit, a growing decode", react.run),
    Bench("peers-streams", "other servers: one stream and eight", streams.run),
    Bench("peers-swaps", "other servers: two models that take turns under a limit for one", peers_swaps.run),
    Bench("peers-mix", "other servers: three models in bursts under a limit for one and a half", mix.run),
    Bench("peers-cap", "other servers: a long prompt under a limit", peers_cap.run),
    Bench("peers-latency", "other servers: first tokens of a resident model beside loads", peers_latency.run),
    Bench("peers-names", "other servers: a name that is not there, and who asks next", names.run),
    Bench("peers-impatient", "other servers: clients that leave their prompts", impatient.run),
    Bench("peers-enforcer", "another enforcer: memory that grows 1 GB/s", enforcer.run),
)


def run(benches: Sequence[Bench], *, quick: bool, peers: Path) -> Iterator[tuple[Bench, Row]]:
    """Each row as soon as it is there; models and homes live in a directory that goes away at the end.

    Args:
        quick: few rounds.
        peers: where other servers are installed, once.
    """
    with tempfile.TemporaryDirectory(prefix="omlxd-bench-") as root:
        scratch = Scratch(Path(root), quick, peers)
        for bench in benches:
            for row in bench.run(scratch):
                yield bench, row
