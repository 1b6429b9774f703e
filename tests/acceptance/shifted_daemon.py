"""The daemon's process with clocks that a test moves: `python -m tests.acceptance.shifted_daemon ...`.

It takes the options of `python -m omlxd.daemon`. At SIGUSR2 all clocks are eight hours further, as after a process that
was stopped; at SIGALRM the wall clock alone is sixteen hours back. It looks for pauses ten times a second.
"""

from __future__ import annotations

import signal
import sys
import time

STOPPED_S = 8 * 3600.0
BACK_S = 16 * 3600.0

if __name__ == "__main__":
    shift_s = {"monotonic": 0.0, "wall": 0.0}
    monotonic, wall, clock_gettime = time.monotonic, time.time, time.clock_gettime

    def stopped(*_: object) -> None:
        shift_s["monotonic"] += STOPPED_S
        shift_s["wall"] += STOPPED_S

    def set_back(*_: object) -> None:
        shift_s["wall"] -= BACK_S

    time.monotonic = lambda: monotonic() + shift_s["monotonic"]
    time.clock_gettime = lambda clock: clock_gettime(clock) + shift_s["monotonic"]
    time.time = lambda: wall() + shift_s["wall"]
    signal.signal(signal.SIGUSR2, stopped)
    signal.signal(signal.SIGALRM, set_back)

    from omlxd.daemon import awake_clock  # only now, with the clocks in place
    from omlxd.daemon.__main__ import main

    awake_clock.LOOK_EACH_S = 0.1  # type: ignore[misc]
    sys.exit(main())
