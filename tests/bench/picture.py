"""`python -m tests.bench.picture [FOLDER]`: the pictures of the status screen in the README, from a real run.

A daemon with tiny models is used for a minute and a half; then a model is loaded for which another has to go, while
two requests are answered, and what `omlxd status` shows in the middle of that load is drawn, light and dark.
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME, TerminalTheme

from omlxd.cli.screen.feed import Look
from omlxd.cli.screen.page import page
from omlxd.cli.screen.state import Row, ScreenState
from tests.bench.scratch import Scratch
from tests.bench.servers import RunningDaemon, our_daemon
from tests.bench.streaming import chat

COLUMNS: Final = 100
ROWS: Final = 27
USED_FOR_S: Final = 90.0
MEGABYTES: Final = {"chat": 60, "coder": 120, "small": 5, "writer": 200}
SETTINGS: Final = {"max_memory": "320M", "hard_limit": "380M"}
STORY: Final = "Once upon a time there was a machine with less memory than models. " * 12
THEMES: Final[Mapping[str, TerminalTheme]] = {"light": DEFAULT_TERMINAL_THEME, "dark": SVG_EXPORT_THEME}
FOLDER: Final = Path(__file__).resolve().parents[2] / "man"


def main() -> int:
    """Draw `status-light.svg` and `status-dark.svg` into the folder, `man` by default."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the daemon and its models go, too
    os.environ["LC_ALL"] = "C.UTF-8"  # the picture has its ornaments wherever it is drawn
    with tempfile.TemporaryDirectory(prefix="omlxd-picture-") as root:
        scratch = Scratch(Path(root))
        models = {name: scratch.llama(megabytes) for name, megabytes in MEGABYTES.items()}
        with our_daemon(scratch.home("picture"), models, ttl={"small": "10m"}, **SETTINGS) as daemon:
            state = ScreenState(time.monotonic)
            _use(daemon)
            state.see(Look(_in_the_middle_of_a_load(daemon)))
            told = daemon.client.get("/v1/control/history")
            state.history.begin(state.clock(), told["ages_s"], told["used"])
            state.selected = Row("model", "chat")
            for name, theme in THEMES.items():
                (folder / f"status-{name}.svg").write_text(_drawn(state, theme), encoding="utf-8")
    return 0


def _use(daemon: RunningDaemon) -> None:
    """What fills the line of history: models come and go, and answer in between."""
    daemon.client.call("POST", "/v1/control/models/chat/pin", {})
    ends_s = time.monotonic() + USED_FOR_S
    while time.monotonic() < ends_s:
        for model in ("chat", "coder", "chat", "small"):
            daemon.load(model)
            chat(daemon.api, model, STORY, 60)
        daemon.unload("coder")
        chat(daemon.api, "chat", STORY, 120)
        daemon.load("writer")
    daemon.unload("writer")
    daemon.load("coder")
    daemon.load("small")


def _in_the_middle_of_a_load(daemon: RunningDaemon) -> dict[str, Any]:
    """A status while `writer` takes the place of `coder`, one request decodes and another reads its prompt."""
    for _ in range(20):
        with _asked(daemon, "chat", 400), _asked(daemon, "small", 400), _loading(daemon, "writer") as loading:
            while loading.is_alive():
                status = daemon.status()
                writer = next(model for model in status["models"] if model["name"] == "writer")
                states = {request["state"] for request in status["requests"]}
                if 0.3 < (writer["load_progress"] or 0) < 0.9 and "decode" in states and len(status["requests"]) > 1:
                    return status
        daemon.unload("writer")
        daemon.load("coder")
    raise RuntimeError("no look fell into the middle of a load")


@contextmanager
def _asked(daemon: RunningDaemon, model: str, tokens: int) -> Iterator[None]:
    thread = threading.Thread(target=chat, args=(daemon.api, model, STORY, tokens), daemon=True)
    thread.start()
    while not any(request["model"] == model for request in daemon.status()["requests"]):
        pass
    yield
    thread.join()


@contextmanager
def _loading(daemon: RunningDaemon, model: str) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=daemon.load, args=(model,), daemon=True)
    thread.start()
    yield thread
    thread.join()


def _drawn(state: ScreenState, theme: TerminalTheme) -> str:
    console = Console(
        width=COLUMNS,
        height=ROWS,
        record=True,
        file=io.StringIO(),
        force_terminal=True,
        color_system="standard",
        highlight=False,
        markup=False,
        emoji=False,
    )
    console.print(page(state, COLUMNS, ROWS), end="")
    drawn = console.export_svg(title="omlxd status", theme=theme, unique_id="omlxd")
    # No web font: a picture in a README may not fetch anything.
    return re.sub(r"@font-face \{.*?\}\n", "", drawn, flags=re.S).replace("Fira Code, ", "")


if __name__ == "__main__":
    sys.exit(main())
