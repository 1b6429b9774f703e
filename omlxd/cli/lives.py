"""Why a model or a request is where it is, in one sentence, from what the log has on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from omlxd.cli.event_sentences import reason_of, was_cut
from omlxd.cli.explain import decision_id, purpose
from omlxd.cli.stories import ENDS, Record, Run, Story, arrival, is_among
from omlxd.cli.values import ago, amount, duration, moment, named, number, one_line
from omlxd.core.events import EventName

_PRESENT: Final = {"waits": "waits", "is": "is", "runs": "runs"}
_PAST: Final = {"waits": "waited", "is": "was", "runs": "ran"}


@dataclass(frozen=True, slots=True)
class Answer:
    """The sentence, and the decision that matters for it."""

    text: str
    decision: Record | None = None


def of_model(model: str, story: Story, *, alive: bool, now: float) -> Answer:
    """Why the model is loaded, loading, waiting or not there.

    Args:
        model: its name.
        story: what the log has on it.
        alive: whether the newest run still goes on.
        now: Unix time.
    """
    name, run = named(model), story.run
    if not story.events:
        return Answer(f"{name} has not been loaded{_since_start(story.newest, now)}; the log has nothing else on it")
    if run is story.newest and alive:
        return _standing(story, model, "is", now)
    standing = _standing(story, model, "was", now)
    over = _how_it_ended(run, now)
    if run is story.newest:
        return Answer(f"the daemon {over}; before that, {standing.text}", standing.decision)
    if story.of_one_run:
        return Answer(f"in the run that {over}, {standing.text}", standing.decision)
    head = f"{name} has not been loaded{_since_start(story.newest, now)}"
    which = "the run before" if run.ago == 1 else f"the run {run.ago} before"
    return Answer(f"{head}; in {which}, which {over}, {standing.text}", standing.decision)


def of_request(request: str, story: Story, *, alive: bool, now: float) -> Answer:
    """How the request ended, or what it does now."""
    mine = [record for _, record in story.events if record.get("request") == request and _is_of_requests(record)]
    decision = next(iter(story.decisions), None)
    if not mine:
        taken = f", but {decision_id(decision)} has to do with it" if decision is not None else ""
        return Answer(f"the log has nothing of {request} itself{taken}", decision)
    last = next((record for record in mine if record.get("event") in ENDS), mine[0])
    model = next((record.get("model") for record in mine if record.get("model")), None)
    who = f"{request}" + (f" to {named(model)}" if model else "")
    over = last.get("event") not in ENDS and not (story.run is story.newest and alive)
    text = f"{who} {_fate(last, _PAST if over else _PRESENT, now)}"
    if last.get("event") == EventName.REQUEST_WAITING and story.events[0][1].get("event") == EventName.LOAD_WAITING:
        text += f", and its load waits: {reason_of(story.events[0][1])}"
    text += _parks(mine)
    by = last.get("decision")
    cost_it = (each for each in story.decisions if is_among(request, each.get("requests")))
    ended_it = (each for each in story.decisions if by and each.get("decision") == by)
    decision = next(ended_it, next(cost_it, decision))
    if over:
        text += f"; the daemon {_how_it_ended(story.run, now)}"
    return Answer(text, decision)


def _is_of_requests(record: Record) -> bool:
    """Not a load that was for it."""
    return str(record.get("event")).startswith("request_")


def arrived_at(story: Story, request: str) -> float | None:
    """When the request came, as far as the log says."""
    times = [at for _, record in story.events if record.get("request") == request and (at := arrival(record))]
    return min(times, default=None)


def _standing(story: Story, model: str, be: str, now: float) -> Answer:
    """By the newest event that says where the model is, or was when its run ended (`be`)."""
    for run, record in story.events:
        name, at = record.get("event"), moment(record.get("ts"), now)
        if name == EventName.DECISION:
            if record.get("victim") == model and record.get("action") in ("unload", "cancel_load"):
                return _evicted(record, at, model, be)
        elif name == EventName.UNLOADED:
            decision = _named_decision(story.decisions, record)
            if decision is not None:
                return _evicted(decision, at, model, be)
            return Answer(f"{named(model)} {be} not loaded: it was unloaded at {at}, {_unloaded_why(run, record)}")
        elif (answer := _by_load(record, f"{named(model)} {be}", at, story, model)) is not None:
            return answer
    return Answer(f"{named(model)} {be} not loaded: the log has no load of it", next(iter(story.decisions), None))


def _by_load(record: Record, model_is: str, at: str, story: Story, model: str) -> Answer | None:
    """What an event of its loads says of the model."""
    name, reason = record.get("event"), reason_of(record)
    because = f": {reason}" if reason else ""
    made_for_it = next((each for each in story.decisions if each.get("for_model") == model), None)
    if name == EventName.LOAD_FINISHED:
        return _loaded(record, model_is, at, story, made_for_it)
    if name in (EventName.LOAD_STARTED, EventName.LOAD_RETRIED):
        return Answer(f"{model_is} being loaded, since {at}{_for_whom(story, record)}", made_for_it)
    if name == EventName.LOAD_WAITING:
        return Answer(f"{model_is} not loaded: its load waits since {at}{because}", made_for_it)
    if name == EventName.LOAD_FAILED:
        return Answer(f"{model_is} not loaded: loading it failed at {at}{because}{_hint(record)}")
    if name == EventName.LOAD_CANCELLED:
        decision = _named_decision(story.decisions, record)
        by = f" by {decision_id(decision)}" if decision is not None else ""
        return Answer(f"{model_is} not loaded: its load was stopped at {at}{by}{because}", decision)
    return None


def _loaded(record: Record, model_is: str, at: str, story: Story, made_for_it: Record | None) -> Answer:
    evicted = record.get("evicted")
    decision = made_for_it if isinstance(evicted, list) and evicted else None
    room = "; other models made way for it" if decision is not None else ""
    done_to_it = next((each for each in story.decisions if each.get("victim") == record.get("model")), None)
    if done_to_it is not None and (number(done_to_it.get("ts")) or 0.0) > (number(record.get("ts")) or 0.0):
        decision = done_to_it  # it stayed, and something was done to it
    took = duration(record.get("load_s"))
    return Answer(f"{model_is} loaded, since {at}{_for_whom(story, record)} (in {took}){room}", decision)


def _evicted(decision: Record, at: str, model: str, be: str) -> Answer:
    verb = "its load was cancelled" if decision.get("action") == "cancel_load" else "it was unloaded"
    why = f" {purpose(decision)}" if purpose(decision) else ""
    return Answer(f"{named(model)} {be} not loaded: {verb} at {at} by {decision_id(decision)}{why}", decision)


def _unloaded_why(run: Run, record: Record) -> str:
    stopped = number((run.stopped or {}).get("ts"))
    at = number(record.get("ts"))
    if stopped is not None and at is not None and at <= stopped < at + 1:
        return "when the daemon stopped"
    return "because somebody asked for it (`omlxd unload`)"


def _named_decision(decisions: Sequence[Record], record: Record) -> Record | None:
    wanted = record.get("decision")
    return next((each for each in decisions if wanted and each.get("decision") == wanted), None)


def _for_whom(story: Story, record: Record) -> str:
    """The request that a load was for; the load's beginning says so."""
    started = record
    if record.get("event") == EventName.LOAD_FINISHED:
        at = story.events.index(next(pair for pair in story.events if pair[1] is record))
        starts = (each for _, each in story.events[at:] if each.get("event") == EventName.LOAD_STARTED)
        started = next(starts, record)
    request = started.get("request")
    return f", for {one_line(request)}" if request else ""


