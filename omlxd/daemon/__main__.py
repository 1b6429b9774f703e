"""The daemon's process: `python -m omlxd.daemon --home DIR --manifest FILE ...`; `omlxd start` starts it.

Exit status: 0 after a drain, 1 when a second signal (or `stop --now`) cut it short or it could not start, and the
error's own where it has one (2 a bad option, 78 a bad manifest, 130 interrupted before it had begun). With
`--supervisor` an end that was asked for is always 0, and under launchd a bad manifest or limit too: whatever else it
ends with makes a supervisor start it again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from omlxd.core.errors import InvalidRequest, ManifestInvalid, OmlxError, StartFailed
from omlxd.core.events import EventLevel
from omlxd.core.manifest import Restore
from omlxd.core.memory import Policy
from omlxd.daemon.home import find_home
from omlxd.daemon.journal import journal_of, with_priority
from omlxd.daemon.notify import take_service_manager
from omlxd.engine.lasting_imports import lasting_imports


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the daemon until it is told to stop, and end the process; returns the exit status if it could not start."""
    options = _parser().parse_args(arguments)
    with contextlib.suppress(OSError, ValueError):  # there is no stderr that it could write to
        faulthandler.enable()  # a crash inside MLX, or a watchdog's SIGABRT, says where every thread was
    ready = _ReadyLine(options.ready_fd)
    try:
        _serve(options, ready)
    except OmlxError as error:
        _tell(error)
        ready.write({"error": error.to_json()})
        # systemd can tell this status from a crash (RestartPreventExitStatus); launchd knows success and failure only.
        hopeless = options.supervisor == "launchd" and isinstance(error, ManifestInvalid | InvalidRequest)
        return 0 if hopeless else error.exit_status
    except OSError as error:  # the starter is told by the pipe, since a full disk may have no room for a traceback
        failed = StartFailed(
            f"the daemon could not start: {error}", hint="`omlxd doctor` looks at the home and the disk"
        )
        ready.write({"error": failed.to_json()})
        raise
    except KeyboardInterrupt:
        return 130  # so early that there was nothing to drain
    finally:
        ready.close()


def _serve(options: argparse.Namespace, ready: _ReadyLine) -> NoReturn:
    with lasting_imports():
        from omlxd.daemon.awake_clock import AwakeEventLoop
        from omlxd.daemon.lifecycle import DaemonConfig, serve  # 200 ms and 30 MB that `--help` does not need
        from omlxd.daemon.log_console import Console

    config = DaemonConfig(
        home=find_home(options.home),
        manifest=options.manifest.expanduser().absolute() if options.manifest else None,
        max_memory=options.max_memory,
        hard_limit=options.hard_limit,
        policy=None if options.policy is None else Policy(options.policy),
        restore=None if options.restore is None else Restore(options.restore),
        restarted=options.restarted,
    )
    console = None
    if (journal := journal_of(os.environ)) is not None:
        console = Console(journal, journal=True)
    elif options.foreground:
        console = Console(sys.stderr)
    manager = take_service_manager(os.environ)

    async def run() -> NoReturn:
        ended = await serve(
            config,
            on_ready=lambda now: ready.write(now.to_json()),
            manager=manager,
            console=console,
            handle_signals=True,
            keep_lock=True,
        )
        _leave(1 if ended.cut_short and options.supervisor is None else 0)

    with asyncio.Runner(loop_factory=AwakeEventLoop) as runner:
        runner.run(run())


def _leave(status: int) -> NoReturn:
    """End without waiting for threads: a worker stuck on a dead disk or a step that never returns would keep us here.

    Everything is closed; the kernel drops the lock with the process.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


class _ReadyLine:
    """The one line that tells the starter how it went."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        if fd is not None:
            try:
                os.set_inheritable(fd, False)
            except OSError:
                self._fd = None

    def write(self, content: dict[str, Any]) -> None:
        """Write the line, once, and close; a starter that has gone away is no reason to stop."""
        if self._fd is None:
            return
        try:
            os.write(self._fd, json.dumps(content).encode() + b"\n")
        except OSError:
            pass
        self.close()

    def close(self) -> None:
        """The end without a line means that the daemon died."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _tell(error: OmlxError) -> None:
    lines = [f"error: {error.message}"]
    if isinstance(error, ManifestInvalid):
        lines += [f"  {problem}" for problem in error.problems]
    if error.hint:
        lines.append(f"hint: {error.hint}")
    text = "\n".join(lines)
    if journal_of(os.environ, [sys.stderr]) is not None:
        text = with_priority(EventLevel.ERROR, text)
    sys.stderr.write(f"{text}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m omlxd.daemon", description="The omlxd daemon, in the foreground.")
    parser.add_argument("--home", metavar="DIR", help="default: $OMLXD_HOME, else ~/.omlxd")
    parser.add_argument("--manifest", metavar="FILE", type=Path, help="default: omlxd.toml at home")
    parser.add_argument("--max-memory", metavar="SIZE", help="the soft limit: 8G, 8GB, 75%%, bytes, auto or 0")
    parser.add_argument("--hard-limit", metavar="SIZE", help="what loads and prompts may never pass")
    parser.add_argument("--policy", choices=[policy.value for policy in Policy], help="how memory pressure is answered")
    parser.add_argument("--restore", choices=[each.value for each in Restore], help="what is loaded at the start")
    parser.add_argument("--restarted", action="store_true", help="it takes the place of one that was stopped for it")
    parser.add_argument("--ready-fd", metavar="FD", type=int, help="where to write one JSON line when it is ready")
    parser.add_argument("--supervisor", choices=["launchd", "systemd"], help="who starts it again when it fails")
    parser.add_argument("--foreground", action="store_true", help="show events on stderr; a journal has them anyway")
    return parser


if __name__ == "__main__":
    sys.exit(main())
