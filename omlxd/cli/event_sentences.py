"""What each event says, as a sentence; whatever a line holds, a sentence comes out.

An event that has no sentence of its own is shown by its keys. Numbers that only programs need are left to `--json`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from omlxd.cli.values import amount, bytes_of, named, one_line, pairs, seconds_of
from omlxd.core.events import EventName
from omlxd.core.limits import limit_set_by

Record = Mapping[str, Any]
Sentence = Callable[[Record], str]


def _starting(record: Record) -> str:
    return f"omlxd {_text(record, 'version')} starts (pid {_text(record, 'pid')}) with {named(record.get('manifest'))}"


def _ready(record: Record) -> str:
    return f"ready, with {_names(record.get('loaded')) or 'no model'} loaded"


def _draining(record: Record) -> str:
    waits = "ends them" if record.get("now") is True else f"gives them {seconds_of(record, 'drain_timeout_s')}"
    by = f" ({one_line(record['asked_by'])})" if record.get("asked_by") else ""
    return f"takes nothing new{by}; {amount(record.get('requests'), 'request')} in flight, {waits}"


def _stopped(record: Record) -> str:
    how = "stopped" if record.get("cut_short") is not True else "stopped at once, as it was asked to"
    how += f"; {cut} cut" if (cut := requests_cut(record)) else ""
    return how if record.get("engine_gone") is not False else f"{how}; the engine was stuck in a step"


def requests_cut(record: Record) -> str:
    """`2 requests to `chat`, 1 request to `small` were`: what did not come to its end when the daemon stopped."""
    cut = found if isinstance(found := record.get("cut"), Mapping) else {}
    words = ", ".join(f"{amount(count, 'request')} to {named(model)}" for model, count in cut.items())
    return f"{words} {'was' if list(cut.values()) == [1] else 'were'}" if cut else ""


def _reloaded(record: Record) -> str:
    changes = listed if isinstance(listed := record.get("changes"), list) else []
    said = ", ".join(change_words(each) for each in changes if isinstance(each, Mapping))
    return f"{named(record.get('manifest'))} is in force: {said or 'nothing has changed in it'}"


def change_words(change: Record) -> str:
    """`daemon.max_memory 8G → 6G`, `models.big removed`, with when it takes effect if that is not now."""
    key, before, after = one_line(change.get("key")), change.get("before"), change.get("after")
    when = _EFFECTS.get(one_line(change.get("effect")), "")
    if re.fullmatch(r'models\.(?:[^".]+|"[^"]+")', key) and (before is None) is not (after is None):
        return f"{key} {'added' if before is None else 'removed'}{when}"
    told = [one_line(value) if value is not None else "none" for value in (before, after)]
    return f"{key} {' → '.join(told)}{when}"


_EFFECTS: Final = {"when_idle": " (when the model is idle)", "restart": " (after a restart)"}


def _rejected(record: Record) -> str:
    error = record.get("error")
    details = error.get("details") if isinstance(error, Mapping) else None
    problems = details.get("problems") if isinstance(details, Mapping) else None
    told = "; ".join(one_line(each) for each in problems) if isinstance(problems, list) else ""
    return f"{named(record.get('manifest'))} changes nothing{_because(record)}" + (f": {told}" if told else "")


def _model_kept(record: Record) -> str:
    return f"{_model(record)} keeps its old weights, since the new ones cannot be loaded{_because(record)}"


def _paused(record: Record) -> str:
    return f"was out for {seconds_of(record, 'paused_s')}: the machine slept, or the process stood still"


def _sleep_prevented(record: Record) -> str:
    return "keeps the machine awake while requests run"


def _sleep_allowed(record: Record) -> str:
    return "the machine may sleep"


def _sleep_not_prevented(record: Record) -> str:
    return f"the machine may fall asleep over a request{_because(record)}"


def _listening(record: Record) -> str:
    if record.get("message"):
        return one_line(record["message"])
    api = record.get("api")
    return f"listens at {named(record.get('socket'))}" + (f" and http://{one_line(api)}" if api else "")


def _api_error(record: Record) -> str:
    where = " ".join(one_line(record[key]) for key in ("source", "method", "path") if record.get(key))
    what = one_line(record.get("message") or str(record.get("traceback") or "").rpartition("\n")[2]) or "failed"
    return f"{where}: {what}" if where else what


def _engine_started(record: Record) -> str:
    return f"MLX runs on {_text(record, 'backend')}; {bytes_of(record, 'base_bytes')} before any model"


def _engine_failed(record: Record) -> str:
    return f"a step{_of_model(record)} failed{_because(record)}"


def _engine_stalled(record: Record) -> str:
    return f"no step has ended for {seconds_of(record, 'stalled_s')}{_of_model(record)}"


def _engine_moves(record: Record) -> str:
    return f"steps end again, after {seconds_of(record, 'stalled_s')}"


def _limit_changed(record: Record) -> str:
    soft, hard = bytes_of(record, "soft_limit_bytes", zero="none"), bytes_of(record, "hard_limit_bytes", zero="none")
    before = bytes_of(record, "before_bytes", zero="none")
    by = limit_set_by(_text(record, "binding"), one_line(record.get("limit_origin")))
    return f"the soft limit is {soft} ({by}), before {before}; the hard limit {hard}"


def _limit_warning(record: Record) -> str:
    return one_line(record.get("message")) or pairs(record)


def _level_changed(record: Record) -> str:
    before, now = _text(record, "level_before"), _text(record, "level_now")
    return f"memory went from {before} to {now}{_because(record)}"


def _cache_dropped(record: Record) -> str:
    return f"{bytes_of(record, 'freed_bytes')} of freed buffers went back; {bytes_of(record, 'active_bytes')} in use"


def _enforcer_error(record: Record) -> str:
    return f"a look at memory failed{_because(record)}"


def _load_waiting(record: Record) -> str:
    return f"the load of {_model(record)}{_for(record)} waits{_because(record)}"


def _turn_ended(record: Record) -> str:
    left = f"finishes {amount(record.get('serves'), 'request')} and makes way for {named(record.get('for_model'))}"
    return f"the turn of {_model(record)} ends: it {left}{_because(record)}"


def _load_started(record: Record) -> str:
    return f"loads {_model(record)} ({bytes_of(record, 'weights_bytes')}){_for(record)}"


def _load_finished(record: Record) -> str:
    evicted = _names(record.get("evicted"))
    made_way = f"; {evicted} made way for it" if evicted else ""
    size, took = bytes_of(record, "weights_bytes"), seconds_of(record, "load_s")
    return f"loaded {_model(record)} ({size}) in {took}{made_way}"


def _costs_learned(record: Record) -> str:
    return f"what requests to {_model(record)} take was measured"


def _load_failed(record: Record) -> str:
    return f"{_model(record)} could not be loaded{_because(record)}"


def _load_cancelled(record: Record) -> str:
    return f"the load of {_model(record)} was stopped{_by(record)}{_because(record)}"


def _load_retried(record: Record) -> str:
    return f"the load of {_model(record)} is tried again{_because(record)}"


def _unloaded(record: Record) -> str:
    return f"{_model(record)} is unloaded{_by(record)}; {bytes_of(record, 'active_bytes')} in use"


def _pinned(record: Record) -> str:
    return f"{_model(record)} is pinned"


def _unpinned(record: Record) -> str:
    return f"{_model(record)} is no longer pinned"


def _request_started(record: Record) -> str:
    waited = f" after {seconds_of(record, 'waited_s')}" if "waited_s" in record else ""
    return f"{_request(record)} runs{waited}: a prompt of {amount(record.get('prompt_tokens'), 'token')}"


def _request_finished(record: Record) -> str:
    why, tokens = record.get("finish_reason"), amount(record.get("generated_tokens"), "token")
    first = f", the first after {seconds_of(record, 'first_token_s')}" if record.get("first_token_s") else ""
    speed = record.get("tokens_per_s")
    rate = f", {speed:.3g} tokens/s" if isinstance(speed, float) else ""
    numbers = f"{tokens}{first}{rate}"
    if was_cut(record):
        reason = reason_of(record)
        because = f", because {reason}" if reason else ""
        return f"{_request(record)} ended early with the text it had ({numbers}){_by(record)}{because}"
    how = f" ({one_line(why)})" if why else ""
    return f"{_request(record)} ended well{how}: {numbers}"


def _request_aborted(record: Record) -> str:
    so_far = amount(record.get("generated_tokens"), "token")
    return f"{_request(record)} was aborted after {so_far}{_by(record)}{_because(record)}"


def _request_failed(record: Record) -> str:
    return f"{_request(record)} failed{_because(record)}"


def _request_waiting(record: Record) -> str:
    return f"{_request(record)} waits{_because(record)}"


def _request_parked(record: Record) -> str:
    so_far = amount(record.get("generated_tokens"), "token")
    gave_up = f"; it gave up {bytes_of(record, 'promised_bytes')} reserved for it" if "promised_bytes" in record else ""
    return f"{_request(record)} was parked after {so_far}{_by(record)}{gave_up}{_because(record)}"


def _request_resumed(record: Record) -> str:
    parked = f" after {seconds_of(record, 'parked_s')}" if "parked_s" in record else ""
    return f"{_request(record)} goes on{parked}{_because(record)}"


def _request_refused(record: Record) -> str:
    return f"{_request(record)} was refused{_because(record)}"


def _state_file_damaged(record: Record) -> str:
    path = named(record.get("path"))
    if "moved_to" not in record:
        return f"{path} is damaged and could not be moved away{_because(record)}"
    deed = "partly damaged and was kept as" if record.get("kept") is True else "damaged and was moved to"
    return f"{path} is {deed} {named(record.get('moved_to'))}{_because(record)}"


def _state_file_not_saved(record: Record) -> str:
    return f"{named(record.get('path'))} could not be written{_because(record)}"


def _log_error(record: Record) -> str:
    return f"{amount(record.get('lost_lines'), 'line')} of the log were lost{_because(record)}"


SENTENCES: Final[Mapping[str, Sentence]] = {
    EventName.DAEMON_STARTING: _starting,
    EventName.DAEMON_READY: _ready,
    EventName.DAEMON_DRAINING: _draining,
    EventName.DAEMON_STOPPED: _stopped,
    EventName.MANIFEST_RELOADED: _reloaded,
    EventName.MANIFEST_REJECTED: _rejected,
    EventName.DAEMON_PAUSED: _paused,
    EventName.SLEEP_PREVENTED: _sleep_prevented,
    EventName.SLEEP_ALLOWED: _sleep_allowed,
    EventName.SLEEP_NOT_PREVENTED: _sleep_not_prevented,
    EventName.API_LISTENING: _listening,
    EventName.API_ERROR: _api_error,
    EventName.ENGINE_STARTED: _engine_started,
    EventName.ENGINE_FAILED: _engine_failed,
    EventName.ENGINE_STALLED: _engine_stalled,
    EventName.ENGINE_MOVES: _engine_moves,
    EventName.LIMIT_CHANGED: _limit_changed,
    EventName.LIMIT_WARNING: _limit_warning,
    EventName.LEVEL_CHANGED: _level_changed,
    EventName.CACHE_DROPPED: _cache_dropped,
    EventName.ENFORCER_ERROR: _enforcer_error,
    EventName.LOAD_WAITING: _load_waiting,
    EventName.TURN_ENDED: _turn_ended,
    EventName.LOAD_STARTED: _load_started,
    EventName.LOAD_FINISHED: _load_finished,
    EventName.COSTS_LEARNED: _costs_learned,
    EventName.LOAD_FAILED: _load_failed,
    EventName.LOAD_CANCELLED: _load_cancelled,
    EventName.LOAD_RETRIED: _load_retried,
    EventName.UNLOADED: _unloaded,
    EventName.MODEL_KEPT: _model_kept,
    EventName.PINNED: _pinned,
    EventName.UNPINNED: _unpinned,
    EventName.REQUEST_STARTED: _request_started,
    EventName.REQUEST_FINISHED: _request_finished,
    EventName.REQUEST_ABORTED: _request_aborted,
    EventName.REQUEST_FAILED: _request_failed,
    EventName.REQUEST_WAITING: _request_waiting,
    EventName.REQUEST_PARKED: _request_parked,
    EventName.REQUEST_RESUMED: _request_resumed,
    EventName.REQUEST_REFUSED: _request_refused,
    EventName.STATE_FILE_DAMAGED: _state_file_damaged,
    EventName.STATE_FILE_NOT_SAVED: _state_file_not_saved,
    EventName.LOG_ERROR: _log_error,
}
"""All but `decision`, which `sentences` has."""


def was_cut(record: Record) -> bool:
    """Whether a request that finished was kept from going on: only then does its end have a reason or a decision."""
    return bool(record.get("reason") or record.get("decision"))


def reason_of(record: Record) -> str:
    """Why it happened, in the event's own words; empty when it does not say."""
    error = record.get("error")
    if isinstance(error, Mapping):
        error = error.get("message") or error.get("code")
    reason = one_line(record.get("reason") or error or record.get("message"))
    for repeated in ("the request to {} was aborted: ", "the load of {} was cancelled: "):
        reason = reason.removeprefix(repeated.format(_model(record)))
    return reason


def _because(record: Record) -> str:
    reason = reason_of(record)
    return f": {reason}" if reason else ""


def _by(record: Record) -> str:
    decision = record.get("decision")
    return f" by decision {one_line(decision)}" if decision else ""


def _for(record: Record) -> str:
    request = record.get("request")
    return f" for {one_line(request)}" if request else ""


def _model(record: Record) -> str:
    return named(record.get("model"))


def _of_model(record: Record) -> str:
    return f" of {_model(record)}" if record.get("model") else ""


def _request(record: Record) -> str:
    to = f" to {_model(record)}" if record.get("model") else ""
    return f"{_text(record, 'request')}{to}"


def _names(value: Any) -> str:
    return ", ".join(named(item) for item in value) if isinstance(value, list | tuple) else ""


def _text(record: Record, key: str) -> str:
    return one_line(record.get(key)) or "?"
