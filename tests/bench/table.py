"""Rows of a run as the table of ratios that README shows: a line a figure, a column a peer.

`python -m tests.bench.table FILE...` makes it from documents that `--json` has written, a later one before an earlier
one where both have the same bench: so that a long suite can be run in parts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench.report import number

PREFIX = "peers-"
NONE = "–"


def table(rows: Sequence[Mapping[str, Any]], machine: Mapping[str, Any]) -> str:
    """Markdown; `rows` as `Row.to_json` writes them with their bench's name, those of peers are taken.

    A cell is ours over theirs, round by round, in the median; where no ratio can be made, `ours : theirs`. It is bold
    where we are worse.
    """
    chosen = [row for row in rows if row["bench"].startswith(PREFIX) and row["peer_name"]]
    peers = list(dict.fromkeys(row["peer_name"] for row in chosen))
    figures = list(dict.fromkeys((row["bench"], row["figure"], row["unit"]) for row in chosen))
    cells = {(row["bench"], row["figure"], row["peer_name"]): _cell(row) for row in chosen}
    lines = [
        f"| ours : theirs | {' | '.join(peers)} |",
        f"|---|{'---|' * len(peers)}",
    ]
    for bench, figure, _ in figures:
        shown = [cells.get((bench, figure, peer), "") for peer in peers]
        lines.append(f"| {figure.strip()} | {' | '.join(shown)} |")
    backend = machine["backend"] + (f" with {blas}" if (blas := machine["blas"]) else "")
    lines += ["", f"{machine['cores']} cores of {machine['cpu']}, {machine['system']}, backend {backend}."]
    notes = dict.fromkeys(f"{row['peer_name']}: {row['note']}" for row in chosen if row["peer"] is None)
    return "\n".join([*lines, *(f"* {note}" for note in notes)])


def _cell(row: Mapping[str, Any]) -> str:
    if row["peer"] is None:
        return NONE
    text = number(row["ratio"]["median"]) if row["ratio"] else f"{_count(row['ours'])} : {_count(row['peer'])}"
    return f"**{text}**" if row["met"] is False else text


def _count(spread: Mapping[str, float]) -> str:
    return f"{spread['median']:g}"


def main(files: Sequence[str]) -> None:
    """Print the table of these documents."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    machine: Mapping[str, Any] = {}
    for file in files:
        document = json.loads(Path(file).read_text())
        machine = document["machine"]
        fresh: dict[str, list[Mapping[str, Any]]] = {}
        for row in document["rows"]:
            fresh.setdefault(row["bench"], []).append(row)
        found |= fresh
    print(table([row for rows in found.values() for row in rows], machine))


if __name__ == "__main__":
    main(sys.argv[1:])
