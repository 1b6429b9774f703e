"""An hour's worth of trouble in a minute: three models under a cap for one and a half, eight clients, a limit that
moves, a model with a time to live; `graceful` beside `reference`, with the same clients asking the same questions."""

from __future__ import annotations

import http.client
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.crowd import Crowd, Habits
from tests.bench.report import Judged, Row, Spread, Target, alone
from tests.bench.scratch import Scratch
from tests.bench.servers import RunningDaemon, our_daemon

MEGABYTES = 5
MODELS = ("often", "sometimes", "seldom")
TTL = {"seldom": "3s"}
HARD_ABOVE_SOFT = 20 * 1024 * 1024
MOVES = (1.5, 2.5, 1.4, 1.5)  # the soft limit over the run, in models
POLICIES = ("graceful", "reference")


@dataclass(frozen=True, slots=True)
class Hour:
    """What one policy made of it."""

    crowd: Crowd
    took_s: float
    events: Counter[str]
    decisions: Counter[str]
    memory: dict[str, Any]
    unexplained: int

    def lost(self) -> int:
        """Questions of clients that stayed and did not get a whole answer."""
        counts = self.crowd.counts()
        return sum(counts.values()) - counts["whole"] - counts["vanished"]


def run(scratch: Scratch) -> Iterator[Row]:
    """The same seed for both; the clients' timing differs with the answers'."""
    hours = {policy: live_through(scratch, policy) for policy in POLICIES}
    graceful, reference = hours["graceful"], hours["reference"]
    yield _beside("questions of clients that stayed, lost", graceful.lost(), reference.lost(), at_most=0)
    yield _beside("  answered whole", graceful.crowd.counts()["whole"], reference.crowd.counts()["whole"])
    yield _beside("  of clients that went away", *(hour.crowd.counts()["vanished"] for hour in hours.values()))
    for name, event in (("parked", "request_parked"), ("aborted", "request_aborted"), ("loads", "load_finished")):
        yield _beside(name, graceful.events[event], reference.events[event])
    for action in sorted(graceful.decisions | reference.decisions):
        yield _beside(f"decisions: {action}", graceful.decisions[action], reference.decisions[action])
    yield _beside("decisions without a reason", graceful.unexplained, reference.unexplained, at_most=0)
    over = [hour.memory["over_hard_samples"] for hour in hours.values()]
    yield _beside("10 ms samples over the hard limit", *over, at_most=0)
    yield _beside("wall time, s", graceful.took_s, reference.took_s)
    waits = [outcome.first_s for outcome in graceful.crowd.outcomes if outcome.first_s is not None]
    others = [outcome.first_s for outcome in reference.crowd.outcomes if outcome.first_s is not None]
    yield Row("first token", "s", Spread.of(waits), "reference", Spread.of(others))
    yield alone("clients with an error, by code", "", [graceful.lost()], note=_codes(hours))


def live_through(scratch: Scratch, policy: str) -> Hour:
    """Run the script under one policy."""
    models = {name: scratch.llama(MEGABYTES + rank) for rank, name in enumerate(MODELS)}
    weights = max(sum(file.stat().st_size for file in path.glob("*.safetensors")) for path in models.values())
    settings = {
        "policy": policy,
        "max_memory": int(MOVES[0] * weights),
        "hard_limit": int(max(MOVES) * weights) + HARD_ABOVE_SOFT,
        "load_timeout": "5m",
    }
    habits = Habits(MODELS, asks=scratch.rounds(12, 6))
    home = scratch.home(f"hour-{policy}")
    with our_daemon(home, models, ttl=TTL, **settings) as daemon:
        began_s = time.monotonic()
        crowd = Crowd(habits, lambda: http.client.HTTPConnection(*daemon.api, timeout=300)).start()
        _move_the_limit(daemon, crowd, weights, habits)
        crowd.join()
        took_s = time.monotonic() - began_s
        memory = daemon.status()["memory"]
    return _read(home, crowd, took_s, memory)


def _move_the_limit(daemon: RunningDaemon, crowd: Crowd, weights: int, habits: Habits) -> None:
    """At each quarter of the questions the limit moves on; downwards as soon as two models answer at once."""
    all_asks, before = habits.clients * habits.asks, MOVES[0]
    for part, models in enumerate(MOVES[1:], 1):
        _until(crowd, lambda part=part: len(crowd.outcomes) >= all_asks * part // len(MOVES))
        if models < before:
            _until(crowd, lambda: sum(model["running"] > 0 for model in daemon.status()["models"]) > 1)
        daemon.limit(int(models * weights))
        before = models


def _until(crowd: Crowd, reached: Callable[[], bool]) -> None:
    while crowd.busy and not reached():
        time.sleep(0.02)


def _read(home: Path, crowd: Crowd, took_s: float, memory: dict[str, Any]) -> Hour:
    logs = sorted((home / "logs").glob("omlxd.jsonl*"))
    records = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    decisions = [record for record in records if record["event"] == "decision"]
    return Hour(
        crowd,
        took_s,
        Counter(record["event"] for record in records if not _went_away(record)),
        Counter(f"{decision['trigger']}: {decision['action']}" for decision in decisions),
        memory,
        sum(not decision["reason"] for decision in decisions),
    )


def _went_away(record: dict[str, Any]) -> bool:
    """Whether it is the end of a request that nobody waited for any more."""
    return record["event"] == "request_aborted" and "went away" in record["error"]["message"]


def _beside(figure: str, ours: float, theirs: float, *, at_most: float | None = None) -> Row:
    target = None if at_most is None else Target(at_most, Judged.WORST)
    return Row(figure, "", Spread.of([ours]), "reference", Spread.of([theirs]), target=target)


def _codes(hours: dict[str, Hour]) -> str:
    parts = []
    for policy, hour in hours.items():
        counts = hour.crowd.counts()
        codes = ", ".join(f"{kind} {n}" for kind, n in sorted(counts.items()) if kind not in ("whole", "vanished"))
        parts.append(f"{policy}: {codes or 'none'}")
    return "; ".join(parts)
