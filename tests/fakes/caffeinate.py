"""Stands in for `caffeinate -i -w PID`: writes down how it was called, and ends with that process or by a signal.

Run as a program: `python caffeinate.py RECORD -i -w PID`. The record gets `held ARGUMENTS` and `ended`.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path


def main(record: Path, arguments: list[str]) -> None:
    ended, end = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.write(end, b"."))
    process = os.pidfd_open(int(arguments[-1]))
    _write(record, f"held {' '.join(arguments)}")
    select.select([process, ended], [], [])
    _write(record, "ended")


def _write(record: Path, line: str) -> None:
    with record.open("a") as file:
        file.write(line + "\n")


def program(folder: Path) -> Path:
    """An executable that runs this file; its record is `caffeinate.log` in the same folder."""
    made = folder / "caffeinate"
    made.write_text(f'#!/bin/sh\nexec {sys.executable} -S {__file__} "{folder}/caffeinate.log" "$@"\n')
    made.chmod(0o755)
    return made


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
