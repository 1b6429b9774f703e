"""`omlxd start stop restart`: the life of the daemon process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from omlxd.cli import output
from omlxd.cli.before_restart import require_startable
from omlxd.cli.client import Client
from omlxd.cli.holder import holder_of, is_held
from omlxd.cli.invocation import client_of, home_of
from omlxd.cli.limit import check_size
from omlxd.cli.options import ManifestFile
from omlxd.cli.process import POLL_S, StartOptions, exec_foreground, start_detached, wait_until_gone
from omlxd.cli.values import number
from omlxd.core.errors import AlreadyRunning, DaemonNotRunning, InvalidRequest, NotPermitted, OmlxError, Unreachable
from omlxd.core.events import EventName
from omlxd.core.manifest import Restore
from omlxd.core.memory import Policy
from omlxd.core.states import DaemonState, EntryState
from omlxd.core.units import format_bytes
from omlxd.core.wording import named
from omlxd.daemon.home import Home

if TYPE_CHECKING:
    from omlxd.cli.supervised import Service

END_TIMEOUT_S: Final = 30.0
SILENT_S: Final = 2.0  # a drain that is shorter is not worth a word
STOP: Final = "/v1/control/stop"

MaxMemory = Annotated[
    str | None, typer.Option("--max-memory", metavar="SIZE", help="Memory limit: 8G, 8GB, 75%, bytes, `auto` or 0.")
]
HardLimit = Annotated[
    str | None, typer.Option("--hard-limit", metavar="SIZE", help="What loads and prompts may never pass.")
]
PolicyName = Annotated[Policy | None, typer.Option("--policy", help="How memory pressure is answered.")]
RestoreName = Annotated[
    Restore | None, typer.Option("--restore", help="What is loaded again beside the manifest's pins and preloads.")
]
Lossy = Annotated[bool, typer.Option("--force", help="Even when what was set at run time could not be saved.")]
Now = Annotated[bool, typer.Option("--now", help="End running requests instead of waiting for them.")]


def start(
    context: typer.Context,
    max_memory: MaxMemory = None,
    hard_limit: HardLimit = None,
    manifest: ManifestFile = None,
    policy: PolicyName = None,
    restore: RestoreName = None,
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay; the log goes to the terminal.")] = False,
) -> None:
    """Start the daemon and return when it answers.

    Models that it loads first are still on their way then.
    """
    options = _checked(max_memory, hard_limit, manifest, policy, restore)
    if foreground:
        exec_foreground(home_of(context), options)
    _wait_for_one_that_ends(home_of(context), client_of(context))
    _start(home_of(context), options)


def stop(context: typer.Context, now: Now = False) -> None:
    """Stop the daemon; running requests may finish first."""
    output.data(f"omlxd stopped (pid {_stop(home_of(context), client_of(context), now=now).pid})")


def restart(
    context: typer.Context,
    max_memory: MaxMemory = None,
    hard_limit: HardLimit = None,
    manifest: ManifestFile = None,
    policy: PolicyName = None,
    restore: RestoreName = None,
    now: Now = False,
    force: Lossy = False,
) -> None:
    """Stop the daemon if it runs, and start it again as it was.

    It comes back with its options, pins and limits, and what it had loaded.
    """
    from omlxd.cli.supervised import service_that_runs  # asks launchd or systemd, whom no other command of here needs

    home, client = home_of(context), client_of(context)
    options = replace(_checked(max_memory, hard_limit, manifest, policy, restore), restarted=True)
    service = stopped = None
    try:
        status = _status(client)
        service = service_that_runs(home, status.get("pid"))
        if service is not None:
            _require_no_options(service, options)
        before = {**_start_of_the_last(home), **({"manifest": path} if (path := status.get("manifest")) else {})}
        environment: dict[str, str] | None = None if service is None else {}  # a service has one of its own
        require_startable(home, options, before, environment, listening=status.get("api"))
        stopped = _stop(home, client, now=now, restart={"restart": True, "force": True} if force else {"restart": True})
        options = options.over(stopped.options)
        output.note(f"omlxd stopped (pid {stopped.pid})")
    except DaemonNotRunning:
        before = {key: value for key, value in _start_of_the_last(home).items() if getattr(options, key, "") is None}
        options = options.over(before)
        output.note("the daemon was not running" + (f"; its start said: {_said(before)}" if before else ""))
    if service is None:
        _start_again(home, client, options, since=stopped)
    else:
        found = service.start()
        if stopped is not None and stopped.unsaved_limit is not None:  # a service's command line says no other one
            body = {"max_memory": stopped.unsaved_limit, "force": True}
            for warning in client.call("PATCH", "/v1/control/limits", body, timeout_s=None).get("warnings", ()):
                output.warn(warning)
        output.sentence(answering_line(found, client))


def _start_of_the_last(home: Home) -> Mapping[str, str]:
    """What the daemon that runs, or that did not end in order, was told at its start; else nothing."""
    from omlxd.daemon.state_text import parse_state

    try:
        return parse_state(home.state.read_text(encoding="utf-8")).start if home.state.is_file() else {}
    except (OSError, ValueError):
        return {}


def _said(options: Mapping[str, str]) -> str:
    return " ".join(f"--{key.replace('_', '-')} {value}" for key, value in options.items())


def _status(client: Client) -> Mapping[str, Any]:
    """What the daemon says of itself; nothing when it does not answer, and is ended all the same."""
    try:
        return client.get("/v1/control/status")
    except Unreachable:
        return {}


def _require_no_options(service: Service, options: StartOptions) -> None:
    """A service is started with the options that its file has."""
    if options != StartOptions(restarted=True):
        raise InvalidRequest(
            f"{service.host.kind} runs this daemon as `{service.name}`, and starts it with the options of its service",
            hint="put them into the manifest; or `omlxd stop`, then `omlxd start` with these options",
        )


def _checked(
    max_memory: str | None,
    hard_limit: str | None,
    manifest: Path | None,
    policy: Policy | None,
    restore: Restore | None,
) -> StartOptions:
    for size in (max_memory, hard_limit):
        if size is not None:
            check_size(size)
    return StartOptions(manifest=manifest, max_memory=max_memory, hard_limit=hard_limit, policy=policy, restore=restore)


def _start(home: Home, options: StartOptions) -> None:
    ready = start_detached(home, options)
    for warning in ready.get("warnings", ()):
        output.warn(warning)
    output.sentence(answering_line(ready, Client(home.socket)))
    _tell_what_was_kept(home, options)


def _start_again(home: Home, client: Client, options: StartOptions, *, since: Stopped | None) -> None:
    """`restart`'s start; another `restart` that came at the same time may have done it."""
    try:
        _start(home, options)
    except AlreadyRunning:
        holder = holder_of(home.lock)
        if holder is None or holder.pid is None or (since is not None and holder.pid == since.pid):
            raise
        output.note("another command has started it in the meantime, with the options that it was given")
        output.sentence(answering_line({"pid": holder.pid}, client))


