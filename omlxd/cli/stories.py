"""What the log has on a model, a request or a decision: searched newest first, and no further than needed.

Ids of requests and decisions begin anew with each run of the daemon, so a story of one ends where its run began; a
model's goes on through earlier runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from omlxd.cli.log_lines import Log
from omlxd.cli.values import number
from omlxd.core.events import EventName

Record = Mapping[str, Any]

MOST_OF_A_MODEL: Final = 60  # events of its life that are looked at; enough for a dozen loads and evictions
MOST_OF_A_REQUEST: Final = 400
MOST_PASSED_OVER: Final = 3
LIFE: Final = frozenset(
    {
        EventName.LOAD_WAITING,
        EventName.LOAD_STARTED,
        EventName.LOAD_FINISHED,
        EventName.LOAD_FAILED,
        EventName.LOAD_CANCELLED,
        EventName.LOAD_RETRIED,
        EventName.TURN_ENDED,
        EventName.UNLOADED,
        EventName.PINNED,
        EventName.UNPINNED,
        EventName.ENGINE_FAILED,
    }
)
"""The events of a model's life."""

ENDS: Final = frozenset(
    {
        EventName.REQUEST_FINISHED,
        EventName.REQUEST_ABORTED,
        EventName.REQUEST_FAILED,
        EventName.REQUEST_REFUSED,
    }
)
"""How a request ends."""


@dataclass
class Run:
    """One life of the daemon, as far as the log shows it.

    Attributes:
        ago: 0 for the newest, 1 for the one before.
        started: its first event; None when the search did not come to it, or the log has lost it.
        stopped: its last event when it ended by itself.
        last_ts: when the last thing that the log has of it happened: Unix time.
    """

    ago: int = 0
    started: Record | None = None
    stopped: Record | None = None
    last_ts: float | None = None


@dataclass
class Story:
    """Events about one thing, newest first, each with its run.

    Attributes:
        newest: the newest run of the log, whether it has anything to do with it or not.
        of_one_run: whether only one run was looked at.
        events: what happened to it, decisions included.
        level: of the last decisions: the newest change of the enforcer's level.
        last_request: of a model: the newest event of a request to it.
        waiting: of a model: the requests of the newest run that waited when the log ended.
        passed_over: of a model: decisions that considered it and left it alone.
        starts: of a model: the beginnings of runs.
    """

    newest: Run = field(default_factory=Run)
    of_one_run: bool = False
    events: list[tuple[Run, Record]] = field(default_factory=list)
    level: Record | None = None
    last_request: Record | None = None
    waiting: list[Record] = field(default_factory=list)
    passed_over: list[Record] = field(default_factory=list)
    starts: list[Record] = field(default_factory=list)

    @property
    def run(self) -> Run:
        """The run that it is about: of its newest event, or the newest one."""
        return self.events[0][0] if self.events else self.newest

    @property
    def decisions(self) -> list[Record]:
        """The decisions among its events, newest first."""
        return [record for _, record in self.events if record.get("event") == EventName.DECISION]


def of_decisions(log: Log, count: int, runs_ago: int | None) -> Story:
    """The last `count` decisions of the log, or of one run."""
    story = Story()
    for run, record in _search(story, log, runs_ago, b'"decision"', b'"level_changed"'):
        if record.get("event") == EventName.DECISION:
            story.events.append((run, record))
        elif record.get("event") == EventName.LEVEL_CHANGED and story.level is None and run is story.newest:
            story.level = record
        if len(story.events) >= count:
            break
    return story


def of_decision(log: Log, decision: str, runs_ago: int | None) -> Story:
    """A decision of this id and what it caused, in the newest run that has one or in the one that is meant."""
    story = Story()
    for run, record in _search(story, log, runs_ago, _quoted(decision)):
        if story.events and run is not story.run:
            break
        if record.get("decision") == decision and len(story.events) < MOST_OF_A_REQUEST:
            story.events.append((run, record))
    return story


def of_request(log: Log, request: str, runs_ago: int | None) -> Story:
    """The life of a request, in the newest run that has one of this id or in the one that is meant."""
    story = Story()
    model: str | None = None
    arrived: float | None = None
    for run, record in _search(story, log, runs_ago, _quoted(request), b'"load_'):
        if (story.events and run is not story.run) or len(story.events) >= MOST_OF_A_REQUEST:
            break
        if concerns_request(record, request):
            story.events.append((run, record))
            if record.get("request") == request and isinstance(record.get("model"), str):
                model, came = record["model"], arrival(record)
                arrived = came if came is not None else arrived
        elif model is not None and record.get("model") == model and record.get("event") in LIFE:
            at = number(record.get("ts"))
            if arrived is None or (at is not None and at >= arrived):  # a load that it shared with others
                story.events.append((run, record))
    return story