def _hint(record: Record) -> str:
    error = record.get("error")
    hint = error.get("hint") if isinstance(error, dict) else None
    return f" ({one_line(hint)})" if hint else ""


def _fate(last: Record, verbs: Mapping[str, str], now: float) -> str:
    """What the newest event of a request says of it."""
    name, since = last.get("event"), f"{moment(last.get('ts'), now)} ({ago(last.get('ts'), now)})"
    at = f"at {since}"
    tokens = amount(last.get("generated_tokens"), "token")
    age = f" after {duration(last['age_s'])}" if number(last.get("age_s")) is not None else ""
    reason = reason_of(last)
    because = f": {reason}" if reason else ""
    by = f" by {one_line(last.get('decision'))}" if last.get("decision") else ""
    because = "" if by else because  # the decision gives its reason
    if name == EventName.REQUEST_FINISHED and was_cut(last):
        why = f", because {reason}" if reason and not by else ""
        return f"ended early {at}{by}{age}, with the text it had ({tokens}){why}"
    if name == EventName.REQUEST_FINISHED:
        return f"ended well {at}{age}, with {tokens} ({one_line(last.get('finish_reason')) or '?'})"
    if name == EventName.REQUEST_ABORTED:
        return f"was aborted {at}{by}{age}, with {tokens}{because}"
    if name == EventName.REQUEST_REFUSED:
        return f"was refused {at}{because}{_hint(last)}"
    if name == EventName.REQUEST_FAILED:
        return f"failed {at}{by}{age}{because}{_hint(last)}"
    if name == EventName.REQUEST_WAITING:
        return f"{verbs['waits']} since {since}{because}"
    if name == EventName.REQUEST_PARKED:
        return f"{verbs['is']} parked since {since}{by}, to go on when there is memory for it{because}"
    if name in (EventName.REQUEST_STARTED, EventName.REQUEST_RESUMED):
        return f"{verbs['runs']} since {since}"
    return f"was last heard of {at}"


def _parks(mine: Sequence[Record]) -> str:
    """How often a request was parked on its way, and for how long in all."""
    stays = [number(record.get("parked_s")) for record in mine if record.get("event") == EventName.REQUEST_RESUMED]
    if not stays:
        return ""
    often = {1: "once", 2: "twice"}.get(len(stays), f"{len(stays)} times")
    return f"; it was parked {often}, for {duration(sum(stay for stay in stays if stay is not None))}"


def _how_it_ended(run: Run, now: float) -> str:
    if run.stopped is not None:
        return f"stopped at {moment(run.stopped.get('ts'), now)}"
    return f"ended without a word after {moment(run.last_ts, now)} (killed, or crashed)"


def _since_start(run: Run, now: float) -> str:
    if run.started is None:
        return " as far back as the log goes"
    return f" since the daemon started at {moment(run.started.get('ts'), now)}"
