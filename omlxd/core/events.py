"""The closed vocabulary of what omlxd logs, and one numbered event."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class EventName(StrEnum):
    """Every value of the key `event` in the log; `man/omlxd.1` says what each means."""

    DAEMON_STARTING = "daemon_starting"
    DAEMON_READY = "daemon_ready"
    DAEMON_DRAINING = "daemon_draining"
    DAEMON_STOPPED = "daemon_stopped"
    MANIFEST_RELOADED = "manifest_reloaded"
    MANIFEST_REJECTED = "manifest_rejected"
    DAEMON_PAUSED = "daemon_paused"
    SLEEP_PREVENTED = "sleep_prevented"
    SLEEP_ALLOWED = "sleep_allowed"
    SLEEP_NOT_PREVENTED = "sleep_not_prevented"
    API_LISTENING = "api_listening"
    API_ERROR = "api_error"
    ENGINE_STARTED = "engine_started"
    ENGINE_FAILED = "engine_failed"
    ENGINE_STALLED = "engine_stalled"
    ENGINE_MOVES = "engine_moves"
    LIMIT_CHANGED = "limit_changed"
    LIMIT_WARNING = "limit_warning"
    LEVEL_CHANGED = "level_changed"
    DECISION = "decision"
    CACHE_DROPPED = "cache_dropped"
    ENFORCER_ERROR = "enforcer_error"
    LOAD_WAITING = "load_waiting"
    TURN_ENDED = "turn_ended"
    LOAD_STARTED = "load_started"
    LOAD_FINISHED = "load_finished"
    COSTS_LEARNED = "costs_learned"
    LOAD_FAILED = "load_failed"
    LOAD_CANCELLED = "load_cancelled"
    LOAD_RETRIED = "load_retried"
    UNLOADED = "unloaded"
    MODEL_KEPT = "model_kept"
    PINNED = "pinned"
    UNPINNED = "unpinned"
    REQUEST_STARTED = "request_started"
    REQUEST_FINISHED = "request_finished"
    REQUEST_ABORTED = "request_aborted"
    REQUEST_FAILED = "request_failed"
    REQUEST_WAITING = "request_waiting"
    REQUEST_PARKED = "request_parked"
    REQUEST_RESUMED = "request_resumed"
    REQUEST_REFUSED = "request_refused"
    STATE_FILE_DAMAGED = "state_file_damaged"
    STATE_FILE_NOT_SAVED = "state_file_not_saved"
    LOG_ERROR = "log_error"


class StreamMark(StrEnum):
    """What stands beside events in `/v1/control/events`: never in the log, and without a number of its own."""

    HEARTBEAT = "heartbeat"
    GAP = "gap"


class EventLevel(StrEnum):
    """Severity, as the log writes it."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened; what it carries beyond its name is JSON-ready: integer bytes, float seconds.

    Prompts and completions never go into an event.
    """

    event: EventName
    level: EventLevel = EventLevel.INFO
    model: str | None = None
    request: str | None = None
    decision: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    seq: int = 0
    ts: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """One flat object; keys that do not apply are left out."""
        body: dict[str, Any] = {"seq": self.seq, "ts": self.ts, "level": self.level.value, "event": self.event.value}
        for key in ("model", "request", "decision"):
            if (value := getattr(self, key)) is not None:
                body[key] = value
        return body | dict(self.fields)


Emit = Callable[[Event], None]
"""Where events go: the daemon's bus numbers and dates them, writes the log and wakes the listeners."""
