"""The events of a story as dated lines: oldest first, each thing said once, and where the daemon began anew."""

from __future__ import annotations

import time

from omlxd.cli.explain import decision_id, deed_and_purpose
from omlxd.cli.sentences import event_sentence
from omlxd.cli.stories import Record, Run, Story, considered
from omlxd.cli.values import clock, named, number, one_line
from omlxd.core.events import EventName


def happenings(name: str, story: Story, most: int, arrived: float | None) -> list[tuple[float | None, str]]:
    """What happened, with its Unix time.

    Args:
        name: the model or request that the story is about.
        story: what the log has on it.
        most: how many of its events are told, the newest.
        arrived: when the request came, if it is one.
    """
    told = [(run, record) for run, record in story.events if not _is_said_by_its_decision(record, story)][:most]
    lines: list[tuple[float | None, str]] = []
    if arrived is not None and len(told) < most:
        lines.append((arrived, f"{name} came"))
    told.reverse()  # in order now, and a cause before what it caused at the same instant
    causes_first = sorted(told, key=lambda pair: pair[1].get("event") != EventName.DECISION)
    lines += [(_told_at(run, record, story), _sentence(record)) for run, record in causes_first]
    if story.last_request is not None:
        lines.append((number(story.last_request.get("ts")), _sentence(story.last_request)))
    lines += [(number(decision.get("ts")), _left_alone(name, decision)) for decision in story.passed_over]
    lines.sort(key=lambda line: line[0] or 0.0)
    begun = (lines[0][0] or 0.0) if lines else 0.0
    starts = [(number(start.get("ts")), event_sentence(start)) for start in story.starts]
    lines += [(at, text) for at, text in starts if (at or 0.0) > begun]
    return sorted(lines, key=lambda line: line[0] or 0.0)


def when(at: float | None, now: float) -> str:
    """The time of day, with the date when it is not today's."""
    try:
        day = time.strftime("%Y-%m-%d ", time.localtime(at or 0.0))
        return clock(at) if day == time.strftime("%Y-%m-%d ", time.localtime(now)) else day + clock(at)
    except (OverflowError, ValueError, OSError):
        return clock(at)


def _told_at(run: Run, record: Record, story: Story) -> float | None:
    """When it happened; a decision, which is logged once it has been carried out, comes before what it caused."""
    at = number(record.get("ts"))
    if record.get("event") != EventName.DECISION or at is None or not record.get("decision"):
        return at
    caused = [each for its, each in story.events if its is run and each.get("decision") == record.get("decision")]
    if story.last_request is not None and story.last_request.get("decision") == record.get("decision"):
        caused.append(story.last_request)
    started = number((run.started or {}).get("ts")) or 0.0  # ids begin anew with each run
    times = [begun for each in caused if (begun := number(each.get("ts"))) is not None and begun >= started]
    return min(times, default=at)


def _sentence(record: Record) -> str:
    if record.get("event") == EventName.DECISION:
        return f"{decision_id(record)}: {deed_and_purpose(record)}"
    if record.get("decision"):  # which gives the reason
        record = {key: value for key, value in record.items() if key not in ("reason", "error")}
    return event_sentence(record)


def _left_alone(model: str, decision: Record) -> str:
    why = next((one_line(each.get("why")) for each in considered(decision) if each.get("model") == model), "")
    return f"{_sentence(decision)}; {named(model)} was left alone" + (f": {why}" if why else "")


def _is_said_by_its_decision(record: Record, story: Story) -> bool:
    """An unload is told by the decision that it carries out."""
    decision = record.get("decision")
    return (
        record.get("event") == EventName.UNLOADED
        and decision is not None
        and any(each.get("decision") == decision for each in story.decisions)
    )
