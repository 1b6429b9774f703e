"""Pages of a list put together are the list, whichever way they are asked for."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from omlxd.daemon.pages import Page


def _listed(count: int) -> list[dict[str, Any]]:
    return [{"id": f"m{number}"} for number in range(count)]


def test_who_asks_for_no_page_gets_all() -> None:
    assert Page.asked({"api-version": "3"}).of(_listed(3)) == {
        "data": _listed(3),
        "has_more": False,
        "first_id": "m0",
        "last_id": "m2",
    }
    assert Page().of([]) == {"data": [], "has_more": False, "first_id": None, "last_id": None}


@given(st.integers(0, 12), st.integers(1, 5))
def test_pages_forward_are_the_list(count: int, limit: int) -> None:
    found, page = list[dict[str, Any]](), Page(limit).of(_listed(count))
    while True:
        found += page["data"]
        if not page["has_more"]:
            break
        page = Page(limit, after_id=page["last_id"]).of(_listed(count))
    assert found == _listed(count)


@given(st.integers(1, 12), st.integers(1, 5))
def test_pages_backward_are_what_is_before(count: int, limit: int) -> None:
    found, page = list[dict[str, Any]](), Page(limit, before_id=f"m{count - 1}").of(_listed(count))
    while True:
        found = page["data"] + found
        if not page["has_more"]:
            break
        page = Page(limit, before_id=page["first_id"]).of(_listed(count))
    assert found == _listed(count)[:-1]
