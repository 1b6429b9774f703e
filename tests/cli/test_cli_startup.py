"""Start-up is a feature: what a command imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.fake_daemon import DECISION, FakeDaemon

HEAVY = {"mlx", "mlx_lm", "starlette", "uvicorn", "pydantic", "asyncio", "psutil", "structlog", "rich", "numpy"} | {
    "prompt_toolkit",
    "tomlkit",
    "huggingface_hub",
}

PROBE = """
import sys
from omlxd.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
sys.stderr.write(",".join(sys.modules))
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["status", "--json"],
        ["--help"],
        ["models", "--json"],
        ["requests", "--json"],
        ["limit"],
        ["logs"],
        ["logs", "--since", "10m"],
        ["events", "--help"],
        ["why"],
        ["why", "chat", "--json"],
        ["--version"],
    ],
    ids=" ".join,
)
def test_a_quick_command_imports_nothing_heavy(
    fake: FakeDaemon, home: Path, environment: dict[str, str], arguments: list[str]
) -> None:
    (home / "logs").mkdir()
    (home / "logs" / "omlxd.jsonl").write_text(json.dumps(DECISION | {"for_model": "chat"}) + "\n")
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    imported = {name.partition(".")[0] for name in done.stderr.split(",")}
    assert "omlxd" in imported
    assert not imported & HEAVY


COMPLETION = """
import sys
from omlxd.cli.entry import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
sys.stderr.write(",".join(sys.modules))
"""


@pytest.mark.parametrize(
    ("words", "spared"),
    [(["omlxd", ""], "json"), (["omlxd", "load", ""], "typer"), (["omlxd", "load", "--"], "http")],
    ids=["commands", "models", "options"],
)
def test_a_tab_imports_nothing_heavy(
    fake: FakeDaemon, environment: dict[str, str], words: list[str], spared: str
) -> None:
    tab = {
        "_OMLXD_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPLETION], env=environment | tab, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split()
    imported = {name.partition(".")[0] for name in done.stderr.split(",")}
    assert "omlxd" in imported
    assert not imported & (HEAVY | {spared})


def test_a_table_costs_rich_and_nothing_more(fake: FakeDaemon, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, "status"], env=environment, capture_output=True, text=True, timeout=60
    )
    imported = {name.partition(".")[0] for name in done.stderr.split(",")}
    assert imported & HEAVY == {"rich"}


ENTRY = """
import sys
from omlxd.cli.entry import main
try:
    main()
except SystemExit as end:
    sys.stderr.write(f"{end.code}," + ",".join(sys.modules))
"""


def test_the_status_that_scripts_ask_for_is_answered_without_the_command_line_library(
    fake: FakeDaemon, environment: dict[str, str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENTRY, "status", "--json"], env=environment, capture_output=True, text=True, timeout=60
    )
    status, *imported = done.stderr.split(",")
    assert status == "0"
    assert "typer" not in imported
    assert json.loads(done.stdout)["schema"] == 1


def test_what_goes_wrong_with_it_is_told_by_the_whole_command_line(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "omlxd", "status", "--json"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3
    assert done.stdout == ""
    assert "hint: " in done.stderr


def test_the_list_of_commands_has_no_summary_that_is_cut(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "omlxd", "--help"],
        env=environment | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    commands = done.stdout.partition("Commands:\n")[2]
    assert len(commands.splitlines()) > 20
    assert "..." not in commands
