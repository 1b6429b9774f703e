"""Stands in for `systemctl --user`: enables by a file, starts what the unit says, keeps its states in a folder.

Run as a program: `python fake_systemctl.py FOLDER ARGUMENTS...`.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path


def main(folder: Path, arguments: list[str]) -> int:
    with (folder / "calls").open("a") as calls:
        calls.write(" ".join(arguments) + "\n")
    if arguments == ["--version"]:
        print("systemd 252 (252.38)")  # noqa: T201
        return 0
    if (folder / "broken").exists():
        print("Failed to connect to bus: No medium found", file=sys.stderr)  # noqa: T201
        return 1
    verb, unit = arguments[1], arguments[-1]
    units = Path(os.environ["HOME"]) / ".config" / "systemd" / "user"
    match verb:
        case "enable":
            (folder / "enabled").touch()
        case "disable":
            (folder / "enabled").unlink(missing_ok=True)
            _stop(folder)
        case "start":
            _start(folder, (units / unit).read_text())
        case "stop":
            _stop(folder)
        case "show":
            _show(folder)
    return 0


def _start(folder: Path, unit: str) -> None:
    (line,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    with (folder / "journal").open("ab") as journal:
        process = subprocess.Popen(
            shlex.split(line.removeprefix("ExecStart=")),
            stdin=subprocess.DEVNULL,
            stdout=journal,
            stderr=journal,
            start_new_session=True,
        )
    (folder / "pid").write_text(str(process.pid))
    process.returncode = 0  # it outlives this call


def _pid(folder: Path) -> int:
    try:
        pid = int((folder / "pid").read_text())
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (OSError, ValueError):
        return 0
    return 0 if state == "Z" else pid


def _stop(folder: Path) -> None:
    if pid := _pid(folder):
        os.kill(pid, signal.SIGTERM)
        while _pid(folder):
            pass


def _show(folder: Path) -> None:
    pid = _pid(folder)
    state = "active" if pid else "failed" if (folder / "pid").exists() else "inactive"
    enabled = "enabled" if (folder / "enabled").exists() else "disabled"
    print(f"ActiveState={state}\nUnitFileState={enabled}\nMainPID={pid}\nExecMainStatus=0")  # noqa: T201


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
