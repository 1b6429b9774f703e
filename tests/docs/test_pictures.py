"""The pictures of the README: there, drawn from a whole run, and fetching nothing."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PICTURES = [ROOT / name for name in re.findall(r'(?:src|srcset)="([^"]+\.svg)"', README)]


def test_there_is_one_for_light_pages_and_one_for_dark_ones() -> None:
    assert [path.name for path in PICTURES] == ["status-dark.svg", "status-light.svg"]


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_shows_a_load_a_request_and_a_decision_and_fetches_nothing(path: Path) -> None:
    drawn = ET.fromstring(path.read_text(encoding="utf-8"))
    text = "".join(drawn.itertext()).replace("\xa0", " ")
    for shown in ("omlxd", "ready", "loading", "decode", "pinned", "last decisions", "unloaded `"):
        assert shown in text
    assert "url(http" not in path.read_text(encoding="utf-8")
    links = [value for each in drawn.iter() for name, value in each.attrib.items() if name.endswith("href")]
    assert all(link.startswith("#") for link in links)