def _wait_for_one_that_ends(home: Home, client: Client) -> None:
    """A daemon that drains makes way by itself: a start that came too early waits for it."""
    if (holder := holder_of(home.lock)) is None or holder.pid is None:
        return
    try:
        draining = client.get("/v1/control/status", timeout_s=2.0).get("state") == DaemonState.DRAINING.value
    except OmlxError:
        return  # it ends, or it begins: who starts a second one is told
    if draining:
        output.note(f"omlxd is stopping (pid {holder.pid}); it is started again when that is done")
        _wait_for_drain(home, client, _STOP_NOW)
        wait_until_gone(home, holder.pid, timeout_s=END_TIMEOUT_S)


def _tell_what_was_kept(home: Home, options: StartOptions) -> None:
    """Where the limit and the pins come from, when neither these options nor the manifest say it."""
    from omlxd.daemon.state_file import read_state

    saved = read_state(home.state)
    if saved.limit is None and not saved.pins:
        return
    from omlxd.daemon.manifest_file import read_manifest  # pydantic: 60 ms, where something is saved

    try:
        manifest = read_manifest(options.path(home))
    except OmlxError:
        return  # it was edited since the daemon read it
    if options.max_memory is None and (origin := saved.limit_origin(str(manifest.daemon.max_memory))):
        output.note(f"the limit was {origin}")
    if pins := saved.pins_origin(manifest):
        output.note(f"kept: {pins}")


def answering_line(ready: Mapping[str, Any], client: Client) -> str:
    """`omlxd answers: pid 123, limit 8.00 GiB, api http://127.0.0.1:8321; loading `chat``.

    Args:
        ready: the daemon's ready line, with the models that it loads first; or what is known in its place.
        client: asks for the limit, and for what is being loaded where the ready line does not say it.
    """
    parts, loading = [f"pid {ready['pid']}"], ready.get("loading")
    try:
        status = client.get("/v1/control/status", timeout_s=2.0)
        soft_bytes = status["memory"]["soft_limit"]
        parts.append(f"limit {format_bytes(soft_bytes)}" if soft_bytes else "no limit")
        if loading is None:
            loading = [model["name"] for model in status["models"] if model["state"] == EntryState.LOADING.value]
    except (OmlxError, KeyError):
        pass  # it answers, which is what was asked; the rest is only good to know
    if ready.get("api"):
        parts.append(f"api http://{ready['api']}")
    return f"omlxd answers: {', '.join(parts)}" + (f"; loading {named(loading)}" if loading else "")


