"""Whether models would fit, before anything is loaded: pure arithmetic on predictions, limits and who is there.

The same rules as at the door: what stays (weights, KV caches) against the soft limit, what stays and the largest step
in passing against the hard one; a prompt's chunk shrinks first; idle models go, pinned ones stay, and busy ones stay
for now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from omlxd.core.admission import chunks
from omlxd.core.costs import KvCosts
from omlxd.core.ledger import reserved_tokens
from omlxd.core.limits import MemoryLimits
from omlxd.core.units import format_bytes
from omlxd.core.wording import named

PINNED: Final = "pinned"
LONGEST_TOKENS = 1 << 20
"""How far the longest context is looked for where neither the model nor the manifest says."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A model as somebody would like to run it.

    Attributes:
        name: the model.
        weights_bytes: what its weights take.
        costs: what its requests take.
        context_tokens: the longest prompt and answer together.
        rows: requests that decode at the same time.
        longest_tokens: what its config or the manifest allow at most, or None.
    """

    name: str
    weights_bytes: int
    costs: KvCosts
    context_tokens: int
    rows: int = 1
    longest_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A model that is in memory, or will be because it is pinned; the least recently used come first.

    Attributes:
        name: the model.
        held_bytes: what it holds or has been promised.
        stays: whether it may not be unloaded now.
        why: `pinned`, `busy`, `loading`, `unloading`, or empty.
    """

    name: str
    held_bytes: int
    stays: bool
    why: str = ""

    @property
    def pinned(self) -> bool:
        """Whether it is still in the way when it has nothing to do."""
        return self.why == PINNED


