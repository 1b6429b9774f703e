"""One model of the pool: its state, its figures, and who uses it. Touched on the event loop's thread only."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from omlxd.core.costs import NO_COSTS, KvCosts
from omlxd.core.errors import OmlxError
from omlxd.core.graceful import PARKED_ENOUGH
from omlxd.core.learned_costs import ChunkSample, LearnedCosts
from omlxd.core.manifest import ModelSettings
from omlxd.core.memory import Policy
from omlxd.core.snapshot import EntrySnapshot, RequestSnapshot
from omlxd.core.states import EntryState, RequestState
from omlxd.core.turnover import Holder
from omlxd.daemon.model_files import ModelFiles
from omlxd.daemon.request import Generation
from omlxd.daemon.turn import Turn

if TYPE_CHECKING:
    from omlxd.daemon.load_ticket import LoadTicket


KEPT_SAMPLES = 32


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What the last finished load took: seconds, and the models that were evicted for it.

    `disk_bytes` were read from the disk meanwhile, None where nobody counts; `vocab_size` is what it has found.
    """

    load_s: float
    evicted: tuple[str, ...] = ()
    disk_bytes: int | None = None
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """How long a request that ended at `since_s` wants its model kept when nobody uses it, in seconds."""

    idle_s: float
    since_s: float


