"""Which events somebody wants to see: by model, request, decision, name, severity and time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from omlxd.cli.completion import model_names
from omlxd.cli.log_lines import Line
from omlxd.cli.stories import concerns_request, quoted
from omlxd.core.errors import InvalidRequest
from omlxd.core.events import EventLevel, EventName
from omlxd.core.units import parse_duration
from omlxd.core.wording import nearest, shown

_SEVERITY: Final = {level.value: number for number, level in enumerate(EventLevel)}
_INFO: Final = _SEVERITY[EventLevel.INFO]
_SEVERE: Final = [f'"{level.value}"'.encode() for level in EventLevel]
_MODEL_KEYS: Final = ("model", "victim", "for_model")

ModelOption = Annotated[
    str | None,
    typer.Option("--model", metavar="MODEL", help="Only what concerns this model.", autocompletion=model_names),
]
EventOption = Annotated[
    list[str] | None,
    typer.Option(
        "--event",
        metavar="NAME",
        help="Only events of this name; may be given several times.",
        autocompletion=lambda incomplete: [event for event in EventName if event.startswith(incomplete)],
    ),
]
LevelOption = Annotated[
    str | None,
    typer.Option(
        "--level",
        metavar="LEVEL",
        help="Only debug, info, warning or error, or what is worse.",
        autocompletion=lambda incomplete: [level for level in EventLevel if level.startswith(incomplete)],
    ),
]


@dataclass(frozen=True, slots=True)
class Filter:
    """All conditions must hold; those left empty always do.

    Attributes:
        model: concerns this model: it happened to it, or was done for it.
        request: concerns this request.
        decision: is this decision, or was caused by it.
        events: has one of these names.
        least: the severity, at least.
        since, until: Unix times.
    """

    model: str | None = None
    request: str | None = None
    decision: str | None = None
    events: frozenset[str] = frozenset()
    least: int = 0
    since: float = 0.0
    until: float = float("inf")

    def matches(self, record: Mapping[str, Any]) -> bool:
        """Whether the event is wanted; whatever it holds."""
        moment = record.get("ts")
        at = moment if isinstance(moment, int | float) else 0.0
        return (
            (self.model is None or any(record.get(key) == self.model for key in _MODEL_KEYS))
            and (self.request is None or self._about_request(record))
            and (self.decision is None or record.get("decision") == self.decision)
            and (not self.events or record.get("event") in self.events)
            and severity(record) >= self.least
            and (self.since <= 0 or at >= self.since)
            and at <= self.until
        )

    def wanted(self, raw: bytes) -> bool:
        """Whether a line may match, by a look at what must stand in it; quick, and never wrong about one that does."""
        must = [quoted(text) for text in (self.model, self.request, self.decision) if text is not None]
        return (all(text in raw for text in must) and self._may_be_severe(raw)) or b'"daemon_starting"' in raw

    def newest_run(self, lines: Iterable[Line]) -> Iterator[Line]:
        """The matching events, given and returned newest first.

        Ids of requests and decisions begin anew with each daemon: only the newest run that has the one asked for
        counts.
        """
        found = False
        for line in lines:
            if self.matches(line.record):
                found = True
                yield line
            if found and (self.request or self.decision) and line.record.get("event") == EventName.DAEMON_STARTING:
                return

    def _may_be_severe(self, raw: bytes) -> bool:
        return self.least <= _INFO or any(level in raw for level in _SEVERE[self.least :])

    def _about_request(self, record: Mapping[str, Any]) -> bool:
        return self.request is not None and concerns_request(record, self.request)


def severity(record: Mapping[str, Any]) -> int:
    """0 for debug to 3 for error; what has no known level counts as info."""
    level = record.get("level")
    return _SEVERITY.get(level, _INFO) if isinstance(level, str) else _INFO


def make_filter(
    *,
    model: str | None = None,
    request: str | None = None,
    decision: str | None = None,
    events: Iterable[str] = (),
    level: str | None = None,
    since: str | None = None,
    until: str | None = None,
) -> Filter:
    """The filter that the options describe; raises InvalidRequest for a name, level or time that is none."""
    names = frozenset(events)
    for name in names - set(EventName):
        near = nearest(name, EventName)
        hint = f"did you mean `{near}`?" if near else "man omlxd(1) lists the events"
        raise InvalidRequest(f"there is no event `{shown(name)}`", hint=hint)
    if level is not None and level not in _SEVERITY:
        raise InvalidRequest(f"there is no level `{shown(level)}`", hint="debug, info, warning or error")
    return Filter(
        model=model,
        request=request,
        decision=decision,
        events=names,
        least=0 if level is None else _SEVERITY[level],
        since=0.0 if since is None else moment_of(since),
        until=float("inf") if until is None else moment_of(until),
    )


def moment_of(text: str) -> float:
    """The Unix time that `10m` (ago), `20:15`, `2026-11-29` or `2026-11-29T20:00` stands for, in local time."""
    try:
        return time.time() - parse_duration(text)
    except InvalidRequest:
        pass
    from datetime import datetime

    today = datetime.now().date().isoformat()
    for candidate in (text, f"{today}T{text}"):
        try:
            return datetime.fromisoformat(candidate).timestamp()
        except (ValueError, OverflowError):
            continue
    raise InvalidRequest(
        f"`{shown(text)}` is not a time", hint="write `10m` for ten minutes ago, `20:15` or `2026-11-29T20:15`"
    )
