"""The events as a client reads them: from where it left off, with marks for what it missed and for silence.

A client names the run of the daemon that its numbers are of. Numbers begin anew with each run, so one that comes back
to another run gets all that this one has.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final

from omlxd.core.events import Event, StreamMark
from omlxd.daemon.bus import EventBus, Missed

HEARTBEAT_S: Final = 15.0


async def follow(
    bus: EventBus, run: str, *, since: int = 0, of_run: str | None = None, heartbeat_s: float = HEARTBEAT_S
) -> AsyncGenerator[Mapping[str, Any], None]:
    """The events above `since` and then each new one, as JSON objects; first of all a heartbeat.

    Args:
        bus: where they happen.
        run: names this run of the daemon.
        since: the number of the last event that the client knows.
        of_run: the run that `since` is a number of; None when the client does not say.
        heartbeat_s: the longest silence.
    """
    if since and (since > bus.last_seq if of_run is None else of_run != run):
        since = 0
        yield {"event": StreamMark.GAP.value, "seq": 0, "missed": None}
    yield {"event": StreamMark.HEARTBEAT.value, "seq": bus.last_seq, "run": run}
    async with aclosing(bus.follow(since, quiet_s=heartbeat_s)) as stream:
        async for each in stream:
            if isinstance(each, Event):
                yield each.to_json()
            elif isinstance(each, Missed):
                yield {"event": StreamMark.GAP.value, "seq": each.seq, "missed": each.count}
            else:
                yield {"event": StreamMark.HEARTBEAT.value, "seq": each.seq, "run": run}
