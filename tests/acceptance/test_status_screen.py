"""`omlxd status` on a terminal beside the real daemon: a load and an answer as they happen, a restart, and the end."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acceptance.harness import Daemon
from tests.fakes.terminal import LEAVES, Terminal, omlxd

pytestmark = pytest.mark.mlx


def test_the_screen_shows_what_happens_also_across_a_restart(
    daemon_of: Callable[..., Daemon], small: Callable[..., Path]
) -> None:
    daemon = daemon_of({"one": small(), "two": small(1)}, api={"listen": "off"})
    environment = {**os.environ, "OMLXD_HOME": str(daemon.home), "TERM": "xterm", "LC_ALL": "C.UTF-8"}
    with Terminal(omlxd("status"), environment, columns=100) as shown:
        shown.until_shown("ready", "one", "two", "unloaded", "q quit")
        shown.type("\x1b[Bl")
        shown.until_shown("loaded `one` in ", "█ weights 4.")
        with daemon.chat_stream("one", "hello", max_tokens=400) as answer:
            next(iter(answer))
            shown.until_shown("REQUEST", "decode", "▓ KV ")
        shown.type("p")
        shown.until_shown("pinned `one`")
        assert daemon.terminate() == 0
        shown.until_shown("reconnecting…")
        daemon.spawn()
        shown.until(lambda: shown.lines[0].startswith("omlxd 0") and f"pid {daemon.pid}" in shown.lines[0])
        shown.until_shown("pinned")
        shown.type("q")
        assert shown.ended() == 0
        assert shown.settings == shown.settings_before
        assert LEAVES in shown.raw
