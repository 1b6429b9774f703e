"""When the status is looked at: after an event at once, again and again while the daemon is away, never in vain."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from omlxd.cli.client import Client
from omlxd.cli.screen import feed
from omlxd.cli.screen.deeds import do
from omlxd.cli.screen.feed import Bell, Feed, Look, looks
from omlxd.cli.screen.state import Wish
from omlxd.core.errors import OmlxError
from tests.cli.fake_daemon import FakeDaemon, as_json, status_json

SAFE_S = 30.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes by itself: who waits for the next second waits for ever."""
    monkeypatch.setattr(feed, "LOOK_S", 3600.0)
    monkeypatch.setattr(feed, "LEAST_GAP_S", 0.0)


@pytest.fixture
def bell(home: Path, fake: FakeDaemon) -> Iterator[Bell]:
    bell = Bell(Client(home / "omlxd.sock"))
    yield bell
    bell.close()


def test_an_event_is_followed_by_a_look_at_once(home: Path, fake: FakeDaemon) -> None:
    happened, over = threading.Event(), threading.Event()

    def events() -> Iterator[bytes]:
        yield json.dumps({"event": "heartbeat", "seq": 0}).encode() + b"\n"
        happened.wait(SAFE_S)
        fake.routes["GET /v1/control/status"] = as_json(status_json() | {"pid": 5})
        yield json.dumps({"event": "pinned", "seq": 1}).encode() + b"\n"
        over.wait()  # the end of the stream would be followed by a look, too

    fake.routes["GET /v1/control/events"] = lambda _: (200, "application/x-ndjson", events())
    bell = Bell(Client(home / "omlxd.sock"))
    seen = looks(Client(home / "omlxd.sock"), bell)
    first = next(seen)
    assert first.status is not None
    assert first.status["pid"] == 4321
    happened.set()
    assert any(look.status is not None and look.status["pid"] == 5 for look in seen)
    over.set()
    bell.close()
    assert list(seen) == []


def test_a_daemon_that_is_away_is_asked_again_until_it_is_back(home: Path, fake: FakeDaemon, bell: Bell) -> None:
    seen = looks(Client(home / "omlxd.sock"), bell)
    assert next(seen).trouble is None
    fake.close()
    (home / "omlxd.sock").unlink()
    bell.ring()
    away = [next(seen) for _ in range(3)]
    assert [look.trouble and look.trouble.code for look in away] == ["daemon_not_running"] * 3
    again = FakeDaemon(home / "omlxd.sock")
    try:
        assert any(look.status for look in seen)
    finally:
        again.close()


def test_a_status_of_another_schema_ends_it(home: Path, fake: FakeDaemon) -> None:
    fake.routes["GET /v1/control/status"] = as_json(status_json() | {"schema": 2})
    told: queue.Queue[Look] = queue.Queue()
    with Feed(Client(home / "omlxd.sock"), told.put) as feeding:
        assert told.get(timeout=SAFE_S).status is None
        assert isinstance(feeding.failure, OmlxError)
        assert "schema 2" in str(feeding.failure)


@pytest.mark.parametrize(
    ("wish", "path", "answer", "said"),
    [
        (Wish("load", "a/b"), "models/a/b/load", {"load_s": 0.5}, "loaded `a/b` in 500 ms"),
        (Wish("load", "a"), "models/a/load", {"load_s": None}, "`a` is loaded"),
        (Wish("unload", "a"), "models/a/unload", {"was": "unloaded"}, "`a` was not loaded"),
        (Wish("unload", "a"), "models/a/unload", {"was": "loading", "freed_bytes": 1024}, "cancelled the load of `a`"),
        (Wish("pin", "a"), "models/a/pin", {"warnings": ["not saved"]}, "pinned `a`; not saved"),
    ],
)
def test_what_was_done_is_told_in_words(
    home: Path, fake: FakeDaemon, wish: Wish, path: str, answer: dict[str, object], said: str
) -> None:
    fake.routes[f"POST /v1/control/{path}"] = as_json(answer)
    assert do(Client(home / "omlxd.sock"), wish).startswith(said)
