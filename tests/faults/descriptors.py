"""No descriptor left: who has a connection is served, others are told or have to wait, and all is well afterwards."""

from __future__ import annotations

import contextlib
import resource
import socket
import sys
from collections.abc import Iterator

import psutil

from tests.acceptance.harness import Daemon, in_thread
from tests.fakes.wire import connect
from tests.faults.asking import PROMPTS, ask, judge
from tests.faults.campaign import Campaign
from tests.faults.tally import Tally

CROWD = 60


def run(campaign: Campaign) -> Iterator[Tally]:
    """The limit comes down while the daemon runs, to what it has open and a few more."""
    if sys.platform != "linux":
        return
    tally, daemon = Tally("no descriptor left, at both doors"), campaign.daemon
    process = psutil.Process(daemon.pid)
    before = process.rlimit(resource.RLIMIT_NOFILE)
    for at in range(campaign.times(10, 1)):
        right = campaign.right("small", PROMPTS[0])
        daemon.control("POST", "models/small/load")
        daemon.control("POST", "models/medium/unload", {"now": True})
        with contextlib.closing(daemon.connection()) as kept:
            kept.send_json("GET", "/v1/control/status")
            kept.getresponse().read()
            running = in_thread(lambda: ask(daemon, "small", PROMPTS[0]))
            while not daemon.requests and not running.done():
                pass
            process.rlimit(resource.RLIMIT_NOFILE, (process.num_fds() + at % 4, before[1]))
            crowd = _crowd(daemon)
            try:
                judge(tally, running.result(), right)
                kept.send_json("POST", "/v1/control/models/medium/load", {})
                answer = kept.getresponse()
                body = answer.read()
                if answer.status not in (200, 500, 503):
                    tally.wrong.append(f"a load is answered with {answer.status}: {body!r}")
                kept.send_json("GET", "/v1/control/status")
                if (status := kept.getresponse()).status != 200:
                    tally.lost.append(f"status: {status.read()!r}")
                status.read()
            finally:
                for each in crowd:
                    each.close()
                process.rlimit(resource.RLIMIT_NOFILE, before)
        judge(tally, ask(daemon, "small", PROMPTS[0]), right)
        judge(tally, ask(daemon, "medium", PROMPTS[0]), campaign.right("medium", PROMPTS[0]))
        tally.times += 1
    campaign.check_serves(tally)
    campaign.check_base(tally)
    yield tally


def _crowd(daemon: Daemon) -> list[socket.socket]:
    host, _, port = daemon.ready["api"].rpartition(":")
    crowd = [socket.create_connection((host, int(port)), timeout=20) for _ in range(CROWD // 2)]
    return crowd + [connect(daemon.home / "omlxd.sock") for _ in range(CROWD // 2)]
