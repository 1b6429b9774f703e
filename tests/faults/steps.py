"""Exceptions on the engine's thread, in each kind of step, among requests that have nothing to do with it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from tests.acceptance.harness import in_thread
from tests.faults.asking import PROMPTS, Outcome, ask, ask_all, judge
from tests.faults.broken_daemon import break_next
from tests.faults.campaign import Campaign
from tests.faults.tally import Tally

OUT_OF_MEMORY = "RuntimeError [malloc] Unable to allocate 68719476736 bytes."
BUG = "ValueError something of ours"
BESIDE_TOKENS = 200
ALL = 1000


@dataclass(frozen=True, slots=True)
class Strike:
    """A kind of step, what makes it happen, and how many requests of the model at most it may cost."""

    where: str
    costs: int
    short: bool = True


STRIKES = (
    Strike("batch", ALL),
    Strike("lone", 1, short=False),
    Strike("joining", 2, short=False),
    Strike("prefill", 1, short=False),
    Strike("token", 1, short=False),
    Strike("leaving", ALL, short=False),
    Strike("load", 1, short=False),
    Strike("unload", 0, short=False),
    Strike("plan", ALL),
)
IN_SHORT_OUT_OF_MEMORY = ("load",)


def run(campaign: Campaign) -> Iterator[Tally]:
    """Requests of another model, and those of the same one that were not in the step, go on with the right text."""
    for what, error in (("an exception", BUG), ("no memory", OUT_OF_MEMORY)):
        for strike in STRIKES:
            if campaign.short and not (strike.short if error == BUG else strike.where in IN_SHORT_OUT_OF_MEMORY):
                continue
            tally = Tally(f"{what} in a step: {strike.where}")
            for _ in range(campaign.times(10, 1)):
                _strike(campaign, tally, strike, error)
            campaign.check_serves(tally)
            campaign.check_base(tally)
            yield tally


def _strike(campaign: Campaign, tally: Tally, strike: Strike, error: str) -> None:
    daemon, where = campaign.daemon, strike.where
    right = {(model, prompt): campaign.right(model, prompt) for model in ("small", "twin") for prompt in PROMPTS}
    campaign.right("medium", PROMPTS[0])
    beside_right = campaign.answers.right(daemon, "small", campaign.folders["small"], PROMPTS[3], BESIDE_TOKENS)
    for model in ("small", "twin", "medium"):
        daemon.control("POST", f"models/{model}/load")  # also when its last load has failed
    if where == "load":
        daemon.control("POST", "models/medium/unload")
    beside = in_thread(lambda: ask(daemon, "small", PROMPTS[3], tokens=BESIDE_TOKENS))
    while not any(request["state"] == "decode" for request in daemon.requests):
        if beside.done():
            return  # too quick for us; not counted
    bystanders = ask_all(daemon, "twin")
    asked = break_next(daemon.home, where, error, "small" if where not in ("load", "unload", "plan") else "*")
    concerned = _provoke(campaign, where)
    outcomes, long_one = [each.result() for each in concerned], beside.result()
    tally.times += not asked.exists()
    asked.unlink(missing_ok=True)
    failed = sum(bool(outcome.error) for outcome in [*outcomes, long_one])
    if failed > strike.costs:
        tally.lost.append(f"{failed} requests ended, {strike.costs} were concerned")
    may_fail = _engine_s if strike.costs else lambda _: False
    judge(tally, long_one, beside_right, may_fail=may_fail)
    for outcome in outcomes:
        judge(tally, outcome, campaign.right(outcome.model, outcome.prompt), may_fail=may_fail)
    for each in bystanders:
        outcome = each.result()
        judge(tally, outcome, right[outcome.model, outcome.prompt], may_fail=_engine_s if where == "plan" else _never)


def _provoke(campaign: Campaign, where: str) -> list[Future[Outcome]]:
    """Have the step taken."""
    daemon = campaign.daemon
    if where == "lone":
        return []
    if where == "load":
        return [in_thread(lambda: ask(daemon, "medium", PROMPTS[0]))]
    if where == "unload":
        daemon.control("POST", "models/medium/unload", {"now": True})
        return []
    if where in ("joining", "plan"):
        return [in_thread(lambda: ask(daemon, "small", PROMPTS[0]))]
    if where == "prefill":  # one whose beginning nothing has kept
        prompt = f"{campaign.random.random()} {PROMPTS[2]}"
        return [in_thread(lambda: ask(daemon, "small", prompt))]
    return ask_all(daemon, "small")


def _engine_s(error: str) -> bool:
    return error.startswith(("engine_failed:", "load_failed:", "does_not_fit:"))


def _never(_error: str) -> bool:
    return False
