"""`python -m tests.bench [NAME...] [--json | --markdown] [--quick] [--list]`, from the root of the checkout."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from tests.bench.command_line import ask
from tests.bench.machine import this_machine
from tests.bench.peers.venvs import DEFAULT_FOLDER
from tests.bench.report import format_row
from tests.bench.runner import BENCHES, run
from tests.bench.table import table


def main() -> int:
    """Run and print; 1 when a target was missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Benchmarks of omlxd.")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout, rows on stderr as they come")
    parser.add_argument("--markdown", action="store_true", help="README's table of peers on stdout, rows on stderr")
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_FOLDER, metavar="DIR", help="environments of peers")
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that it works, not to believe it")
    arguments, benches = ask(parser, BENCHES, "bench")
    machine, out = this_machine(), sys.stderr if arguments.json or arguments.markdown else sys.stdout
    print(machine, file=out, flush=True)
    rows, title = [], ""
    for bench, row in run(benches, quick=arguments.quick, peers=arguments.peers_dir):
        if bench.name != title:
            title = bench.name
            print(f"{bench.name}: {bench.what}", file=out)
        print(format_row(row), file=out, flush=True)
        rows.append((bench.name, row))
    found = [{"bench": name, **row.to_json()} for name, row in rows]
    if arguments.markdown:
        print(table(found, asdict(machine)))
    if arguments.json:
        json.dump({"schema": 1, "quick": arguments.quick, "machine": asdict(machine), "rows": found}, sys.stdout)
        print()
    return int(any(row.met is False for _, row in rows))


if __name__ == "__main__":
    sys.exit(main())
