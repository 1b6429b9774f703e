"""Starting a daemon process that outlives the command, and waiting until one is gone."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, Final

import omlxd
from omlxd.cli.holder import is_held
from omlxd.cli.values import number
from omlxd.core.errors import ManifestInvalid, OmlxError, StartFailed, from_json
from omlxd.daemon.files import cannot_write, open_regular
from omlxd.daemon.home import Home

READY_TIMEOUT_S: Final = 120.0
POLL_S: Final = 0.05
GIVEN_UP_S: Final = 10.0
_TAIL_BYTES: Final = 4000
_LARGEST_ERR_BYTES: Final = 2**20
LAST_LINES: Final = 12


@dataclass(frozen=True, slots=True)
class StartOptions:
    """What `start` passes on; sizes as the user wrote them, None for what the manifest says.

    `restarted` says that the daemon takes the place of one that was stopped for it.
    """

    manifest: Path | None = None
    max_memory: str | None = None
    hard_limit: str | None = None
    policy: str | None = None
    restore: str | None = None
    restarted: bool = False

    def over(self, before: Mapping[str, Any]) -> StartOptions:
        """These options, and those of the daemon before where these say nothing."""
        known = {key: value for key in ("max_memory", "hard_limit", "policy") if (value := before.get(key)) is not None}
        if isinstance(path := before.get("manifest"), str):
            known["manifest"] = Path(path)
        given = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}
        return StartOptions(**{**known, **given})

    def arguments(self, home: Home) -> list[str]:
        """The daemon's command line."""
        # -P: a `random.py` in the directory where somebody types `omlxd start` is not the daemon's.
        found = [sys.executable, "-P", "-m", "omlxd.daemon", "--home", str(home.root)]
        found += ["--manifest", str(self.path(home))]
        for option, value in (
            ("--max-memory", self.max_memory),
            ("--hard-limit", self.hard_limit),
            ("--policy", self.policy),
            ("--restore", self.restore),
        ):
            if value is not None:
                found += [option, value]
        return [*found, "--restarted"] if self.restarted else found

    def path(self, home: Home) -> Path:
        """The manifest, absolute: the daemon works elsewhere."""
        return self.manifest.expanduser().absolute() if self.manifest is not None else home.manifest


def start_detached(home: Home, options: StartOptions) -> dict[str, Any]:
    """Start a daemon in a session of its own and wait for its ready line, which is returned.

    Raises:
        ManifestInvalid: there is no manifest, or the daemon refuses it.
        StartFailed: it died, or did not answer within `READY_TIMEOUT_S`.
        OmlxError: whatever else the daemon says.
    """
    from omlxd.daemon.sockets import prepare_home

    require_manifest(options.path(home))
    prepare_home(home)
    process, began = None, time.time()
    with _err_file(home.daemon_err) as err:
        err_start = err.tell()
        reader, writer = os.pipe()
        try:
            try:
                process = subprocess.Popen(
                    [*options.arguments(home), "--ready-fd", str(writer)],
                    stdin=subprocess.DEVNULL,
                    stdout=err,
                    stderr=err,
                    cwd=home.root,
                    env=environment(),
                    pass_fds=[writer],
                    start_new_session=True,
                )
            finally:
                os.close(writer)  # or the end of the daemon would never be the end of the pipe
            line = _first_line(reader)
        except BaseException:  # Ctrl-C too: nobody is left who would know of it
            if process is not None:
                _give_up(process)
            raise
        finally:
            os.close(reader)
    ready = _parsed(line)
    if ready is None:
        raise _died(process.wait(), home, err_start, began)
    if "error" in ready:
        process.wait()
        raise from_json(ready["error"])
    process.returncode = 0  # it is meant to outlive us: no "still running" warning when this object goes
    return ready


def exec_foreground(home: Home, options: StartOptions) -> None:
    """Become the daemon: for launchd, systemd and debugging."""
    require_manifest(options.path(home))
    sys.stdout.flush()
    os.execve(sys.executable, [*options.arguments(home), "--foreground"], environment())


def require_manifest(path: Path) -> None:
    """Raises ManifestInvalid when there is no file, before a process is started for it."""
    if not path.exists():
        raise ManifestInvalid(f"the manifest `{path}` does not exist", hint="`omlxd init` writes one")


def wait_until_gone(home: Home, pid: int, *, timeout_s: float) -> bool:
    """Wait until nobody holds the home's lock and the process has ended too; False when it took longer."""
    deadline_s = time.monotonic() + timeout_s
    while is_held(home.lock) or is_alive(pid):
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(POLL_S)
    return True


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended counts as gone even when nobody has asked for its status yet."""
    try:
        return os.waitpid(pid, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        pass  # started by another command
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1]
    except FileNotFoundError:
        return True  # macOS: there is no /proc, and launchd leaves no zombies
    except OSError:
        return False
    return state != b"Z"


def environment() -> dict[str, str]:
    """Our environment; a checkout that is not installed is named, since the daemon works in another directory."""
    found = dict(os.environ)
    root = Path(omlxd.__file__).resolve().parent.parent
    if root.name not in ("site-packages", "dist-packages"):
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), found.get("PYTHONPATH")]))
    return found


def _err_file(path: Path) -> Any:
    """Opened for appending: a start that fails must not wipe what a running daemon wrote."""
    try:
        if path.exists() and path.stat().st_size > _LARGEST_ERR_BYTES:
            path.replace(path.with_name(path.name + ".1"))
        return os.fdopen(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")
    except OSError as error:
        raise cannot_write(error, path) from error


def _give_up(process: subprocess.Popen[bytes]) -> None:
    """End a daemon that nobody waits for any more; one that does not listen is killed, at a second Ctrl-C at once."""
    process.terminate()
    try:
        process.wait(GIVEN_UP_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()


def _first_line(reader: int) -> bytes:
    """What the daemon wrote until its newline, or until the pipe ended."""
    found, deadline = b"", time.monotonic() + READY_TIMEOUT_S
    while not found.endswith(b"\n"):
        readable, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            raise StartFailed(
                f"the daemon did not answer within {READY_TIMEOUT_S:g} s", hint="`omlxd start --foreground` shows more"
            )
        piece = os.read(reader, 65_536)
        if not piece:
            break
        found += piece
    return found


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _died(status: int, home: Home, err_start: int, began: float) -> StartFailed:
    """With its last words: what it wrote outside of its log, else the end of its log."""
    how = f"by signal {-status}" if status < 0 else f"with status {status}"
    err = home.daemon_err
    tail = _tail(err, err_start) or [*_last_events(home.log, began)][::-1]
    quoted = "".join(f"\n  | {line}" for line in tail[-LAST_LINES:])
    return StartFailed(
        f"the daemon ended {how} before it answered{':' if quoted else ''}{quoted}",
        hint=f"`omlxd start --foreground` shows more; its output is in `{err}`",
        details={"status": status},
    )


def _last_events(log: Path, began: float) -> Iterator[str]:
    """The newest lines of the log since then, newest first."""
    from omlxd.cli.log_lines import Log  # a daemon that starts needs neither
    from omlxd.cli.sentences import event_line

    try:
        for line in islice(Log(log).newest_first(since=began), LAST_LINES):
            if (number(line.record.get("ts")) or 0.0) < began:
                return
            yield event_line(line.record)
    except OmlxError:
        return  # a log that may not be read


def _tail(path: Path, start: int) -> Sequence[str]:
    with path.open("rb") as file:
        file.seek(max(start, path.stat().st_size - _TAIL_BYTES))
        return file.read().decode("utf-8", "replace").splitlines()
