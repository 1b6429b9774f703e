"""The daemon's status as it changes: after each event, once a second, and again as soon as a daemon is back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from omlxd.cli.client import Client
from omlxd.core.errors import DaemonNotRunning, OmlxError, Unreachable

STATUS_PATH: Final = "/v1/control/status"
EVENTS_PATH: Final = "/v1/control/events?follow=true"
SCHEMA: Final = 1  # of the status that is understood here
LOOK_S: Final = 1.0
LEAST_GAP_S: Final = 0.2  # events come in crowds, and a screen costs 20 to 50 ms to draw
TRY_AGAIN_S: Final = 0.25
LONGEST_SILENCE_S: Final = 45.0  # three heartbeats
ANSWER_S: Final = 5.0

Status = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Look:
    """The newest status, or why there is none now."""

    status: Status | None
    trouble: OmlxError | None = None


def read_status(client: Client) -> Status:
    """The status now; raises why there is none, or that it is of another omlxd's kind."""
    status = client.get(STATUS_PATH, timeout_s=ANSWER_S)
    if status.get("schema") != SCHEMA:
        raise OmlxError(
            f"the daemon's status has schema {status.get('schema')}, and this `omlxd` understands {SCHEMA}",
            hint="`omlxd restart` starts the daemon of this version",
        )
    return status


class Bell:
    """Rings at each event of the daemon, and when `ring` is called; a thread listens until `close`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._rung = threading.Event()
        self._closed = threading.Event()
        threading.Thread(target=self._listen, name="omlxd-events", daemon=True).start()

    @property
    def closed(self) -> bool:
        """Whether nobody listens any more."""
        return self._closed.is_set()

    def ring(self) -> None:
        """End a wait."""
        self._rung.set()

    def wait(self, timeout_s: float) -> None:
        """Return at the next event, or after this time."""
        self._rung.wait(timeout_s)
        self._rung.clear()

    def close(self) -> None:
        """End the thread as soon as it hears something, and a wait at once."""
        self._closed.set()
        self._rung.set()

    def _listen(self) -> None:
        while not self.closed:
            heard = False
            try:
                with closing(self._client.ndjson("GET", EVENTS_PATH, timeout_s=LONGEST_SILENCE_S)) as events:
                    for _ in events:
                        heard = True
                        self._rung.set()
                        if self.closed:
                            return
            except (OmlxError, OSError):
                pass  # the look at the status tells it
            if heard:  # and it has broken off: something has happened
                self._rung.set()
            self._closed.wait(TRY_AGAIN_S if heard else LOOK_S)


def looks(client: Client, bell: Bell) -> Iterator[Look]:
    """A look at once, and then one after each event and each second, until the bell is closed.

    Raises:
        OmlxError: there is a daemon, and no status from it that could be understood; waiting will not help.
    """
    while not bell.closed:
        began_s = time.monotonic()
        try:
            look = Look(read_status(client))
        except (DaemonNotRunning, Unreachable) as away:
            look = Look(None, away)
        yield look
        if (gap_s := LEAST_GAP_S - (time.monotonic() - began_s)) > 0:
            time.sleep(gap_s)
        bell.wait(LOOK_S if look.trouble is None else TRY_AGAIN_S)


class Feed:
    """Looks from a thread of its own, so that keys are answered while the daemon is not.

    Args:
        client: of the daemon.
        tell: called with each look, in that thread.
    """

    def __init__(self, client: Client, tell: Callable[[Look], None]) -> None:
        self._client, self._tell = client, tell
        self._bell = Bell(client)
        self.failure: Exception | None = None

    def __enter__(self) -> Self:
        threading.Thread(target=self._run, name="omlxd-status", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bell.close()

    def look_now(self) -> None:
        """Do not wait for the next event or second."""
        self._bell.ring()

    def _run(self) -> None:
        try:
            for look in looks(self._client, self._bell):
                self._tell(look)
        except Exception as error:  # told by who waits for looks, on a terminal that has been given back
            self.failure = error
            self._tell(Look(None))
