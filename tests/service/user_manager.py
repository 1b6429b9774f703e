"""A real `systemd --user` in namespaces of its own, and commands that run beside it.

It has its own processes, mounts, `/run` and control groups, so that it meets nothing of the machine's systemd; files
elsewhere, the home directory of its user above all, are the machine's and outlive it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

MANAGER = Path("/usr/lib/systemd/systemd")
RUNTIME = "/run/user/0"
TIMEOUT_S = 30.0
NEEDED = ("unshare", "nsenter", "systemctl", "mount")

# The control groups are our own branch, which becomes the root of the namespace; the name keeps several runs apart.
_ENTER = """
set -eu
for root in /sys/fs/cgroup/systemd /sys/fs/cgroup/unified /sys/fs/cgroup; do
    if [ -e "$root/cgroup.procs" ]; then
        mkdir "$root/$1"
        echo $$ > "$root/$1/cgroup.procs"
    fi
done
exec unshare --pid --mount --cgroup --fork --kill-child=KILL --mount-proc --propagation private sh -c "$2"
"""
_INSIDE = f"""
set -eu
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system {RUNTIME}
chmod 700 {RUNTIME}
if [ -e /sys/fs/cgroup/systemd ]; then
    umount -R /sys/fs/cgroup
    mount -t tmpfs tmpfs /sys/fs/cgroup
    mkdir /sys/fs/cgroup/systemd /sys/fs/cgroup/unified
    mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified
    mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
else
    umount /sys/fs/cgroup
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
fi
{MANAGER} --user --log-target=console --log-level=notice &
wait
"""


class CannotRun(Exception):
    """Why there is no manager of our own on this machine."""


@dataclass
class UserManager:
    """One that runs, and how it is left."""

    process: subprocess.Popen[bytes]
    inside: int
    environment: dict[str, str]

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command beside it, as its user would."""
        enter = ("nsenter", "--target", str(self.inside), "--pid", "--mount", "--cgroup", "--")
        done = subprocess.run(
            [*enter, *command],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S * 2,
            check=False,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def systemctl(self, *words: str, check: bool = True) -> str:
        """What `systemctl --user` prints."""
        return self.run("systemctl", "--user", *words, check=check).stdout.strip()

    def show(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.systemctl("show", "--value", "--property", name, unit)

    def until(self, unit: str, **properties: str) -> None:
        """Ask until the unit's properties are these."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while (seen := {name: self.show(unit, name) for name in properties}) != properties:
            assert time.monotonic() < deadline_s, f"{unit} is {seen}, and not {properties}"


@contextlib.contextmanager
def user_manager(home: Path, log: Path) -> Iterator[UserManager]:
    """A manager for the user whose home directory this is; all that it started is gone at the end.

    Args:
        home: an absolute path; units are below `.config/systemd/user`.
        log: where the manager and its services write.

    Raises:
        CannotRun: this machine does not let us.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        raise CannotRun("needs Linux, and root for namespaces of its own")
    if missing := [name for name in NEEDED if shutil.which(name) is None] or [MANAGER] * (not MANAGER.exists()):
        raise CannotRun(f"needs {missing[0]}")
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    environment = kept | {"HOME": str(home), "XDG_RUNTIME_DIR": RUNTIME, "LC_ALL": "C.UTF-8", "SYSTEMD_PAGER": ""}
    group = f"omlxd-test-{secrets.token_hex(4)}"
    with log.open("ab") as output:
        process = subprocess.Popen(
            ["sh", "-c", _ENTER, "sh", group, _INSIDE],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield _ready(process, environment, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(TIMEOUT_S)
        _remove(group)


def _ready(process: subprocess.Popen[bytes], environment: dict[str, str], log: Path) -> UserManager:
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(process.pid).children():
                manager = UserManager(process, child.pid, environment)
                if manager.systemctl("is-system-running", check=False) in ("running", "degraded"):
                    return manager
    raise CannotRun(f"systemd --user does not run here: {log.read_text(errors='replace')[-500:].strip()}")


def _remove(group: str) -> None:
    """Its control groups, innermost first; they are empty once its processes are gone."""
    for root in ("systemd", "unified", ""):
        top = Path("/sys/fs/cgroup") / root / group
        for folder, _, _ in os.walk(top, topdown=False):
            deadline_s = time.monotonic() + TIMEOUT_S
            while time.monotonic() < deadline_s:
                try:
                    Path(folder).rmdir()
                except OSError as error:
                    if error.errno == errno.EBUSY:
                        continue
                break
