"""What a decision may depend on: memory, the models and the limits at one instant, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass

from omlxd.core.limits import limit_set_by
from omlxd.core.memory import MemoryReading, Policy
from omlxd.core.states import EntryState, LimitOrigin


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """One request that the engine has, as the policy sees it.

    Attributes:
        request: its id.
        order: its place among all requests of the pool, in the order they came; lower is older.
        frees_bytes: what is promised for it alone, and would be free if it were parked.
        parks: how often it was parked before.
        begun: whether any of its prompt was run; one that only stands in the engine's line holds nothing.
    """

    request: str
    order: int
    frees_bytes: int = 0
    parks: int = 0
    begun: bool = True


@dataclass(frozen=True, slots=True)
class EntrySnapshot:
    """One model as the policy sees it.

    Attributes:
        name: the model.
        state: only `loaded` and `loading` ones can be acted upon.
        pinned: never unloaded by the enforcer (R10).
        weights_bytes: measured when loaded, predicted while loading.
        kv_bytes: KV caches of its requests.
        running: requests that the engine has begun.
        waiting: requests that wait for the model, for a place, or for their first step.
        leases: holds by requests and loads; one with a lease is not idle.
        last_used_s: on the snapshot's clock; *now* while it is running or waiting.
        loading_order: the load in progress, higher is newer.
        promised_bytes: what the ledger has promised it: weights, and KV caches with room to grow.
        prefix_bytes: KV caches of ended requests that it keeps for later ones; reclaimable, in nobody's way.
        requests: the requests that the engine has, oldest first.
    """

    name: str
    state: EntryState
    pinned: bool = False
    weights_bytes: int = 0
    kv_bytes: int = 0
    running: int = 0
    waiting: int = 0
    leases: int = 0
    last_used_s: float = 0.0
    loading_order: int | None = None
    promised_bytes: int = 0
    prefix_bytes: int = 0
    requests: tuple[RequestSnapshot, ...] = ()

    @property
    def busy(self) -> bool:
        """Whether unloading it would cost somebody something now."""
        return bool(self.running or self.waiting or self.leases)

    @property
    def committed_bytes(self) -> int:
        """What it has been promised: loaded, loading and unloading models count in full."""
        return max(self.held_bytes, self.promised_bytes)

    @property
    def held_bytes(self) -> int:
        """What is known to be in memory for it; a load counts as if it had ended."""
        held = self.state in (EntryState.LOADED, EntryState.LOADING, EntryState.UNLOADING)
        return self.weights_bytes + self.kv_bytes if held else 0


@dataclass(frozen=True, slots=True)
class WantedBlock:
    """The next block of a decode batch that does not fit: pressure before it is allocated.

    Attributes:
        model: whose requests stand still until it is there.
        need_bytes: what it takes.
        short_bytes: how much of that is missing under the limit that binds.
        limit: that limit in words, as `the soft limit 4.0 GiB (max_memory)`.
    """

    model: str
    need_bytes: int
    short_bytes: int
    limit: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a decision may depend on; seconds on a monotonic clock.

    `wanted` is a block that decoding requests cannot go on without: what it lacks counts as pressure.
    """

    now_s: float
    reading: MemoryReading
    entries: tuple[EntrySnapshot, ...] = ()
    wanted: WantedBlock | None = None

    @property
    def prefix_bytes(self) -> int:
        """What prefix caches hold: reclaimable, so it is in nobody's way."""
        return sum(entry.prefix_bytes for entry in self.entries)

    @property
    def wanted_bytes(self) -> int:
        """What is missing for the wanted block."""
        return 0 if self.wanted is None else self.wanted.short_bytes


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits in force, and the policy that keeps them.

    Attributes:
        soft_bytes, hard_bytes: the limits; 0 for none.
        binding, hard_binding: what sets each of them.
        origin: who said what `max_memory` is.
        policy: how pressure is answered.
        tolerated_bytes: over the soft limit with nothing left to do (R9), usage up to here is let be, so that small
            requests still run; 0 while the limit can be kept.
        min_available_bytes: when the system has less than this, caches and idle models go and nothing new is admitted.
    """

    soft_bytes: int = 0
    hard_bytes: int = 0
    binding: str = "max_memory"
    policy: Policy = Policy.GRACEFUL
    hard_binding: str = "ram"
    tolerated_bytes: int = 0
    min_available_bytes: int = 0
    origin: LimitOrigin = LimitOrigin.MANIFEST

    @property
    def set_by(self) -> str:
        """What sets the soft limit, as the user knows it."""
        return limit_set_by(self.binding, self.origin)

    @property
    def hard_set_by(self) -> str:
        """What sets the hard limit, as the user knows it."""
        return limit_set_by(self.hard_binding, self.origin)

    def below(self, others: Limits) -> bool:
        """Whether either limit is lower than it was among `others`; none at all is higher than any."""
        return any(
            mine > 0 and (mine < theirs or theirs <= 0)
            for mine, theirs in ((self.soft_bytes, others.soft_bytes), (self.hard_bytes, others.hard_bytes))
        )

    def system_short(self, reading: MemoryReading) -> bool:
        """Whether other programs leave the system less than `min_available`; False when it is not known."""
        return bool(reading.system_total_bytes) and reading.system_available_bytes < self.min_available_bytes


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model (or one of its requests, and what parking it frees) that was considered, and why it was chosen or not."""

    model: str
    chosen: bool
    why: str
    weights_bytes: int
    last_used_s: float
    request: str | None = None
    frees_bytes: int | None = None
