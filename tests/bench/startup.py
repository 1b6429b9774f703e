"""What a command costs before it does anything: help, a Tab, and the status as a page, against an empty Python."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from tests.bench.report import Row, Target, against
from tests.bench.scratch import Scratch
from tests.bench.servers import our_daemon
from tests.bench.status import PEER, as_installed, milliseconds, omlxd

TAB_TARGET = Target(150.0)


def tab(*words: str) -> Mapping[str, str]:
    """What bash's script sets when Tab is hit in the last of these words."""
    return {
        "_OMLXD_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(("omlxd", *words)),
        "COMP_CWORD": str(len(words)),
    }


def run(scratch: Scratch) -> Iterator[Row]:
    """Each beside `python -c pass`, in turns."""
    with our_daemon(scratch.home("startup"), {"chat": scratch.llama(1)}) as daemon:
        environment = as_installed(scratch, daemon)
        for figure, command, more, target in (
            ("omlxd --help", [*omlxd(), "--help"], {}, None),
            ("one Tab: commands", omlxd(), tab(""), TAB_TARGET),
            ("one Tab: names of models from the daemon", omlxd(), tab("load", ""), TAB_TARGET),
            ("one Tab: options of a command", omlxd(), tab("load", "--"), TAB_TARGET),
            ("omlxd status --once", [*omlxd(), "status", "--once"], {}, None),
        ):
            _process(command, environment | more)  # writes the byte code
            ours, floor = [], []
            for _ in range(scratch.rounds(21, 5)):
                ours.append(_process(command, environment | more))
                floor.append(_process([sys.executable, "-c", "pass"], environment))
            yield against(figure, "ms", ours, PEER, floor, target)


def _process(command: Sequence[str], environment: Mapping[str, str]) -> float:
    """Milliseconds from its start to its end."""
    return milliseconds(lambda: subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL))
