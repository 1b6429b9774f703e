"""`omlxd demo`: a real model answers, two more crowd in, and the limit holds; told from the daemon's own answers."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import typer

from omlxd.cli import output
from omlxd.cli.client import Client
from omlxd.cli.demo_story import Sizes, tell
from omlxd.cli.find import tilde
from omlxd.cli.invocation import home_of
from omlxd.cli.process import StartOptions, start_detached, wait_until_gone
from omlxd.core.errors import OmlxError, StartFailed
from omlxd.core.wording import INSTALL_HINT
from omlxd.daemon.files import cannot_write, make_directory
from omlxd.daemon.home import MAX_SOCKET_PATH_BYTES, Home

TINY_BYTES: Final = 60_000_000
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def demo(context: typer.Context) -> None:
    """Show the main job: a limit, three models, an eviction. Needs the network once, for a model of 93 to 270 MB."""
    home = home_of(context)
    with _ended_by_signals(), _own_home(home) as demo_home:
        output.data("omlxd demo: three models, and memory for two of them.")
        models = _models(home, demo_home)
        sizes = Sizes(chat_bytes=_weights_bytes(models.chat), tiny_bytes=_weights_bytes(models.tiny_a))
        demo_home.manifest.write_text(_manifest_text(models), encoding="utf-8")
        with _daemon(demo_home, sizes) as (ready, client):
            tell(client, ready, sizes)
    output.sentence("The demo's daemon is stopped, and its model is kept. A first chat with it:", hang=0)
    output.data("")
    output.data(f"    omlxd add chat {_typed(models.chat)}")
    output.data("    omlxd start     # detaches, returns when the daemon answers")
    output.data("    omlxd run chat")
    output.data("")
    output.sentence("`omlxd find` shows other models of this machine, `omlxd pull` fetches one.", hang=0)


def _typed(path: Path) -> str:
    """The path as one would type it in a shell."""
    quoted = shlex.quote(str(path))
    return tilde(quoted) if quoted == str(path) else quoted


@dataclass(frozen=True, slots=True)
class _Models:
    chat: Path
    tiny_a: Path
    tiny_b: Path


def _models(home: Home, demo_home: Home) -> _Models:
    """The real model is kept for the next time, offline; the tiny ones are made anew in the demo's own home."""
    output.data("\nThe models")
    from omlxd.engine.demo_models import ensure_smollm2, make_tiny  # MLX: only here, for making model folders

    try:
        tiny_a = make_tiny(demo_home.root / "tiny-a", size_bytes=TINY_BYTES, seed=1)
        tiny_b = make_tiny(demo_home.root / "tiny-b", size_bytes=TINY_BYTES, seed=2)
        chat = ensure_smollm2(home.root, report=_say)
    except ImportError as error:
        raise OmlxError(f"MLX cannot be imported: {error}", hint=INSTALL_HINT) from error
    _say(f"chat    SmolLM2-135M-Instruct, {chat}")
    _say("tiny-a  and tiny-b: random weights, made just now to take up memory")
    return _Models(chat, tiny_a, tiny_b)


def _say(text: str) -> None:
    output.sentence(f"  {text}")
    sys.stdout.flush()


def _weights_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("model*.safetensors"))


def _manifest_text(models: _Models) -> str:
    lines = [
        "[daemon]",
        'drain_timeout = "5s"',
        "[api]",
        'listen = "off"',
    ]
    for name, folder in (("chat", models.chat), ("tiny-a", models.tiny_a), ("tiny-b", models.tiny_b)):
        lines += [f"[models.{name}]", f"path = {_toml_text(str(folder))}"]
    return "\n".join(lines) + "\n"


def _toml_text(text: str) -> str:
    """A basic string; a path may hold quotes, backslashes and control characters."""
    escaped = "".join(f"\\u{ord(char):04x}" if char in '"\\' or not char.isprintable() else char for char in text)
    return f'"{escaped}"'


@contextmanager
def _own_home(home: Home) -> Iterator[Home]:
    """A directory below the home, or below the system's when its socket path would be too long; gone at the end."""
    make_directory(home.root)
    parent = home.root / "demo"
    fits = len(str(parent / "12345678" / "omlxd.sock").encode()) <= MAX_SOCKET_PATH_BYTES
    if fits:
        make_directory(parent)
    try:
        try:
            folder = Path(tempfile.mkdtemp(prefix="" if fits else "omlxd-demo-", dir=parent if fits else None))
        except OSError as error:
            raise cannot_write(error, parent) from error
        try:
            yield Home(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        if fits:
            try:
                parent.rmdir()
            except OSError:
                pass  # another demo is running


@contextmanager
def _daemon(demo_home: Home, sizes: Sizes) -> Iterator[tuple[dict[str, Any], Client]]:
    """A real daemon in a process of its own that ends with the demo, however the demo ends."""
    ready = start_detached(demo_home, StartOptions(max_memory=sizes.limit, hard_limit=sizes.hard_limit))
    client = Client(demo_home.socket)
    try:
        yield ready, client
    finally:
        with _undisturbed():
            _end_daemon(demo_home, client, int(ready["pid"]))


def _end_daemon(demo_home: Home, client: Client, pid: int) -> None:
    try:
        client.call("POST", "/v1/control/stop", {"now": True})
    except OmlxError:
        pass  # then by signal
    if not wait_until_gone(demo_home, pid, timeout_s=10.0):
        os.kill(pid, signal.SIGKILL)
        if not wait_until_gone(demo_home, pid, timeout_s=5.0):
            raise StartFailed(f"the demo's daemon (pid {pid}) does not end", hint=f"`kill -9 {pid}`")


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C must not leave the daemon behind; this takes seconds at most."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the demo as Ctrl-C does: with its clean-up."""

    def end(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in _ENDING if number != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
