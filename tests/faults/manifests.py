"""The manifest rewritten ten times in a second, and read again each time; in the end what it says then is in force."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

from tests.faults.asking import ask_all, judge
from tests.faults.campaign import Campaign
from tests.faults.tally import Tally

RATE_S = 0.1
REWRITES = 10


def run(campaign: Campaign) -> Iterator[Tally]:
    """Good ones, others with a model more and another limit, and ones that are cut off in their middle."""
    tally, daemon = Tally("manifest rewritten ten times in a second"), campaign.daemon
    path = daemon.home / "omlxd.toml"
    whole, before = path.read_text(), daemon.status
    for _ in range(campaign.times(10, 1)):
        asked = [*ask_all(daemon, "small"), *ask_all(daemon, "twin")]
        for at in range(REWRITES):
            path.write_text(_variant(whole, at, campaign))
            if at % 2:
                os.kill(daemon.pid, signal.SIGHUP)
            else:
                answer = daemon.ask("POST", "/v1/control/reload", {"wait": False})
                if answer.status not in (200, 422):
                    tally.wrong.append(f"a reload is answered with {answer.status}: {answer.body!r}")
            time.sleep(RATE_S)
        path.write_text(whole)
        if (answer := daemon.ask("POST", "/v1/control/reload", {})).status != 200:
            tally.wrong.append(f"the last reload is answered with {answer.status}: {answer.body!r}")
        for each in asked:
            outcome = each.result()
            judge(tally, outcome, campaign.right(outcome.model, outcome.prompt))
        after = daemon.status
        if after["memory"]["soft_limit"] != before["memory"]["soft_limit"]:
            tally.wrong.append(f"the limit is {after['memory']['soft_limit']}")
        names = [sorted(model["name"] for model in status["models"]) for status in (before, after)]
        if names[0] != names[1]:
            tally.wrong.append(f"the models are {names[1]}")
        tally.times += REWRITES
    campaign.check_serves(tally)
    campaign.check_base(tally)
    yield tally


def _variant(whole: str, at: int, campaign: Campaign) -> str:
    if at % 3 == 0:
        return whole.replace('max_memory = "1G"', f'max_memory = "{900 + at}M"')
    if at % 3 == 1:
        return whole[: len(whole) // 2] + "\n[models."
    return f'{whole}\n[models.more]\npath = "{campaign.folders["small"]}"\n'
