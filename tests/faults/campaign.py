"""What the faults share: folders of models, one daemon that lives through them, and its base to come back to."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from omlxd.cli.log_lines import Log
from tests.acceptance.harness import MIB, Daemon
from tests.faults.asking import PROMPTS, Answers, ask, judge
from tests.faults.tally import Tally

SETTLE_S = 20.0
LOOK_EACH_S = 0.1
FOOTPRINT_SLACK = 16 * MIB
ACTIVE_SLACK = MIB // 4
POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)  # asyncio's own, which come when they are needed and stay
LOG_BYTES, LOG_BACKUPS = 64 * 1024, 2
MOST_LOG_BYTES = (LOG_BACKUPS + 1) * LOG_BYTES
BROKEN = "tests.faults.broken_daemon"

MakeModel = Callable[[int, int], Path]
"""A folder with a tiny llama: its size in megabytes, its seed."""


def events(daemon: Daemon, name: str) -> list[Any]:
    """What its log files hold of these events, newest first; torn lines are left out."""
    lines = Log(daemon.home / "logs" / "omlxd.jsonl").newest_first()
    return [line.record for line in lines if line.record["event"] == name]


@dataclass(frozen=True, slots=True)
class Base:
    """What an idle daemon without a model has."""

    footprint_bytes: int
    active_bytes: int
    threads: int
    descriptors: int


@dataclass
class Campaign:
    """One run of the campaign.

    Args:
        root: a directory of its own that goes away.
        make_model: see `MakeModel`.
        short: few times each.
        seed: of all random choices.
        scale: how often each fault is done otherwise, as a part of the full number.
        soak_s: how long the soak takes.
    """

    root: Path
    make_model: MakeModel
    short: bool
    seed: int = 1
    scale: float = 1.0
    soak_s: float = 1200.0
    answers: Answers = field(default_factory=Answers)
    _daemon: Daemon | None = None
    _base: Base | None = None

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.folders = {
            "small": self._own("small", 5, 1),
            "twin": self._own("twin", 5, 2),
            "medium": self._own("medium", 30 if self.short else 60, 3),
        }

    def times(self, full: int, short: int) -> int:
        """How often to do it."""
        return short if self.short else max(1, round(full * self.scale))

    def daemon_in(self, home: Path | None = None, *, module: str = BROKEN, **settings: Any) -> Daemon:
        """A home with these models, and logs that rotate soon; not started."""
        keys = {"max_memory": "1G", "log_max_size": LOG_BYTES, "log_backups": LOG_BACKUPS, **settings}
        return Daemon(dict(self.folders), daemon=keys, home=home, module=module)

    @property
    def daemon(self) -> Daemon:
        """The one that lives through the faults; started, warm and measured the first time."""
        if self._daemon is None:
            self._daemon = self.daemon_in().spawn()
            assert self._daemon.ready.get("ready"), self._daemon.report()
            for name in self.folders:
                self.right(name, PROMPTS[0])
            for at, prompt in enumerate(PROMPTS * 2):
                ask(self._daemon, "small", prompt, stream=at % 2 == 0)
            self._unload_all()
            self._base = self._measure()
        return self._daemon

    def right(self, model: str, prompt: str, *, folder: Path | None = None) -> str:
        """The undisturbed text of this model, or of what is in this folder."""
        return self.answers.right(self.daemon, model, folder or self.folders[model], prompt)

    def check_serves(self, tally: Tally, model: str = "small") -> None:
        """After a fault: each prompt is answered, and rightly."""
        for prompt in PROMPTS[:2]:
            judge(tally, ask(self.daemon, model, prompt), self.right(model, prompt))

    def check_base(self, tally: Tally, *, at_last: bool = False) -> None:
        """After a fault: with all models unloaded everything is back at the base, within a while."""
        if self._base is None or (self.short and not at_last):
            return
        self._unload_all()
        deadline_s = time.monotonic() + SETTLE_S  # the last connections are being closed, and the footprint lags
        while (above := self._above(self._base)) and time.monotonic() < deadline_s:
            time.sleep(LOOK_EACH_S)
        tally.leaked += above

    def close(self) -> None:
        """Stop the daemon, which must end with 0."""
        if self._daemon is not None:
            self._daemon.close()

    def footprint_bytes(self) -> int:
        """Of the daemon that lives through the faults, once all is unloaded."""
        self._unload_all()
        return self._measure().footprint_bytes

    def counts(self) -> tuple[int, int]:
        """Its threads and descriptors."""
        base = self._measure()
        return base.threads, base.descriptors

    def _own(self, name: str, megabytes: int, seed: int) -> Path:
        return shutil.copytree(self.make_model(megabytes, seed), self.root / name)

    def _unload_all(self) -> None:
        self.daemon.until_idle()
        for name in self.folders:
            answer = self.daemon.ask("POST", f"/v1/control/models/{name}/unload", {"now": True})
            assert answer.status == 200, answer.body

    def _measure(self) -> Base:
        process, memory = psutil.Process(self.daemon.pid), self.daemon.memory
        return Base(memory["footprint"], memory["active"], process.num_threads(), process.num_fds())

    def _above(self, base: Base) -> list[str]:
        now, status = self._measure(), self.daemon.status
        found = [f"committed {committed}" for committed in (status["memory"]["committed"],) if committed]
        found += [f"request {request['id']}" for request in status["requests"]]
        for model in status["models"]:
            left = {key: model[key] for key in ("running", "waiting", "parked", "committed_bytes") if model[key]}
            found += [f"{model['name']}: {left}"] if left else []
        for what, is_, was, slack in (
            ("active bytes", now.active_bytes, base.active_bytes, ACTIVE_SLACK),
            ("footprint bytes", now.footprint_bytes, base.footprint_bytes, FOOTPRINT_SLACK),
            ("threads", now.threads, base.threads, POOL_THREADS),
            ("descriptors", now.descriptors, base.descriptors, 0),
        ):
            if is_ > was + slack:
                found.append(f"{what}: {is_}, {was} before")
        return found
