"""`python -m tests.faults [NAME...] [--short | --scale F] [--soak MINUTES] [--seed N] [--list]`, in the checkout."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.command_line import ask
from tests.bench.machine import this_machine
from tests.bench.scratch import Scratch
from tests.faults.campaign import Campaign
from tests.faults.runner import FAULTS, run
from tests.faults.tally import HEAD


def main() -> int:
    """Run and print; 1 when something was lost, wrong or leaked."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="The fault campaign of omlxd.")
    parser.add_argument("--short", action="store_true", help="few times each, as in the test suite")
    parser.add_argument("--scale", type=float, default=1.0, metavar="F", help="F times as often as in full")
    parser.add_argument("--soak", type=float, default=20.0, metavar="MINUTES", help="how long the soak takes")
    parser.add_argument("--seed", type=int, default=1, help="of all random choices")
    arguments, faults = ask(parser, FAULTS, "fault")
    print(this_machine())
    print(HEAD, flush=True)
    clean = True
    with tempfile.TemporaryDirectory(prefix="omlxd-faults-") as root:
        scratch = Scratch(Path(root))
        campaign = Campaign(
            Path(root) / "own",
            lambda megabytes, seed: scratch.tiny("llama", megabytes, seed=seed),
            short=arguments.short,
            seed=arguments.seed,
            scale=arguments.scale,
            soak_s=arguments.soak * 60,
        )
        try:
            for fault in faults:
                began_s = time.monotonic()
                for tally in run(fault, campaign):
                    clean = clean and (tally.clean or not tally.times)
                    print(tally, flush=True)
                print(f"    {fault.name} took {time.monotonic() - began_s:.0f} s", flush=True)
        finally:
            campaign.close()
    return int(not clean)


if __name__ == "__main__":
    sys.exit(main())
