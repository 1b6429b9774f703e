"""A home with a short path, the fake daemon in it, and the real command as a process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from omlxd.cli.entry import main
from tests.cli.fake_daemon import FakeDaemon

GOLDEN = Path(__file__).parent / "golden"

Omlxd = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def home() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="omlxd-t-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def fake(home: Path) -> Iterator[FakeDaemon]:
    daemon = FakeDaemon(home / "omlxd.sock")
    yield daemon
    daemon.close()


@pytest.fixture
def environment(home: Path) -> dict[str, str]:
    """What the command sees: no colours, 100 columns, UTC, a UTF-8 locale, and warnings as errors."""
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "PYTHONPATH", "TMPDIR")}
    golden = {"NO_COLOR": "1", "COLUMNS": "100", "TERM": "dumb", "TZ": "UTC", "LC_ALL": "C.UTF-8"}
    return kept | golden | {"OMLXD_HOME": str(home), "PYTHONWARNINGS": "error", "PYTHONUTF8": "1"}


@pytest.fixture
def omlxd(environment: dict[str, str], capsys: pytest.CaptureFixture[str]) -> Omlxd:
    """The command in this process, ten times faster than in one of its own; standard input is empty or a text."""

    def call(*arguments: str, stdin: str = "", **more: str) -> subprocess.CompletedProcess[str]:
        with pytest.MonkeyPatch.context() as here, tempfile.TemporaryFile("w+", encoding="utf-8") as typed:
            for name in os.environ.keys() - environment.keys():
                if not name.startswith(("PYTEST", "PYTHON")):
                    here.delenv(name)
            for name, value in (environment | more).items():
                here.setenv(name, value)
            typed.write(stdin)
            typed.seek(0)
            here.setattr(sys, "stdin", typed)
            here.setattr(sys, "argv", ["omlxd", *arguments])
            time.tzset()
            capsys.readouterr()
            status: object = 1
            try:
                main()
            except SystemExit as ended:
                status = ended.code
            except Exception:
                traceback.print_exc()  # as the interpreter does
        time.tzset()
        written = capsys.readouterr()
        assert isinstance(status, int)
        return subprocess.CompletedProcess(arguments, status, written.out, written.err)

    return call


@pytest.fixture
def omlxd_process(environment: dict[str, str]) -> Omlxd:
    """The command as a user has it: a process of its own, with pipes."""

    def call(*arguments: str, stdin: str | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "omlxd", *arguments],
            capture_output=True,
            text=True,
            env=environment | more,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            timeout=60,
            check=False,
        )

    return call


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compares with `golden/NAME.txt`; UPDATE_GOLDEN=1 writes it instead."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        if os.environ.get("UPDATE_GOLDEN"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8")

    return compare
