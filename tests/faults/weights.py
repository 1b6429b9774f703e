"""Model files that are deleted, replaced or cut: under a loaded model, before the next load, and during one."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.acceptance.harness import in_thread
from tests.faults.asking import PROMPTS, ask, judge
from tests.faults.campaign import Campaign
from tests.faults.tally import Tally

WEIGHTS = "model.safetensors"
Damage = Callable[[Path], None]


def run(campaign: Campaign) -> Iterator[Tally]:
    """What is loaded answers as before; what is loaded anew is what the files say, or refused."""
    others = campaign.folders["small"]
    yield _under_a_loaded_model(campaign, "replaced by another's", lambda folder: _replace(folder, others), loads=True)
    yield _under_a_loaded_model(campaign, "deleted", _delete)
    if not campaign.short:
        yield _under_a_loaded_model(campaign, "cut in place", _cut)
        yield _during_a_load(campaign, "deleted", _delete)
        yield _during_a_load(campaign, "cut in place", _cut)
    yield _during_a_load(campaign, "overwritten in place", _overwrite)


def _under_a_loaded_model(campaign: Campaign, name: str, damage: Damage, *, loads: bool = False) -> Tally:
    tally, daemon, folder = (
        Tally(f"weights {name} while the model is loaded"),
        campaign.daemon,
        campaign.folders["twin"],
    )
    for _ in range(campaign.times(10, 1)):
        before, after = campaign.right("twin", PROMPTS[0]), campaign.right("small", PROMPTS[0])
        daemon.control("POST", "models/twin/load")
        with _kept(folder):
            damage(folder)
            judge(tally, ask(daemon, "twin", PROMPTS[0]), before)
            daemon.control("POST", "models/twin/unload", {"now": True})
            outcome = ask(daemon, "twin", PROMPTS[0])
            if loads:
                judge(tally, outcome, after)
                daemon.control("POST", "models/twin/unload", {"now": True})
            elif not outcome.error.startswith("load_failed:"):
                tally.wrong.append(f"without its weights: {outcome}")
        judge(tally, ask(daemon, "twin", PROMPTS[0]), before)  # at once: the files are there again
        tally.times += 1
    campaign.check_serves(tally)
    campaign.check_base(tally)
    return tally


def _during_a_load(campaign: Campaign, name: str, damage: Damage) -> Tally:
    """The whole right text or an error; never the text of half a model."""
    tally, daemon, folder = (
        Tally(f"weights {name} in the middle of a load"),
        campaign.daemon,
        campaign.folders["medium"],
    )
    for _ in range(campaign.times(20, 1)):
        right = campaign.right("medium", PROMPTS[0])
        daemon.control("POST", "models/medium/unload", {"now": True})
        with _kept(folder):
            asked = in_thread(lambda: ask(daemon, "medium", PROMPTS[0]))
            while daemon.states["medium"] == "unloaded":
                pass
            time.sleep(campaign.random.uniform(0, 0.08))  # somewhere in its slices
            damage(folder)
            judge(tally, asked.result(), right, may_fail=lambda error: error.startswith("load_failed:"))
        daemon.control("POST", "models/medium/unload", {"now": True})
        judge(tally, ask(daemon, "medium", PROMPTS[0]), right)
        tally.times += 1
    campaign.check_serves(tally)
    campaign.check_base(tally)
    return tally


@contextmanager
def _kept(folder: Path) -> Iterator[None]:
    """The folder as it is, put back at the end."""
    copy = folder.with_name(folder.name + ".kept")
    shutil.copytree(folder, copy)
    try:
        yield
    finally:
        shutil.rmtree(folder)
        copy.rename(folder)


def _delete(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def _cut(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size // 2)


def _replace(folder: Path, other: Path) -> None:
    shutil.copy(other / WEIGHTS, folder / "new")
    (folder / "new").replace(folder / WEIGHTS)


def _overwrite(folder: Path) -> None:
    """As a download into the same file does it: the header stays, the tensors become others."""
    path = folder / WEIGHTS
    whole = path.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(whole[begin + 4096 :] + whole[begin : begin + 4096])