@dataclass(eq=False)
class EnginePoolEntry:
    """One model of the manifest, loaded or not.

    Attributes:
        name: what clients call it.
        settings: its part of the manifest.
        clock: monotonic seconds.
        heir: its part of a newer manifest whose weights or context are others; it becomes `settings` once nobody is
            served with the old ones.
        removed: a newer manifest does not have it: nobody can ask for it, and it goes when its requests have ended.
        state: see `EntryState`.
        pinned: never unloaded by the enforcer or for another load.
        draining: while a user unloads it, the ids of the requests that are still served; later ones wait until it is
            gone, and load it again.
        weights_bytes: measured if it was ever loaded, else predicted from its files, else None.
        context_length: tokens, None while unknown or unbounded.
        files: what its folder held when it was last read.
        costs: what its requests take; nothing while nothing is known.
        learned: measured costs, for the files of `fingerprint`.
        samples: the measurements they follow from, the last ones.
        error: why the last load failed or did not fit; None when it did not.
        failed_at_s: when it became `failed`.
        fingerprint: of the files that were loaded or that failed.
        last_load: what the last finished load took.
        turn: since it was loaded the last time: who is served before it makes way for another's load.
        ticket: the load in the queue or in progress.
        requests: the generations that were admitted and whose memory is not back yet, by id.
        in_engine: the ids of those that the engine has.
        unloaded: resolved when the unload in progress has given the memory back.
        unloaded_by: the decision that this unload carries out; None when somebody asked for it.
        used_at_s: when it last had a request or finished loading.
        kept: the seconds that the last request of this stay in memory wanted it kept, and when; None for its `ttl`.
    """

    name: str
    settings: ModelSettings
    clock: Callable[[], float]
    state: EntryState = EntryState.UNLOADED
    heir: ModelSettings | None = None
    removed: bool = False
    pinned: bool = False
    draining: frozenset[str] | None = None
    weights_bytes: int | None = None
    measured: bool = False
    context_length: int | None = None
    files: ModelFiles | None = None
    costs: KvCosts = NO_COSTS
    learned: LearnedCosts | None = None
    samples: deque[ChunkSample] = field(default_factory=lambda: deque(maxlen=KEPT_SAMPLES))
    error: OmlxError | None = None
    failed_at_s: float | None = None
    fingerprint: str | None = None
    last_load: LoadReport | None = None
    turn: Turn | None = None
    ticket: LoadTicket | None = None
    requests: dict[str, Generation] = field(default_factory=dict)
    in_engine: set[str] = field(default_factory=set)
    unloaded: asyncio.Future[None] | None = None
    unloaded_by: str | None = None
    used_at_s: float | None = None
    kept: Kept | None = None
    _abort_loading: bool = False

    @property
    def abort_loading(self) -> bool:
        """Set it to stop the load in progress at its next step (R8); it is cleared when the load has ended."""
        return self._abort_loading

    @abort_loading.setter
    def abort_loading(self, wanted: bool) -> None:
        asked_before, self._abort_loading = self._abort_loading, wanted
        if wanted and not asked_before and self.ticket is not None:
            self.ticket.stop()

    @property
    def last_used(self) -> float | None:
        """On `clock`; now while it has requests, None if it never had any and was never loaded."""
        return self.clock() if self.requests else self.used_at_s

    @property
    def loaded(self) -> bool:
        """Whether it can run requests."""
        return self.state is EntryState.LOADED

    def takes(self, request: str | None) -> bool:
        """Whether this request (or, with None, any new one) can go to the engine now."""
        drains = self.draining is not None and request not in self.draining
        return self.loaded and not drains and (self.turn is None or self.turn.takes(request))

    @property
    def gives_way(self) -> bool:
        """Whether it takes nothing new because another model's turn has come."""
        return self.loaded and self.turn is not None and self.turn.serves is not None

    @property
    def served(self) -> list[str]:
        """Its requests, without those that wait for its next turn."""
        return [request for request in self.requests if self.turn is None or self.turn.takes(request)]

    @property
    def running(self) -> int:
        """Requests the engine has."""
        return len(self.in_engine)

    @property
    def waiting(self) -> int:
        """Requests that wait for the model, or for a place in its batch."""
        return sum(generation.state is RequestState.WAITING for generation in self.requests.values())

    @property
    def parked(self) -> tuple[Generation, ...]:
        """Requests that gave their memory back and wait until they fit again, oldest first."""
        parked = (each for each in self.requests.values() if each.state is RequestState.PARKED)
        return tuple(each for each in parked if each.id not in self.in_engine)

    @property
    def load_progress(self) -> float | None:
        """How much of it is in memory, 0 to 1; None when it is not loading."""
        if self.ticket is None or self.state is not EntryState.LOADING:
            return None
        return self.ticket.done_bytes / max(1, self.ticket.total_bytes)

    @property
    def idle_limit_s(self) -> float | None:
        """Seconds without a request after which it is unloaded; None for never."""
        kept = self.kept
        if kept is None or self.turn is None or kept.since_s < self.turn.began_s:
            return self.settings.ttl_s
        return kept.idle_s if kept.idle_s < math.inf else None

    def keep(self, idle_s: float | None) -> None:
        """A request has ended that wants it kept so long when nobody uses it; None for its own `ttl`."""
        self.kept = None if idle_s is None else Kept(idle_s, self.clock())

    def inherit(self) -> bool:
        """Become what the manifest says now, unless it is loaded or an answer has begun; True when that was done."""
        begun = any(generation.generated for generation in self.requests.values())
        if self.heir is None or begun or self.state not in (EntryState.UNLOADED, EntryState.FAILED):
            return False
        self.settings, self.heir = self.heir, None
        self.state, self.error, self.failed_at_s, self.fingerprint = EntryState.UNLOADED, None, None, None
        self.weights_bytes, self.measured, self.context_length, self.files = None, False, None, None
        self.costs, self.learned = NO_COSTS, None
        self.samples.clear()
        return True

    def touch(self) -> None:
        """It was used until now."""
        self.used_at_s = self.clock()

    def snapshot(
        self,
        now_s: float,
        kv_bytes: int,
        promised_bytes: int = 0,
        prefix_bytes: int = 0,
        requests: tuple[RequestSnapshot, ...] = (),
    ) -> EntrySnapshot:
        """What the policy sees of it; `requests` are those that the engine has, of which those that began run."""
        running = len(self.in_engine) - sum(not request.begun for request in requests)
        leases = len(self.served) if self.gives_way else len(self.requests)
        return EntrySnapshot(
            name=self.name,
            state=self.state,
            pinned=self.pinned,
            weights_bytes=self.weights_bytes or 0,
            kv_bytes=kv_bytes,
            running=running,
            waiting=leases - running,
            leases=leases + (self.ticket is not None),
            last_used_s=now_s if leases else (self.used_at_s or 0.0),
            loading_order=self.ticket.order_id if self.ticket is not None else None,
            promised_bytes=promised_bytes,
            prefix_bytes=prefix_bytes,
            requests=requests,
        )

    def holder(self, snapshot: EntrySnapshot, policy: Policy) -> Holder:
        """What decides whether it makes way for another's load."""
        turn = self.turn or Turn(0.0)
        parks = [request.parks for request in snapshot.requests]
        prefilling = [self.requests[each] for each in self.in_engine if each in self.requests]
        prefilling = [each for each in prefilling if each.state is not RequestState.DECODE]
        gathered = [self.requests[each] for each in turn.batch if each in self.requests]
        return Holder(
            name=self.name,
            held_bytes=snapshot.committed_bytes,
            busy=snapshot.busy,
            idle_since_s=self.used_at_s or 0.0,
            turn_began_s=turn.began_s,
            reload_s=self.last_load.load_s if self.last_load is not None else 0.0,
            kept=turn.kept and (self.used_at_s or 0.0) <= turn.began_s,
            closed_s=turn.closed_s,
            parkable=policy is Policy.GRACEFUL and bool(parks) and max(parks) < PARKED_ENOUGH,
            gathered=any(each.state is not RequestState.DECODE and not each.ended for each in gathered),
            prefills_since_s=max((each.entered_s for each in prefilling), default=None),
        )
