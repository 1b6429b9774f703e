"""The states of entries, requests and the daemon, and the frozen views that `status` shows of them.

On the wire a view is an object of its fields: integer bytes, seconds as floats, null where a figure does not apply.
`SCHEMA` grows when a field changes its meaning or goes away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

SCHEMA = 1


class EntryState(StrEnum):
    """Life of a model in the pool: unloaded -> loading -> loaded -> unloading -> unloaded; failed is sticky."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    FAILED = "failed"


class RequestState(StrEnum):
    """Life of a generation: waiting (for its model or a place) -> prefill -> decode -> finished or aborted.

    One that had to give way is parked: its tokens are kept, its memory is not, and it goes on with prefill later.
    """

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PARKED = "parked"
    FINISHED = "finished"
    ABORTED = "aborted"


class DaemonState(StrEnum):
    """starting until pins and preloads were tried, draining from the first SIGTERM."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Level(StrEnum):
    """The enforcer's health: ok, over the soft limit and acting, or over with nothing left to do (R9)."""

    OK = "ok"
    OVER = "over"
    EXHAUSTED = "exhausted"


class LimitOrigin(StrEnum):
    """Who said what the soft limit is: the manifest, `omlxd limit`, or the command line that started the daemon."""

    MANIFEST = "manifest"
    LIMIT = "limit"
    COMMAND_LINE = "command_line"


class FinishReason(StrEnum):
    """Why a generation ended well."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class MemoryView:
    """Memory and limits as `status` shows them, in bytes.

    `committed` is what has been promised: weights of loaded, loading and unloading models, and KV caches with the
    blocks they grow into; `prefix_cache` is what ended requests have left for later ones, reclaimable at any time;
    `unaccounted` is what is used and belongs to no model. `binding` and `hard_binding` are what sets the two limits,
    and `limit_origin` who said what the soft one is.
    `samples` counts how often `active + cache` was looked at inside steps, `over_hard_samples` how often it lay above
    the hard limit then, and `over_hard_bytes` by how much at worst; both stay 0 while the limit holds.
    """

    used: int
    active: int
    cache: int
    footprint: int
    base: int
    peak: int
    committed: int
    unaccounted: int
    soft_limit: int
    hard_limit: int
    binding: str
    hard_binding: str
    system_total: int
    system_available: int
    samples: int = 0
    over_hard_samples: int = 0
    over_hard_bytes: int = 0
    prefix_cache: int = 0
    limit_origin: LimitOrigin = LimitOrigin.MANIFEST


@dataclass(frozen=True, slots=True)
class EnforcerView:
    """What the enforcer is doing."""

    policy: str
    poll_interval_s: float
    level: Level
    decisions: int
    reason: str | None = None


@dataclass(slots=True)  # nobody changes one; to freeze it takes four times as long, and there may be thousands
class ModelView:
    """One model of the manifest as `status` and `models` show it.

    `load_progress` is 0 to 1 and `load_left_s` a guess, both while it is being loaded; `waits_for` says in words what
    its load waits for before that.
    `removed` says that a newer manifest does not have it, and that it goes when its requests have ended.
    `load_s` and `load_disk_bytes` are what its last load has taken and had read from the disk (null where nobody counts
    that), `vocab_size` what that has found.
    """

    name: str
    state: EntryState
    pinned: bool
    aliases: tuple[str, ...]
    path: str
    weights_bytes: int | None
    kv_bytes: int
    prefix_cache_bytes: int
    committed_bytes: int
    running: int
    waiting: int
    parked: int
    tokens_per_s: float | None
    last_used_s: float | None
    ttl_left_s: float | None
    load_progress: float | None
    context_length: int | None
    error: str | None
    load_left_s: float | None = None
    waits_for: str | None = None
    removed: bool = False
    load_s: float | None = None
    load_disk_bytes: int | None = None
    vocab_size: int | None = None


@dataclass(slots=True)  # not frozen, as a model's
class RequestView:
    """One generation in flight; `parks` counts how often it gave its memory back and waited for it again.

    `waits_for` says in words what it waits for, while it waits.
    """

    id: str
    model: str
    state: RequestState
    prompt_tokens: int
    prefilled_tokens: int
    generated_tokens: int
    age_s: float
    parks: int = 0
    waits_for: str | None = None


@dataclass(frozen=True, slots=True)
class StatusView:
    """All that `omlxd status` knows."""

    version: str
    pid: int
    state: DaemonState
    uptime_s: float
    backend: str | None
    manifest: str
    memory: MemoryView
    enforcer: EnforcerView
    models: tuple[ModelView, ...]
    requests: tuple[RequestView, ...]
    recent_decisions: tuple[Mapping[str, Any], ...] = ()
    api: str | None = None
    stalled_s: float | None = None
    log_trouble: str | None = None
    schema: int = field(default=SCHEMA)

    def to_json(self) -> dict[str, Any]:
        """What it has, in the order in which it is told; the views in it become objects of their fields."""
        return {"schema": self.schema, **flat(self)}


def flat(view: StatusView | MemoryView | EnforcerView | ModelView | RequestView) -> dict[str, Any]:
    """The fields of a view by name, as they are; `asdict` copies each value deeply, ten times the work."""
    return {name: getattr(view, name) for name in view.__dataclass_fields__}