@dataclass(frozen=True, slots=True)
class Need:
    """Predicted bytes: what stays, and the largest step in passing.

    Attributes:
        weights_bytes: the weights.
        kv_bytes: the KV caches at the full context.
        growth_bytes: what is reserved beyond that, for the next block and for a window not yet cut.
        transient_bytes: what the largest step holds in passing.
        chunk_tokens: tokens of a prefill step that this was worked out with.
    """

    weights_bytes: int
    kv_bytes: int
    growth_bytes: int
    transient_bytes: int
    chunk_tokens: int

    @property
    def stays_bytes(self) -> int:
        """What stays while it runs."""
        return self.weights_bytes + self.kv_bytes + self.growth_bytes

    @property
    def peak_bytes(self) -> int:
        """All of it at the worst moment."""
        return self.stays_bytes + self.transient_bytes


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a model, or several together, would fare; bytes and tokens.

    Attributes:
        names: the models.
        fits: whether it would run as wished.
        need: what it takes, together when there are several.
        evict: the models that would be unloaded for it, least recently used first.
        beside: the models that stay in its way, each with its reason.
        beside_bytes: what those hold.
        limit_bytes: the limit that binds: the one that is nearest, or broken.
        binding: what sets that limit: `max_memory`, `ram`, `metal`, ...; `none` without limits.
        set_by: the same as the user knows it.
        hard: whether that is the hard limit.
        short_bytes: what is missing; negative is left.
        max_context_tokens: the longest context at this concurrency; 0 when not even a short prompt fits.
        max_concurrency: the most requests at this context, up to what is batched; 0 when none fits.
        known: whether the KV and transient formulas of its architecture were checked.
        waits_for: the busy models without which it would fit: a request waits for them; empty when it fits anyway.
        parks: whether what those run for too long is parked then.
    """

    names: tuple[str, ...]
    fits: bool
    need: Need
    evict: tuple[str, ...]
    beside: tuple[Neighbour, ...]
    beside_bytes: int
    limit_bytes: int
    binding: str
    set_by: str
    hard: bool
    short_bytes: int
    max_context_tokens: int = 0
    max_concurrency: int = 0
    known: bool = True
    waits_for: tuple[str, ...] = ()
    parks: bool = False

    @property
    def why(self) -> str:
        """The verdict in one sentence."""
        names = ", ".join(f"`{name}`" for name in self.names)
        need = f"{names} {'needs' if len(self.names) == 1 else 'need'} {self._sum_text}"
        if self.beside:
            beside = (f"`{each.name}`{f' ({each.why})' if each.why else ''}" for each in self.beside)
            need += f", beside {format_bytes(self.beside_bytes)} of {', '.join(beside)}"
        if not self.limit_bytes:
            return f"{need}; no limit is enforced"
        limit = f"the {'hard' if self.hard else 'soft'} limit {format_bytes(self.limit_bytes)} ({self.set_by})"
        if not self.fits:
            return f"{need}: {format_bytes(self.short_bytes)} more than {limit} leaves{self._wait_text}"
        fit = "fits" if len(self.names) == 1 else "fit"
        return f"{need}, and {fit}: {format_bytes(-self.short_bytes)} are left below {limit}"

    @property
    def _sum_text(self) -> str:
        """The sum that the limit is held against: all of it under the hard one, what stays under the soft one."""
        compared, passing_bytes = format_bytes(self._compared_bytes), self.need.transient_bytes
        if not passing_bytes:
            return compared
        passing = f"{format_bytes(passing_bytes)} in passing"
        return f"{compared}, of which {passing}" if self.hard else f"{compared} that stay (and {passing})"

    @property
    def _wait_text(self) -> str:
        """What becomes of a request all the same, when those in the way are only busy."""
        if not self.waits_for:
            return ""
        one = len(self.waits_for) == 1
        until = f"until {'it is' if one else 'they are'} idle"
        parked = f", or {'its' if one else 'their'} requests are parked for it" if self.parks else ""
        return f" while {named(self.waits_for)} {'is' if one else 'are'} busy; a request waits {until}{parked}"

    @property
    def _compared_bytes(self) -> int:
        return self.need.peak_bytes if self.hard else self.need.stays_bytes


@dataclass(frozen=True, slots=True)
class Planner:
    """Judges wishes against these limits and neighbours.

    Attributes:
        limits: the limits in force.
        neighbours: who is in memory, least recently used first.
        chunk_tokens: tokens of a prefill step, if all is well.
        max_batch: requests of one model that decode together.
        unaccounted_bytes: memory in use that belongs to no model.
        parks: whether requests that run for too long are parked for a model that waits.
    """

    limits: MemoryLimits
    neighbours: tuple[Neighbour, ...] = ()
    chunk_tokens: int = 256
    max_batch: int = 32
    unaccounted_bytes: int = 0
    parks: bool = False

    def alone(self, wish: Wish) -> Verdict:
        """How one model would fare, with what is idle unloaded for it."""
        verdict = self.together([wish])
        return replace(
            verdict,
            max_context_tokens=self._longest_context(wish),
            max_concurrency=self._most_rows(wish),
        )

    def together(self, wishes: Sequence[Wish]) -> Verdict:
        """How several models would fare at the same time."""
        names = tuple(wish.name for wish in wishes)
        others = [each for each in self.neighbours if each.name not in names]
        staying = [each for each in others if each.stays]
        stays_bytes = self.unaccounted_bytes + sum(each.held_bytes for each in staying)
        need = self._need(wishes, stays_bytes)
        short, hard = self._shortage(stays_bytes, need)
        fits = short <= 0
        binding, set_by = self._binding(hard=hard)
        evict = self._evicted(others, stays_bytes, need) if fits else ()
        return Verdict(
            names=names,
            fits=fits,
            need=need,
            evict=evict,
            beside=tuple(staying),
            beside_bytes=stays_bytes,
            limit_bytes=self.limits.hard_bytes if hard else self.limits.soft_bytes,
            binding=binding,
            set_by=set_by,
            hard=hard,
            short_bytes=short,
            known=all(wish.costs.certain for wish in wishes),
            waits_for=() if fits else self._waits_for(wishes, staying),
            parks=self.parks,
        )

    def _binding(self, *, hard: bool) -> tuple[str, str]:
        limits = self.limits
        if not self._limited:
            return "none", "none"
        return (limits.hard_binding, limits.hard_set_by) if hard else (limits.binding, limits.set_by)

    def _waits_for(self, wishes: Sequence[Wish], staying: Sequence[Neighbour]) -> tuple[str, ...]:
        """The busy models, if it fits once they are idle."""
        kept_bytes = self.unaccounted_bytes + sum(each.held_bytes for each in staying if each.pinned)
        if self._shortage(kept_bytes, self._need(wishes, kept_bytes))[0] > 0:
            return ()
        return tuple(each.name for each in staying if not each.pinned)

    @property
    def _limited(self) -> bool:
        return self.limits.soft_bytes > 0 or self.limits.hard_bytes > 0

    def _need(self, wishes: Sequence[Wish], beside_bytes: int) -> Need:
        """The need with the largest chunk that fits, or with the smallest."""
        need = Need(0, 0, 0, 0, 0)
        for chunk in chunks(self.chunk_tokens):
            need = _need(wishes, chunk)
            if self._shortage(beside_bytes, need)[0] <= 0:
                break
        return need

    def _shortage(self, beside_bytes: int, need: Need) -> tuple[int, bool]:
        """What is missing (negative: left) under the limit that is nearest, and whether that is the hard one."""
        found = []
        if self.limits.soft_bytes > 0:
            found.append((beside_bytes + need.stays_bytes - self.limits.soft_bytes, False))
        if self.limits.hard_bytes > 0:
            found.append((beside_bytes + need.peak_bytes - self.limits.hard_bytes, True))
        return max(found, default=(0, False))

    def _evicted(self, others: Iterable[Neighbour], beside_bytes: int, need: Need) -> tuple[str, ...]:
        """The shortest list of idle models, least recently used first, without which it fits."""
        idle = [each for each in others if not each.stays]
        for count in range(len(idle) + 1):
            kept_bytes = beside_bytes + sum(each.held_bytes for each in idle[count:])
            if self._shortage(kept_bytes, need)[0] <= 0:
                return tuple(each.name for each in idle[:count])
        return tuple(each.name for each in idle)

    def _fits(self, wish: Wish) -> bool:
        stays_bytes = self.unaccounted_bytes
        stays_bytes += sum(each.held_bytes for each in self.neighbours if each.stays and each.name != wish.name)
        return self._shortage(stays_bytes, self._need([wish], stays_bytes))[0] <= 0

    def _longest_context(self, wish: Wish) -> int:
        longest = wish.longest_tokens or LONGEST_TOKENS
        return _last(1, longest, lambda tokens: self._fits(replace(wish, context_tokens=tokens)))

    def _most_rows(self, wish: Wish) -> int:
        return _last(1, self.max_batch, lambda rows: self._fits(replace(wish, rows=rows)))


def _need(wishes: Sequence[Wish], chunk: int) -> Need:
    kv_bytes, reserved_bytes, transient_bytes = 0, 0, 0
    for wish in wishes:
        costs, tokens = wish.costs, wish.context_tokens
        reserved, prompt = reserved_tokens(tokens), min(chunk, tokens)
        uncut_bytes = costs.kv_bytes(tokens, 1, prompt) - costs.kv_bytes(reserved, 1)
        kv_bytes += costs.kv_bytes(tokens, wish.rows)
        reserved_bytes += costs.kv_bytes(reserved, wish.rows) + max(0, uncut_bytes)
        passing_bytes = max(
            costs.prefill_transient_bytes(prompt, tokens), costs.decode_transient_bytes(wish.rows, reserved)
        )
        transient_bytes = max(transient_bytes, passing_bytes)
    weights_bytes = sum(wish.weights_bytes for wish in wishes)
    return Need(weights_bytes, kv_bytes, reserved_bytes - kv_bytes, transient_bytes, chunk)


def _last(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The last number from `low` to `high` that fits, where none after the first that does not; 0 when none does."""
    if not fits(low):
        return 0
    if fits(high):
        return high
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
