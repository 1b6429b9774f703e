"""The plist and the unit in `examples/` are what `omlxd service install` writes; UPDATE_GOLDEN=1 writes them anew."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from omlxd.daemon.__main__ import _parser
from omlxd.service.launchd import plist_text
from omlxd.service.systemd import unit_text
from tests.service.specs import PLAIN

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "text"), [("org.omlxd.plist", plist_text(PLAIN)), ("omlxd.service", unit_text(PLAIN, 252))]
)
def test_the_example_is_what_would_be_written(name: str, text: str) -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        (EXAMPLES / name).write_text(text, encoding="utf-8")
    assert (EXAMPLES / name).read_text(encoding="utf-8") == text


def test_the_homebrew_block_runs_the_daemon_with_options_that_exist() -> None:
    block = re.search(r"^service do\n(.*?)^end$", (EXAMPLES.parent / "README.md").read_text(), re.M | re.S)
    assert block is not None
    words = re.findall(r'"([^"]+)"', block[1].partition("\n")[0])
    assert words[:4] == ["bin/python", "-P", "-m", "omlxd.daemon"]
    assert _parser().parse_args(words[4:]).supervisor == "launchd"
    assert "keep_alive successful_exit: false" in block[1]
