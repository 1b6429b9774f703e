"""kill -9 at random points; the next start works at once, and finds everything as it was."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tests.acceptance.harness import Daemon, has_text, in_thread
from tests.faults.asking import LONG_PROMPT, PROMPTS, Answers, Outcome, ask, judge
from tests.faults.campaign import Campaign
from tests.faults.tally import Tally

MOMENT_S = 0.3


def run(campaign: Campaign) -> Iterator[Tally]:
    """One daemon after the other in the same home."""
    daemon, answers = campaign.daemon_in(log_level="debug"), Answers()
    try:
        daemon.spawn()
        for name, begin, times in (
            ("a load", _loading, campaign.times(20, 1)),
            ("a prompt's prefill", _prefilling, campaign.times(20, 1)),
            ("decoding", _decoding, campaign.times(20, 1)),
        ):
            tally = Tally(f"kill -9 in the middle of {name}")
            for _ in range(times):
                running = begin(daemon, campaign)
                time.sleep(campaign.random.uniform(0, MOMENT_S))  # the point is that it is a random one
                daemon.kill()
                for each in running:
                    _judge_broken(tally, each.result())
                _start_again(tally, daemon)
                # In full the right text is that of a daemon nobody kills, in short that of the first one after a kill.
                folder = campaign.folders["small"]
                right = answers.right(daemon if campaign.short else campaign.daemon, "small", folder, PROMPTS[0])
                judge(tally, ask(daemon, "small", PROMPTS[0]), right)
                _check_log(tally, daemon)
                tally.times += 1
            yield tally
        for name, write in (("state", _pin_and_unpin), ("log", _move_the_limit)):
            tally = Tally(f"kill -9 in the middle of writing the {name}")
            for _ in range(campaign.times(20, 1)):
                told = Told()
                writers = [threading.Thread(target=write, args=(daemon, told, at), daemon=True) for at in range(2)]
                for each in writers:
                    each.start()
                told.first.wait(10)
                time.sleep(campaign.random.uniform(0, MOMENT_S))
                daemon.kill()
                for each in writers:
                    each.join()
                _start_again(tally, daemon)
                _check_state(tally, daemon, told)
                _check_log(tally, daemon)
                tally.times += 1
            yield tally
    finally:
        daemon.close()


def _start_again(tally: Tally, daemon: Daemon) -> None:
    daemon.spawn()
    if not daemon.ready.get("ready"):
        tally.lost.append(f"the next start: {daemon.ready}")
        raise AssertionError(daemon.report())
    if (damaged := daemon.home / "state.toml.damaged").exists():
        tally.wrong.append("state.toml was damaged")
        damaged.unlink()


def _loading(daemon: Daemon, campaign: Campaign) -> list[Future[Outcome]]:
    daemon.control("POST", "models/medium/unload", {"now": True})
    asked = in_thread(lambda: ask(daemon, "medium", PROMPTS[0]))
    while daemon.states["medium"] == "unloaded":
        pass
    return [asked]


def _prefilling(daemon: Daemon, campaign: Campaign) -> list[Future[Outcome]]:
    asked = in_thread(lambda: ask(daemon, "small", LONG_PROMPT))
    while not any(request["state"] == "prefill" for request in daemon.requests):
        pass
    return [asked]


def _decoding(daemon: Daemon, campaign: Campaign) -> list[Future[Outcome]]:
    asked = [in_thread(lambda prompt=prompt: ask(daemon, "small", prompt, tokens=2000)) for prompt in PROMPTS]  # type: ignore[misc]
    with daemon.chat_stream("small", PROMPTS[0], max_tokens=2000) as stream:
        stream.until(has_text)
    return asked


def _judge_broken(tally: Tally, outcome: Outcome) -> None:
    """Its connection broke, which tells the client; it may not look as if it had ended."""
    if outcome.whole:
        tally.wrong.append(f"{outcome}: whole, although the daemon was killed in its middle")


@dataclass
class Told:
    """What writers were told is in force, and what they asked for and heard nothing of."""

    first: threading.Event = field(default_factory=threading.Event)
    acknowledged: dict[str, Any] = field(default_factory=dict)
    asked: dict[str, Any] = field(default_factory=dict)

    def write(self, daemon: Daemon, what: str, value: Any, method: str, path: str, body: Any) -> bool:
        """Ask for it; False when nobody answers any more."""
        self.asked[what] = value
        try:
            answer = daemon.ask(method, f"/v1/control/{path}", body)
        except (OSError, http.client.HTTPException):
            return False
        assert answer.status == 200, answer.body
        self.acknowledged[what] = value
        self.first.set()
        return True


def _pin_and_unpin(daemon: Daemon, told: Told, at: int) -> None:
    model, pinned = ("small", "twin")[at], True
    while told.write(daemon, model, pinned, "POST", f"models/{model}/{'pin' if pinned else 'unpin'}", {}):
        pinned = not pinned


def _move_the_limit(daemon: Daemon, told: Told, at: int) -> None:
    if at:
        return _pin_and_unpin(daemon, told, at)
    limit = 600 << 20
    while told.write(daemon, "limit", limit, "PATCH", "limits", {"max_memory": limit}):
        limit += 1 << 20
    return None


def _check_state(tally: Tally, daemon: Daemon, told: Told) -> None:
    """In force is what was acknowledged, or what was just being asked for; and so it stands in the file."""
    status = daemon.status
    saved = tomllib.loads((daemon.home / "state.toml").read_text())
    found = {model["name"]: model["pinned"] for model in status["models"]}
    found["limit"] = status["memory"]["soft_limit"]
    in_file = {name: pin["pinned"] for name, pin in saved.get("pins", {}).items()}
    for what, value in told.acknowledged.items():
        allowed = (value, told.asked[what])
        if found[what] not in allowed:
            tally.wrong.append(f"{what} is {found[what]} after the start, {value} was acknowledged")
        if what in in_file and in_file[what] != found[what]:
            tally.wrong.append(f"{what} is {in_file[what]} in the file and {found[what]} in force")


def _check_log(tally: Tally, daemon: Daemon) -> None:
    """Each line is whole, but for the one that a kill tore; it stands alone."""
    torn = 0
    for path in sorted((daemon.home / "logs").glob("omlxd.jsonl*")):
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                json.loads(line)
                continue
            torn += 1
            if "}{" in line or line.endswith("}"):
                tally.wrong.append(f"{path.name}: a torn line runs into another one: {line[:80]}")
    if torn > tally.times + 1:
        tally.wrong.append(f"{torn} torn lines after {tally.times + 1} kills")
