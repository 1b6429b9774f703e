"""What else went on while `bench` measured: others' requests and loads, and other programs' processor time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from omlxd.cli.client import ANSWER_TIMEOUT_S
from omlxd.cli.values import one_line

if TYPE_CHECKING:
    from omlxd.cli.client import Client

MOST_TOLD: Final = 3
NOTABLE_CORES: Final = 0.5
NOTABLE_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True)
class Meanwhile:
    """What went on beside something: in words what the daemon did for others, and the cores that other programs used.

    `cores` is 0 where the system does not tell.
    """

    told: tuple[str, ...] = ()
    cores: float = 0.0


class Watch:
    """Looks at the daemon and the machine before and after something; `since` tells what happened in between.

    Args:
        client: asks the daemon.
        model: whose loads and requests are looked at like anybody's.
        pid: the daemon's process, whose processor time is ours.
    """

    def __init__(self, client: Client, model: str, pid: int) -> None:
        self._client, self._model, self._pid = client, model, pid
        self._seq = self._news(0)[1]
        self._there: dict[str, str] = {}
        self._began = (0.0, 0.0)

    def begin(self) -> None:
        """From now on."""
        _, self._seq = self._news(self._seq)
        self._there = self._requests()
        self._began = (time.monotonic(), self._foreign_cpu_s())

    def since(self, ours: Iterable[str]) -> Meanwhile:
        """What others did since `begin`; `ours` are the ids of requests that are not others'."""
        began_s, before_s = self._began
        cores = (self._foreign_cpu_s() - before_s) / max(1e-9, time.monotonic() - began_s)
        events, self._seq = self._news(self._seq)
        told = disturbances(events, self._there | self._requests(), set(ours), self._model)
        return Meanwhile(tuple(told), max(0.0, cores))

    def _news(self, since: int) -> tuple[list[Mapping[str, Any]], int]:
        events = [*self._client.ndjson("GET", f"/v1/control/events?since={since}", timeout_s=ANSWER_TIMEOUT_S)]
        return [*events], max([since, *(int(event.get("seq", 0)) for event in events)])

    def _requests(self) -> dict[str, str]:
        """The requests in flight, by id: of which model."""
        listed = self._client.get("/v1/control/requests")["requests"]
        return {each["id"]: each["model"] for each in listed}

    def _foreign_cpu_s(self) -> float:
        """Processor time of everybody but the daemon and this command, in seconds; constant where it is not told."""
        import psutil  # 30 ms

        try:
            machine, daemon = psutil.cpu_times(), psutil.Process(self._pid).cpu_times()
        except (psutil.Error, OSError):
            return 0.0
        mine = os.times()
        busy_s = sum(machine) - machine.idle - getattr(machine, "iowait", 0.0)
        return float(busy_s - daemon.user - daemon.system - mine.user - mine.system)


def summary(all_: Iterable[Meanwhile]) -> list[str]:
    """What disturbed, each thing once; a little of a processor does not."""
    found = list(all_)
    told = list(dict.fromkeys(each for meanwhile in found for each in meanwhile.told))
    if len(told) > MOST_TOLD:
        told[MOST_TOLD - 1 :] = [f"{len(told) - MOST_TOLD + 1} more things happened"]
    most = max((meanwhile.cores for meanwhile in found), default=0.0)
    if most >= max(NOTABLE_CORES, NOTABLE_SHARE * (os.cpu_count() or 1)):
        told.append(f"other programs kept up to {most:.1f} of {os.cpu_count()} cores busy")
    return told


def disturbances(
    events: Iterable[Mapping[str, Any]], in_flight: Mapping[str, str], ours: set[str], model: str
) -> list[str]:
    """What of these events, and of the requests in flight before and after them, was not our doing; each told once."""
    others = {request: of for request, of in in_flight.items() if request not in ours}
    told = []
    for event in events:
        name, request = str(event.get("event")), event.get("request")
        about = one_line(event.get("model"))
        if name == "request_parked" and request in ours:
            told.append(f"`{about}` had to park a request of this benchmark for lack of memory")
        elif name.startswith("request_") and request not in ours:
            others[str(request)] = str(event.get("model"))
        elif name in ("load_started", "unloaded") and event.get("model") != model:
            told.append(f"`{about}` was {'loaded' if name == 'load_started' else 'unloaded'}")
    if others:
        models = ", ".join(f"`{one_line(each)}`" for each in sorted(set(others.values())))
        told.insert(0, f"{len(others)} other {'request' if len(others) == 1 else 'requests'} to {models} ran")
    return list(dict.fromkeys(told))