@dataclass(frozen=True, slots=True)
class Stopped:
    """The daemon that was stopped: its process, and what its start was told, where it could still say.

    `unsaved_limit` was set at run time, and its successor cannot know of it.
    """

    pid: int
    options: Mapping[str, Any] = field(default_factory=dict)
    unsaved_limit: str | None = None


def _stop(home: Home, client: Client, *, now: bool, restart: Mapping[str, bool] | None = None) -> Stopped:
    options, unsaved_limit, since = dict[str, Any](), None, time.time()
    try:
        answer = _ask_to_stop(client, now=now, restart=restart)
        pid, options, unsaved_limit = int(answer["pid"]), answer.get("options", {}), answer.get("unsaved_limit")
    except Unreachable as error:
        holder = holder_of(home.lock)
        if holder is None or holder.pid is None:
            raise
        pid = holder.pid
        if "holder_pid" not in error.details:  # it has a socket, and is stuck behind it
            raise Unreachable(error.message, hint=f"`kill -9 {pid}` ends it") from error
        _signal(pid, now=now)
    if not now:
        _wait_for_drain(home, client, _RESTART_NOW if restart else _STOP_NOW)
    if not wait_until_gone(home, pid, timeout_s=END_TIMEOUT_S):
        raise Unreachable(f"the daemon did not end within {END_TIMEOUT_S:g} s", hint=f"`kill -9 {pid}` ends it")
    if cut := _requests_cut(home, since):
        output.note(f"{cut} cut")
    return Stopped(pid, options, unsaved_limit)


def _requests_cut(home: Home, since: float) -> str:
    """What the daemon that has just ended says of it in its log; empty when it cut nothing, or does not say."""
    from omlxd.cli.event_sentences import requests_cut
    from omlxd.cli.log_lines import Log

    try:
        for line in Log(home.log).newest_first(since=since - 1.0):  # the clock of files may be a little behind
            if (number(line.record.get("ts")) or 0.0) < since:
                break
            if line.record["event"] == EventName.DAEMON_STOPPED:
                return requests_cut(line.record)
    except (OmlxError, OSError):
        pass  # it has ended, which is what was asked
    return ""


def _ask_to_stop(client: Client, *, now: bool, restart: Mapping[str, bool] | None) -> dict[str, Any]:
    body = {"now": now}
    if restart:
        try:
            return client.call("POST", STOP, {**body, **restart})
        except InvalidRequest:
            pass  # a daemon from before an upgrade, which does not know the word
    return client.call("POST", STOP, body)


def _signal(pid: int, *, now: bool) -> None:
    """Ask a daemon without a socket; asked a second time it does not wait for requests."""
    # Two kinds, since the kernel keeps only one of a kind until the process has seen it.
    for each in (signal.SIGTERM, signal.SIGINT) if now else (signal.SIGTERM,):
        try:
            os.kill(pid, each)
        except ProcessLookupError:
            return
        except PermissionError as error:
            raise NotPermitted(f"the daemon (pid {pid}) belongs to another user", hint="ask its owner") from error


_STOP_NOW = "`omlxd stop --now` ends them"
_RESTART_NOW = "Ctrl-C, then `omlxd restart --now` ends them"  # `stop` would leave this restart to start it again


def _wait_for_drain(home: Home, client: Client, way_out: str) -> None:
    """The daemon bounds this by its `drain_timeout`; meanwhile say what it waits for, and the way out of it."""
    next_look_s, said = time.monotonic() + SILENT_S, False
    with output.Progress() as progress:
        while is_held(home.lock):
            if time.monotonic() >= next_look_s:
                left = _requests_left(client)
                waiting = f"stopping: {left} still running" if left else "stopping: what was loaded is let go"
                progress.show(waiting)
                if left and not said:
                    progress.clear()
                    output.note(f"{waiting}; {way_out}")
                    said = True
                next_look_s = time.monotonic() + 1.0
            time.sleep(POLL_S)


def _requests_left(client: Client) -> str:
    """`2 requests are`; empty when none is, and only the end of the process is waited for."""
    try:
        count = len(client.get("/v1/control/requests", timeout_s=1.0)["requests"])
    except (OmlxError, KeyError):
        return "the last work is"
    if not count:
        return ""
    return "1 request is" if count == 1 else f"{count} requests are"
