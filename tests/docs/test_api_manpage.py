"""omlxd-api(7) against the code: every route, body field and error code, no other, and clean mdoc."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from omlxd.core import errors
from omlxd.core.errors import OmlxError
from omlxd.daemon import (
    anthropic_api,
    connection,
    control_api,
    front_door,
    http_errors,
    metrics,
    openai_api,
    openapi,
    server,
)
from omlxd.daemon.bodies import MOST_MESSAGES
from omlxd.daemon.openapi import OPERATIONS

PAGE = Path(__file__).parents[2] / "man" / "omlxd-api.7"
TEXT = PAGE.read_text()
NOBODY: Any = None  # the routes are listed and not asked
BODIES = {f"{each.method} {each.path}": each.body for each in OPERATIONS if each.body is not None}
ELSEWHERE = {"daemon_not_running", "already_running", "start_failed", "unreachable"}
"""Errors of the command line and of the start, which no HTTP answer carries."""


def names(routes: list[Route]) -> list[str]:
    """`GET /path` of each route; HEAD comes with GET."""
    return [f"{method} {route.path}" for route in routes for method in sorted(route.methods or ()) if method != "HEAD"]


def entry(route: str) -> str:
    """What the page says about a route."""
    method, path = route.split()
    return TEXT.partition(f".It Sy {method} Pa {path}\n")[2].split("\n.It Sy ")[0].split("\n.Sh ")[0]


def test_every_route_is_on_the_page_in_order_and_no_other() -> None:
    described = [" ".join(found) for found in re.findall(r"^\.It Sy ([A-Z]+) Pa (\S+)$", TEXT, re.M)]
    apis = (openai_api, anthropic_api, control_api)
    other = ["GET /health", *names(metrics.routes(NOBODY)), *names(openapi.routes(control=True))]
    assert described == [*other, *(name for api in apis for name in names(api.routes(NOBODY)))]
    assert described == [f"{each.method} {each.path}" for each in OPERATIONS]


@pytest.mark.parametrize("route", BODIES)
def test_every_field_of_a_body_is_in_its_routes_entry(route: str) -> None:
    for field in BODIES[route].model_fields:
        assert re.search(rf"^\.(?:It )?Ic {field}\b", entry(route), re.M), field


def _kinds(kind: type[OmlxError]) -> list[type[OmlxError]]:
    return [kind, *(each for child in kind.__subclasses__() for each in _kinds(child))]


def test_every_error_code_stands_under_its_status_and_no_other() -> None:
    ours = [kind for kind in _kinds(OmlxError) if kind.__module__ in (errors.__name__, http_errors.__name__)]
    expected = {(kind.http_status, kind.code) for kind in ours if kind.code not in ELSEWHERE}
    items = re.findall(r"^\.It (\d+)\n((?:\.Ql .*\n)+)", TEXT, re.M)
    assert {(int(status), code) for status, text in items for code in re.findall(r"Ql (\w+)", text)} == expected


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="needs mandoc")
def test_the_page_is_clean_mdoc() -> None:
    linted = subprocess.run(["mandoc", "-T", "lint", str(PAGE)], capture_output=True, text=True, timeout=30)
    # Whether the other pages are installed here says nothing about this one.
    elsewhere = ("referenced manual not found", "outdated mandoc.db")
    assert [line for line in linted.stdout.splitlines() if not any(words in line for words in elsewhere)] == []


def test_the_limits_on_the_page_are_those_of_the_doors() -> None:
    described = TEXT.partition(".Sh DESCRIPTION")[2].partition(".Sh ")[0].replace("\n", " ")
    assert f"A body may have {front_door.MAX_BODY_BYTES // 2**20} MiB" in described
    assert f"a header {front_door.MAX_HEADER_BYTES // 2**10} KiB" in described
    assert f"takes {server.MOST_CONNECTIONS} connections" in described
    assert f"within {connection.READ_TIMEOUT_S:.0f} seconds" in described
    assert f"all of it within {connection.BODY_TIMEOUT_S / 60:.0f} minutes" in described
    assert f"waits for it after {connection.WRITE_TIMEOUT_S / 60:.0f} minutes" in described
    assert TEXT.count(f"A list of up to {MOST_MESSAGES} objects") == 2
