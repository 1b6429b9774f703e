"""The views on the wire."""

from __future__ import annotations

import json
from dataclasses import asdict

from tests.cli.fake_daemon import STATUS, status_json


def test_a_status_on_the_wire_has_every_field_of_every_view() -> None:
    told = status_json()
    assert next(iter(told)) == "schema"
    views = {name: [asdict(view) for view in getattr(STATUS, name)] for name in ("models", "requests")}
    assert told == json.loads(json.dumps({**asdict(STATUS), **views}))
