"""What the log has on a model, a request or a decision: searched newest first, and no further than needed.

Ids of requests and decisions begin anew with each run of the daemon, so a story of one ends where its run began; a
model's goes on through earlier runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from omlxd.cli.log_lines import Log, Wanted
from omlxd.cli.values import number
from omlxd.core.events import EventName

Record = Mapping[str, Any]

MOST_OF_A_MODEL: Final = 60  # events of its life that are looked at; enough for a dozen loads and evictions
MOST_OF_A_REQUEST: Final = 400
MOST_PASSED_OVER: Final = 3
MOST_REQUEST_EVENTS: Final = 2000  # of a busy model: who waits now is among the newest
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
        lost: where the log says that it has lost lines, in the part that was looked at.
    """

    newest: Run = field(default_factory=Run)
    of_one_run: bool = False
    events: list[tuple[Run, Record]] = field(default_factory=list)
    level: Record | None = None
    last_request: Record | None = None
    waiting: list[Record] = field(default_factory=list)
    passed_over: list[Record] = field(default_factory=list)
    starts: list[Record] = field(default_factory=list)
    lost: list[Record] = field(default_factory=list)

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
    for run, record in _search(story, log, runs_ago, having(b'"decision"', b'"level_changed"')):
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
    for run, record in _search(story, log, runs_ago, having(quoted(decision))):
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
    for run, record in _search(story, log, runs_ago, having(quoted(request), b'"load_')):
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
    is_about = having(quoted(model))

    requests_left = MOST_REQUEST_EVENTS

    def wanted(raw: bytes) -> bool:
        nonlocal requests_left
        about = is_about(raw)
        if not about or b'"request_' not in raw:
            return about
        requests_left -= 1
        return requests_left >= 0

    for run, record in _search(story, log, runs_ago, wanted):
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
    mark = quoted(model)
    for line in log.newest_first(lambda raw: b'"load_finished"' in raw and mark in raw):
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
    return request in (record.get("request"), record.get("for_request")) or is_among(request, record.get("requests"))


def is_among(name: str, listed: Any) -> bool:
    """Whether a line's list, if it is one, has the name."""
    return isinstance(listed, list) and name in listed


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
    if not isinstance(request, str) or (key := f"{run.ago}/{request}") in seen:
        return
    seen.add(key)  # newest first: what the search comes to later is overtaken
    if run is story.newest and record.get("event") in (EventName.REQUEST_WAITING, EventName.REQUEST_PARKED):
        story.waiting.append(record)


def _search(story: Story, log: Log, runs_ago: int | None, wanted: Wanted) -> Iterator[tuple[Run, Record]]:
    """The events whose line is wanted, newest first, each with its run; of one run, or of all."""
    is_edge = having(b'"daemon_starting"', b'"daemon_stopped"', b'"log_error"')
    run = story.newest

    def is_parsed(raw: bytes) -> bool:
        # A run's last line says when it ended.
        return run.last_ts is None or run.started is not None or wanted(raw) or is_edge(raw)

    for line in log.newest_first(is_parsed):
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
            if name == EventName.LOG_ERROR:
                story.lost.append(record)
            yield run, record


def having(*marks: bytes) -> Wanted:
    """Whether a line has one of the marks: a look that costs a hundredth of parsing it."""
    found = re.compile(b"|".join(map(re.escape, marks))).search
    return lambda raw: found(raw) is not None


def quoted(text: str) -> bytes:
    """The text as it stands in a line of JSON."""
    return json.dumps(text, ensure_ascii=False).encode("utf-8", "backslashreplace")
