"""`omlxd start stop restart`: the life of the daemon process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from omlxd.cli import output
from omlxd.cli.client import Client
from omlxd.cli.holder import holder_of, is_held
from omlxd.cli.invocation import client_of, home_of
from omlxd.cli.limit import check_size
from omlxd.cli.options import ManifestFile
from omlxd.cli.process import POLL_S, StartOptions, exec_foreground, start_detached, wait_until_gone
from omlxd.core.errors import DaemonNotRunning, NotPermitted, OmlxError, Unreachable
from omlxd.core.memory import Policy
from omlxd.core.units import format_bytes
from omlxd.daemon.home import Home

END_TIMEOUT_S: Final = 30.0

MaxMemory = Annotated[
    str | None, typer.Option("--max-memory", metavar="SIZE", help="Memory limit: 8G, 8GB, 75%, bytes, `auto` or 0.")
]
HardLimit = Annotated[
    str | None, typer.Option("--hard-limit", metavar="SIZE", help="What loads and prompts may never pass.")
]
PolicyName = Annotated[Policy | None, typer.Option("--policy", help="How memory pressure is answered.")]
Now = Annotated[bool, typer.Option("--now", help="End running requests instead of waiting for them.")]


def start(
    context: typer.Context,
    max_memory: MaxMemory = None,
    hard_limit: HardLimit = None,
    manifest: ManifestFile = None,
    policy: PolicyName = None,
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay; the log goes to the terminal.")] = False,
) -> None:
    """Start the daemon and return when it is ready."""
    options = _checked(max_memory, hard_limit, manifest, policy)
    if foreground:
        exec_foreground(home_of(context), options)
    _start(home_of(context), options)


def stop(context: typer.Context, now: Now = False) -> None:
    """Stop the daemon; running requests may finish first."""
    output.data(f"omlxd stopped (pid {_stop(home_of(context), client_of(context), now=now)})")


def restart(
    context: typer.Context,
    max_memory: MaxMemory = None,
    hard_limit: HardLimit = None,
    manifest: ManifestFile = None,
    policy: PolicyName = None,
    now: Now = False,
) -> None:
    """Stop the daemon if it runs, and start it with these options."""
    from omlxd.cli.supervised import restart_service  # what only a restart asks for

    options = _checked(max_memory, hard_limit, manifest, policy)
    given = (max_memory, hard_limit, manifest, policy) != (None, None, None, None)
    if (status := restart_service(home_of(context), now=now, options_given=given)) is not None:
        output.data(ready_line({"pid": status["pid"]}, client_of(context)))
        return
    try:
        _stop(home_of(context), client_of(context), now=now)
    except DaemonNotRunning:
        output.note("the daemon was not running")
    _start(home_of(context), options)


def _checked(
    max_memory: str | None, hard_limit: str | None, manifest: Path | None, policy: Policy | None
) -> StartOptions:
    for size in (max_memory, hard_limit):
        if size is not None:
            check_size(size)
    return StartOptions(manifest=manifest, max_memory=max_memory, hard_limit=hard_limit, policy=policy)


def _start(home: Home, options: StartOptions) -> None:
    ready = start_detached(home, options)
    for warning in ready.get("warnings", ()):
        output.warn(warning)
    output.data(ready_line(ready, Client(home.socket)))


def ready_line(ready: dict[str, Any], client: Client) -> str:
    """`omlxd is ready: pid 123, limit 8.00 GiB, api http://127.0.0.1:8321`."""
    parts = [f"pid {ready['pid']}"]
    try:
        soft_bytes = client.get("/v1/control/status", timeout_s=2.0)["memory"]["soft_limit"]
        parts.append(f"limit {format_bytes(soft_bytes)}" if soft_bytes else "no limit")
    except (OmlxError, KeyError):
        pass  # it is ready, which is what was asked; the limit is only good to know
    if ready.get("api"):
        parts.append(f"api http://{ready['api']}")
    return f"omlxd is ready: {', '.join(parts)}"


def _stop(home: Home, client: Client, *, now: bool) -> int:
    try:
        pid = int(client.call("POST", "/v1/control/stop", {"now": now})["pid"])
    except Unreachable as error:
        holder = holder_of(home.lock)
        if holder is None or holder.pid is None:
            raise
        pid = holder.pid
        if "holder_pid" not in error.details:  # it has a socket, and is stuck behind it
            raise Unreachable(error.message, hint=f"`kill -9 {pid}` ends it") from error
        _signal(pid, now=now)
    if not now:
        _wait_for_drain(home, client)
    if not wait_until_gone(home, pid, timeout_s=END_TIMEOUT_S):
        raise Unreachable(f"the daemon did not end within {END_TIMEOUT_S:g} s", hint=f"`kill -9 {pid}` ends it")
    return pid


def _signal(pid: int, *, now: bool) -> None:
    """Ask a daemon without a socket; asked a second time it does not wait for requests."""
    # Two kinds, since the kernel keeps only one of a kind until the process has seen it.
    for number in (signal.SIGTERM, signal.SIGINT) if now else (signal.SIGTERM,):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        except PermissionError as error:
            raise NotPermitted(f"the daemon (pid {pid}) belongs to another user", hint="ask its owner") from error


def _wait_for_drain(home: Home, client: Client) -> None:
    """The daemon bounds this by its `drain_timeout`; meanwhile say what it waits for."""
    next_look_s, said = time.monotonic() + 2.0, False
    with output.Progress() as progress:
        while is_held(home.lock):
            if time.monotonic() >= next_look_s:
                waiting = f"stopping: {_requests_left(client)} still running"
                progress.show(waiting)
                if not said:
                    progress.clear()
                    output.note(f"{waiting}; `omlxd stop --now` ends them")
                    said = True
                next_look_s = time.monotonic() + 1.0
            time.sleep(POLL_S)


def _requests_left(client: Client) -> str:
    try:
        count = len(client.get("/v1/control/requests", timeout_s=1.0)["requests"])
    except (OmlxError, KeyError):
        return "the last work is"
    return "1 request is" if count == 1 else f"{count} requests are"
