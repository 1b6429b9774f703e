"""Two models that take turns under a limit that holds one of them: first token, requests lost, and what stays."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from tests.bench.peers.asking import Reply
from tests.bench.peers.catalogue import Needs
from tests.bench.peers.contest import OURS, Contest, alone, contest
from tests.bench.peers.footprint import Sampler, at_rest
from tests.bench.peers.processes import Running
from tests.bench.peers.rows import rows
from tests.bench.peers.venvs import Unavailable
from tests.bench.report import Judged, Row, Target
from tests.bench.report import alone as of_one
from tests.bench.scratch import CHECKOUT, Scratch

SMALLER_MB, BIGGER_MB, WARM_MB = 100, 150, 1
LIMIT_BYTES: Final = 200_000_000
SWAPS_A_TURN: Final = 10
TURN_S: Final = 20.0
MAX_TOKENS: Final = 4
PROMPT_TOKENS: Final = 25  # of a question in the chat template of the benches' models
NEEDS: Final = Needs(several=True, limit_bytes=LIMIT_BYTES)
STAYS: Final = Target(1.15, Judged.WORST)
NONE: Final = Target(0.0, Judged.WORST)


@dataclass(slots=True)
class _Seen:
    """What one server did."""

    base_bytes: int
    peak_bytes: int = 0
    lost: list[Reply] = field(default_factory=list)
    asked: int = 0


def run(scratch: Scratch) -> Iterator[Row]:
    """50 swaps; each question is for the model that is not loaded, and a new one.

    The base is the footprint after a model of 1 MB has answered: so imports are in it, whoever does them when.
    """
    models = {"warm": scratch.llama(WARM_MB), "a": scratch.llama(SMALLER_MB), "b": scratch.llama(BIGGER_MB)}
    with contest(scratch, models, NEEDS, warm=["warm"]) as up:
        seen = {name: _Seen(at_rest(server.process)) for name, server in up.running.items()}
        turns = scratch.rounds(5, 1)
        found = up.turns(turns, lambda server, number: _swap(server, number, seen[server.name]))
        yield from _rows(up, seen, found, turns)
        # All servers stand still now.
        least_ms = [median(_mlx_alone(models["a"], models["b"])) for _ in found[OURS]]
    note = "let go, read, prompt, first token: the least that there is for who gives the memory back before it reads"
    yield of_one("  MLX alone, without a server", "ms", least_ms, note=note)


def _mlx_alone(*models: Path) -> list[float]:
    """Milliseconds of swaps without a server."""
    command = [sys.executable, "-m", "tests.bench.mlx_swap_child", *map(str, models), str(PROMPT_TOKENS)]
    done = subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True, text=True)
    return [float(line) for line in done.stdout.split()]


def _swap(server: Running, number: int, seen: _Seen) -> float:
    """Median milliseconds to the first token over ten swaps, or over as many as there is time for."""
    first_ms, deadline_s = [], time.monotonic() + TURN_S
    with Sampler(server.process) as sampler:
        for swap in range(SWAPS_A_TURN):
            reply = server.ask("ab"[swap % 2], f"{number}.{swap} hi", MAX_TOKENS)
            seen.asked += 1
            if reply.whole:
                first_ms.append(1000 * reply.first_token_s)
            else:
                seen.lost.append(reply)
                if not reply.status:
                    break  # it hangs, or it is gone
            if swap % 2 and time.monotonic() > deadline_s:
                break
    seen.peak_bytes = max(seen.peak_bytes, sampler.peak_bytes)
    if not first_ms:
        raise Unavailable(f"no whole answer in {SWAPS_A_TURN} swaps: {seen.lost[-1].trouble}")
    return median(first_ms)


def _above_base(server: Running, seen: _Seen) -> int:
    """Bytes above the base when it has had a moment to put its memory in order."""
    with alone(server):
        return at_rest(server.process) - seen.base_bytes


def _rows(up: Contest, seen: dict[str, _Seen], found: dict[str, list[float]], turns: int) -> Iterator[Row]:
    def soon(name: str) -> Target:
        return Target(0.75 if name == "mlx_lm.server" else 1.0, Judged.RATIO)

    yield from rows(up, NEEDS, "swap to first token", "ms", found, target=soon)
    bigger_bytes = BIGGER_MB * 1_000_000
    stays = {name: [_above_base(server, seen[name]) / bigger_bytes] for name, server in up.running.items()}
    swaps = (turns + 1) * SWAPS_A_TURN
    figure = f"memory after {swaps} swaps, of the bigger model"
    yield from rows(up, NEEDS, figure, "×", stays, target=STAYS, note=lambda name: f"{seen[name].asked} swaps")
    peaks = {name: [(seen[name].peak_bytes - seen[name].base_bytes) / bigger_bytes] for name in up.running}
    yield from rows(up, NEEDS, "  at its highest meanwhile", "×", peaks)
    lost = {name: [float(len(seen[name].lost))] for name in up.running}

    def why(name: str) -> str:
        return f"of {seen[name].asked}" + "".join(f"; {each.trouble}" for each in seen[name].lost[:1])

    yield from rows(up, NEEDS, "requests lost over the swaps", "", lost, target=NONE, note=why, counts=True)