def of_model(log: Log, model: str, runs_ago: int | None) -> Story:
    """The last part of a model's life, through as many runs as it takes."""
    story, seen = Story(of_one_run=runs_ago is not None), set[str]()
    for run, record in _search(story, log, runs_ago, _quoted(model)):
        name = record.get("event")
        if name == EventName.DECISION:
            if model in (record.get("victim"), record.get("for_model")):
                story.events.append((run, record))
            elif len(story.passed_over) < MOST_PASSED_OVER and any(c.get("model") == model for c in considered(record)):
                story.passed_over.append(record)
        elif name == EventName.DAEMON_STARTING:
            story.starts.append(record)
        elif record.get("model") == model and name in LIFE:
            story.events.append((run, record))
        elif record.get("model") == model and isinstance(name, str) and name.startswith("request_"):
            _note_request(story, seen, run, record)
        if len(story.events) >= MOST_OF_A_MODEL:
            break
    return story


def loads_around(log: Log, decision: Record) -> tuple[Record | None, Record | None]:
    """The victim's last load before a decision, and its first one after: what evicting it cost."""
    model, at = decision.get("victim"), number(decision.get("ts"))
    before: Record | None = None
    after: Record | None = None
    if not isinstance(model, str) or at is None:
        return None, None
    mark = _quoted(model)
    for line in log.newest_first(lambda raw: mark in raw and b'"load_finished"' in raw):
        record = line.record
        if record.get("event") != EventName.LOAD_FINISHED or record.get("model") != model:
            continue
        if (loaded_at := number(record.get("ts"))) is not None and loaded_at > at:
            after = record
        else:
            before = record
            break
    return before, after


def concerns_request(record: Record, request: str) -> bool:
    """Whether the event is about the request, or was done to it or for it."""
    ended = record.get("requests")
    return request in (record.get("request"), record.get("for_request")) or (
        isinstance(ended, list) and request in ended
    )


def arrival(record: Record) -> float | None:
    """When the request of this event came, Unix time; None when it does not say."""
    at = number(record.get("ts"))
    for key in ("age_s", "waited_s"):
        since_s = number(record.get(key))
        if at is not None and since_s is not None:
            return at - since_s
    return at if record.get("event") == EventName.REQUEST_WAITING else None


def considered(decision: Record) -> Sequence[Record]:
    """Those that a decision weighed, in its order."""
    found = decision.get("candidates")
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []


def _note_request(story: Story, seen: set[str], run: Run, record: Record) -> None:
    if story.last_request is None:
        story.last_request = record
    request = record.get("request")
    if run is story.newest and isinstance(request, str) and request not in seen:
        seen.add(request)  # newest first: what the search comes to later is overtaken
        if record.get("event") in (EventName.REQUEST_WAITING, EventName.REQUEST_PARKED):
            story.waiting.append(record)


def _search(story: Story, log: Log, runs_ago: int | None, *marks: bytes) -> Iterator[tuple[Run, Record]]:
    """The events whose line has one of the marks, newest first, each with its run; of one run, or of all."""
    marks = (*marks, b'"daemon_starting"', b'"daemon_stopped"')
    run = story.newest

    def wanted(raw: bytes) -> bool:
        # A run's last line says when it ended.
        return run.last_ts is None or run.started is not None or any(mark in raw for mark in marks)

    for line in log.newest_first(wanted):
        record, name = line.record, line.record.get("event")
        if run.started is not None or (name == EventName.DAEMON_STOPPED and run.last_ts is not None):
            run = Run(run.ago + 1)
            if runs_ago is not None and run.ago > runs_ago:
                return
        if run.last_ts is None:
            run.last_ts = number(record.get("ts"))
        if name == EventName.DAEMON_STOPPED:
            run.stopped = record
        elif name == EventName.DAEMON_STARTING:
            run.started = record
        if runs_ago is None or run.ago == runs_ago:
            yield run, record


def _quoted(text: str) -> bytes:
    """The text as it stands in a line of JSON."""
    return json.dumps(text, ensure_ascii=False).encode("utf-8", "backslashreplace")
