"""The memory monitor: what `status` shows of memory, models and requests, read when somebody asks (R14)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from omlxd.core.states import EnforcerView, EntryState, Level, MemoryView, ModelView, RequestState, RequestView
from omlxd.daemon.enforcer import ProcessMemoryEnforcer
from omlxd.daemon.entry import EnginePoolEntry
from omlxd.daemon.pool import EnginePool
from omlxd.daemon.snapshots import holdings_of
from omlxd.daemon.ttl import ttl_left_s
from omlxd.daemon.waits import load_waits, request_waits


class MemoryMonitor:
    """Views of one pool and, where there is one, its enforcer; costs nobody anything when nobody looks."""

    def __init__(self, pool: EnginePool, enforcer: ProcessMemoryEnforcer | None = None) -> None:
        self._pool = pool
        self._enforcer = enforcer
        self._at_rest: dict[str, tuple[_Rest, ModelView]] = {}

    def memory(self) -> MemoryView:
        """Memory and limits now, in bytes; perhaps in the middle of a step."""
        pool = self._pool
        reading, limits = pool.engine.read(), pool.limits
        snapshot = holdings_of(pool, reading)
        entries = snapshot.entries
        known_bytes = snapshot.prefix_bytes + sum(entry.held_bytes for entry in entries)
        if not reading.at_rest:
            known_bytes += pool.ledger.passing_bytes  # what the step in flight may hold in passing
        sampled = pool.engine.sampled()
        return MemoryView(
            used=reading.used_bytes,
            active=reading.active_bytes,
            cache=reading.cache_bytes,
            footprint=reading.footprint_bytes,
            base=reading.base_bytes,
            peak=max(pool.engine.peak_bytes(), reading.active_bytes),
            committed=sum(entry.committed_bytes for entry in entries),
            unaccounted=max(0, reading.used_bytes - known_bytes),
            soft_limit=limits.soft_bytes,
            hard_limit=limits.hard_bytes,
            binding=limits.binding,
            hard_binding=limits.hard_binding,
            system_total=reading.system_total_bytes,
            system_available=reading.system_available_bytes,
            samples=sampled.samples,
            over_hard_samples=sampled.over_hard_samples,
            over_hard_bytes=sampled.over_hard_bytes,
            prefix_cache=snapshot.prefix_bytes,
            limit_origin=limits.origin,
        )

    def enforcer(self) -> EnforcerView:
        """What the enforcer does; level ok and no interval without one."""
        if self._enforcer is not None:
            return self._enforcer.view()
        policy = self._pool.limits.policy.value
        return EnforcerView(policy=policy, poll_interval_s=0.0, level=Level.OK, decisions=self._pool.decisions.count)

    def model(self, name: str) -> ModelView:
        """One model, also one that a newer manifest has removed and that is not gone yet; raises UnknownModel."""
        entry = self._pool.entries.get(name) or self._pool.resolve(name)
        return self._view(entry, self._figures())

    def models(self) -> tuple[ModelView, ...]:
        """All models, in the manifest's order."""
        figures, known, self._at_rest = self._figures(), self._at_rest, {}
        return tuple(self._known_or_made(entry, figures, known) for entry in self._pool.entries.values())

    def requests(self) -> tuple[RequestView, ...]:
        """The generations in flight."""
        pool = self._pool
        return tuple(generation.view(request_waits(pool, generation)) for generation in pool.generations)

    def recent_decisions(self) -> tuple[Mapping[str, Any], ...]:
        """The last decisions, oldest first."""
        return self._pool.decisions.recent

    def backend(self) -> str | None:
        """`cpu`, `metal` or `cuda` once the engine has started."""
        return self._pool.dispatch.backend

    def stalled_s(self) -> float:
        """Seconds since the engine's last finished step while it has work; 0.0 when idle."""
        return self._pool.engine.stalled_s()

    def _figures(self) -> _Figures:
        engine = self._pool.engine
        promised_bytes = self._pool.ledger.committed_by_model()
        return _Figures(self._pool.clock(), engine.kv_bytes(), engine.prefix_bytes(), promised_bytes)

    def _known_or_made(
        self, entry: EnginePoolEntry, figures: _Figures, known: Mapping[str, tuple[_Rest, ModelView]]
    ) -> ModelView:
        """Of a thousand models most rest: what they were when they were looked at last they still are."""
        rest = _rest_of(entry, figures)
        if rest is None:
            return self._view(entry, figures)
        before = known.get(entry.name)
        view = before[1] if before is not None and before[0] == rest else self._view(entry, figures)
        self._at_rest[entry.name] = (rest, view)
        return view

    def _view(self, entry: EnginePoolEntry, figures: _Figures) -> ModelView:
        name, now_s, used_s, last = entry.name, figures.now_s, entry.last_used, entry.last_load
        asked, running = bool(entry.requests), entry.running  # of a thousand models most are not
        parked = len(entry.parked) if asked else 0
        return ModelView(
            name=name,
            state=entry.state,
            pinned=entry.pinned,
            removed=entry.removed,
            aliases=entry.settings.aliases,
            path=entry.settings.path or entry.settings.repo or "",
            weights_bytes=entry.weights_bytes,
            kv_bytes=figures.kv_bytes.get(name, 0),
            prefix_cache_bytes=figures.prefix_bytes.get(name, 0),
            committed_bytes=figures.committed_bytes(entry),
            running=running,
            waiting=len(entry.requests) - running - parked,
            parked=parked,
            tokens_per_s=_sum_or_none(entry) if asked else None,
            last_used_s=None if used_s is None else max(0.0, now_s - used_s),
            ttl_left_s=ttl_left_s(entry, now_s),
            load_progress=entry.load_progress,
            load_left_s=entry.ticket.left_s if entry.ticket is not None else None,
            waits_for=load_waits(self._pool, entry),
            context_length=entry.context_length,
            error=None if entry.error is None or entry.state is EntryState.LOADED else entry.error.message,
            load_s=last.load_s if last is not None else None,
            load_disk_bytes=last.disk_bytes if last is not None else None,
            vocab_size=last.vocab_size if last is not None else None,
        )


