"""What is installed beside the code."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_manual_page_is_installed_where_man_looks_for_it() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    installed = build["targets"]["wheel"]["shared-data"]
    pages = sorted((ROOT / "man").glob("*.[1-9]"))
    assert pages
    assert installed == {f"man/{page.name}": f"share/man/man{page.suffix[1:]}/{page.name}" for page in pages}