class _Figures(NamedTuple):
    """What is asked for once for all models, however many there are; bytes by model."""

    now_s: float
    kv_bytes: Mapping[str, int]
    prefix_bytes: Mapping[str, int]
    promised_bytes: Mapping[str, int]

    def committed_bytes(self, entry: EnginePoolEntry) -> int:
        kv_bytes, promised_bytes = self.kv_bytes.get(entry.name, 0), self.promised_bytes.get(entry.name, 0)
        if entry.state in (EntryState.UNLOADED, EntryState.FAILED):
            return promised_bytes
        return entry.snapshot(self.now_s, kv_bytes, promised_bytes).committed_bytes


_Rest = tuple[object, ...]
"""All that the view of a model depends on that holds no memory, has no requests and was never used."""


def _rest_of(entry: EnginePoolEntry, figures: _Figures) -> _Rest | None:
    """None when the model does not rest."""
    name, state = entry.name, entry.state
    if state is not EntryState.UNLOADED and state is not EntryState.FAILED:
        return None
    if entry.requests or entry.ticket is not None or entry.last_used is not None:
        return None
    if name in figures.promised_bytes or name in figures.kv_bytes or name in figures.prefix_bytes:
        return None
    error = None if entry.error is None else entry.error.message
    return (
        state,
        entry.pinned,
        entry.removed,
        entry.settings,
        entry.weights_bytes,
        entry.context_length,
        error,
        entry.last_load,
        len(entry.in_engine),
    )


def _sum_or_none(entry: EnginePoolEntry) -> float | None:
    """Tokens per second of all its requests together; None while none decodes."""
    running = [each for each in entry.requests.values() if each.state is not RequestState.PARKED]
    speeds = [speed for generation in running if (speed := generation.tokens_per_s) is not None]
    return sum(speeds) if speeds else None
