"""Whether a request, or the next block of a decode batch, fits: pure, from the reading and the ledger alone.

What stays (KV caches) is compared with the soft limit, what stays and the largest transient together with the hard
limit. A prompt's chunk shrinks before anything else gives way; idle models go before anybody waits; and only what
would not fit on an otherwise empty machine is refused. Nothing here is remembered, so nothing can stick.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from omlxd.core.costs import KvCosts
from omlxd.core.ledger import Difference, Ledger
from omlxd.core.room import candidates_of, missing_text, shortest_prefix
from omlxd.core.snapshot import Candidate, EntrySnapshot, Limits, Snapshot
from omlxd.core.states import EntryState
from omlxd.core.units import format_bytes
from omlxd.core.wording import named

CHUNKS: Final = (256, 128, 64, 32, 16)
UNACCOUNTED_SLACK_BYTES: Final = 64 * 1024 * 1024
"""Below this, memory that the ledger does not explain is noise: gauges are read at different instants."""

_HELD: Final = (EntryState.LOADED, EntryState.LOADING, EntryState.UNLOADING)


class AdmissionKind(StrEnum):
    """What stands between a request and its memory."""

    ADMIT = "admit"
    EVICT = "evict"
    WAIT = "wait"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Ask:
    """A request at the door.

    Attributes:
        model: whose request it is; loaded.
        prompt_tokens: its prompt.
        chunk_tokens: tokens of a prefill step, if all is well.
        costs: what the model's requests cost.
    """

    model: str
    prompt_tokens: int
    chunk_tokens: int
    costs: KvCosts


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer, with its numbers in bytes.

    Attributes:
        kind: reserve now, evict `victims` first, wait for `blockers`, or refuse.
        why: the reason in plain words with numbers.
        chunk_tokens: the chunk that fits (`admit`).
        need_bytes: what it adds under the limit that binds, with the smallest chunk if it must.
        limit_bytes: the limit that binds; 0 when none does.
        binding: what sets it: `max_memory`, `ram`, `metal`, `system`, `pinned`, ...
        limit: the limit that binds, in words.
        short_bytes: what is missing now.
        victims: the models to unload, least recently used first (`evict`).
        blockers: who must end or give way first (`wait`); empty when memory is unaccounted for or the system is short.
        candidates: every other loaded model, and why it was or was not chosen.
        longest_prompt_tokens: the longest prompt that would fit alone (`never`).
        raise_to_bytes: the soft limit that would do, where raising it is up to the user (`never`).
    """

    kind: AdmissionKind
    why: str
    need_bytes: int = 0
    limit_bytes: int = 0
    binding: str = "max_memory"
    limit: str = ""
    chunk_tokens: int = 0
    short_bytes: int = 0
    victims: tuple[str, ...] = ()
    blockers: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    longest_prompt_tokens: int = 0
    raise_to_bytes: int | None = None

    @property
    def fits(self) -> bool:
        """Whether it can be reserved now."""
        return self.kind is AdmissionKind.ADMIT


def decide_request(
    snapshot: Snapshot, limits: Limits, ledger: Ledger, ask: Ask, yielding: frozenset[str] = frozenset()
) -> Admission:
    """How the request gets its memory.

    Args:
        yielding: models whose waiting requests may wait longer, so that they can be evicted like idle ones.
    """
    if limits.soft_bytes <= 0 and limits.hard_bytes <= 0:
        return Admission(AdmissionKind.ADMIT, "no limit is enforced", chunk_tokens=ask.chunk_tokens)
    if (refusal := never_fits(snapshot, limits, ask)) is not None:
        return refusal
    taken_bytes = taken(snapshot, limits, ledger)
    if limits.system_short(snapshot.reading):
        return _system_short(snapshot, limits)
    for chunk in chunks(ask.chunk_tokens):
        difference = ledger.if_admitted(ask.model, ask.costs, ask.prompt_tokens, chunk)
        shortage = _shortage(taken_bytes, difference, limits)
        if shortage.short_bytes <= 0:
            why = f"{format_bytes(difference.stays_bytes)} more fit, in chunks of {chunk} tokens"
            return Admission(AdmissionKind.ADMIT, why, _need(difference, shortage), chunk_tokens=chunk)
    need = f"a prompt of {ask.prompt_tokens} tokens to `{ask.model}`"
    answer = _give_way(snapshot, ledger, ask.model, need, difference, shortage, yielding)
    if answer.kind is AdmissionKind.WAIT and not ask.costs.certain and not ledger.running() and not answer.blockers:
        # A guess refuses nobody: alone and in the smallest chunks it may try, and after one chunk its cost is known.
        return Admission(AdmissionKind.ADMIT, "its cost is not known yet", answer.need_bytes, chunk_tokens=chunk)
    return answer


def decide_block(snapshot: Snapshot, limits: Limits, ledger: Ledger, model: str) -> Admission:
    """How the model's decode batch gets its next block: never refused here, since what is needed is already there."""
    if limits.soft_bytes <= 0 and limits.hard_bytes <= 0:
        return Admission(AdmissionKind.ADMIT, "no limit is enforced")
    difference = ledger.if_extended(model)
    shortage = _shortage(taken(snapshot, limits, ledger), difference, limits)
    if shortage.short_bytes <= 0:
        return Admission(AdmissionKind.ADMIT, "the next block fits", _need(difference, shortage))
    return _give_way(snapshot, ledger, model, f"the next block of `{model}`'s KV cache", difference, shortage)


def never_fits(snapshot: Snapshot, limits: Limits, ask: Ask) -> Admission | None:
    """The refusal of a prompt that would not fit alone beside its weights and the pinned models; None when it would.

    Nobody is refused on the strength of a guess, nor while the weights that stay are over the limit by themselves:
    that is not the prompt's fault, and the enforcer's to answer.
    """
    if not ask.costs.certain:
        return None
    own_bytes = next((entry.weights_bytes for entry in snapshot.entries if entry.name == ask.model), 0)
    pinned = [each for each in snapshot.entries if each.pinned and each.name != ask.model and each.state in _HELD]
    kept_bytes = own_bytes + sum(each.weights_bytes for each in pinned)
    soft_bytes = _soft(limits)
    if kept_bytes > (soft_bytes or limits.hard_bytes):
        return None
    stays_bytes, passes_bytes = _alone(ask, ask.prompt_tokens)
    shortage = _shortage(kept_bytes, Difference(stays_bytes, passes_bytes), limits)
    if shortage.short_bytes <= 0:
        return None
    longest = _longest(ask, kept_bytes, limits)
    total_bytes = kept_bytes + stays_bytes + (passes_bytes if shortage.passes else 0)
    by_pins = bool(pinned) and shortage.short_bytes <= sum(each.weights_bytes for each in pinned)
    with_pins = " beside " + ", ".join(f"the pinned `{each.name}`" for each in pinned) if by_pins else ""
    raisable = limits.binding == "max_memory" and kept_bytes + stays_bytes + passes_bytes <= limits.hard_bytes
    why = (
        f"a prompt of {ask.prompt_tokens} tokens to `{ask.model}`{with_pins} needs {format_bytes(total_bytes)} with the"
        f" weights, more than {shortage.limit}"
    )
    return Admission(
        AdmissionKind.NEVER,
        why,
        need_bytes=total_bytes,
        limit_bytes=shortage.limit_bytes,
        binding="pinned" if by_pins else shortage.binding,
        short_bytes=shortage.short_bytes,
        blockers=tuple(each.name for each in pinned) if by_pins else (),
        longest_prompt_tokens=longest,
        raise_to_bytes=kept_bytes + stays_bytes if raisable and not shortage.passes else None,
    )


def taken(snapshot: Snapshot, limits: Limits, ledger: Ledger) -> int:
    """What counts as taken: what was read without the step in flight, or what was promised and what nobody explains.

    The last part matters: a promise that is not allocated yet and memory that belongs to nobody add up. Prefix caches
    do not count: the plan that brings the request has them trimmed first.
    """
    pressure_bytes = max(0, snapshot.reading.pressure_bytes(limits.policy) - snapshot.prefix_bytes)
    if not snapshot.reading.at_rest:
        pressure_bytes = max(0, pressure_bytes - ledger.passing_bytes)
    unexplained_bytes = pressure_bytes - sum(entry.held_bytes for entry in snapshot.entries)
    if unexplained_bytes <= UNACCOUNTED_SLACK_BYTES:
        unexplained_bytes = 0
    return max(pressure_bytes, ledger.committed_bytes + unexplained_bytes)


def kept_bytes(costs: KvCosts, prompt_tokens: int = 1) -> int:
    """What a request keeps that runs alone, in the smallest chunks: a load makes room for it beside the weights."""
    return Ledger().if_admitted("", costs, prompt_tokens, CHUNKS[-1]).stays_bytes


def chunks(largest: int) -> tuple[int, ...]:
    """The chunk sizes to try, the largest first."""
    return (largest, *(chunk for chunk in CHUNKS if chunk < largest))


@dataclass(frozen=True, slots=True)
class Shortage:
    """How much is missing (negative: is left) under the limit that binds, and that limit in words."""

    short_bytes: int
    limit_bytes: int
    binding: str
    limit: str
    passes: bool


def _shortage(taken_bytes: int, difference: Difference, limits: Limits) -> Shortage:
    stays_bytes = taken_bytes + difference.stays_bytes
    soft_bytes, hard_bytes = _soft(limits), limits.hard_bytes
    over_soft = stays_bytes - soft_bytes if soft_bytes > 0 else -1
    over_hard = stays_bytes + difference.transient_bytes - hard_bytes if hard_bytes > 0 else -1
    if (over_soft <= 0 and over_hard > 0) or soft_bytes <= 0:
        words = f"the hard limit {format_bytes(hard_bytes)} ({limits.hard_set_by})"
        return Shortage(over_hard, hard_bytes, limits.hard_binding, words, True)
    words = f"the soft limit {format_bytes(limits.soft_bytes)} ({limits.set_by})"
    return Shortage(max(over_soft, over_hard), soft_bytes, limits.binding, words, False)


def _soft(limits: Limits) -> int:
    """The soft limit; what is tolerated above it when nothing more can be done counts as within it."""
    return max(limits.soft_bytes, limits.tolerated_bytes) if limits.soft_bytes > 0 else 0


def _need(difference: Difference, shortage: Shortage) -> int:
    """What it needs under the limit that binds: what passes counts for the hard limit only."""
    return difference.stays_bytes + (difference.transient_bytes if shortage.passes else 0)


def _give_way(
    snapshot: Snapshot,
    ledger: Ledger,
    model: str,
    need: str,
    difference: Difference,
    shortage: Shortage,
    yielding: frozenset[str] = frozenset(),
) -> Admission:
    """Evict what nobody uses, if that suffices; else wait for those who hold the rest."""
    others = [entry for entry in snapshot.entries if entry.name != model]
    loaded = sorted((each for each in others if each.state is EntryState.LOADED), key=_lru_key)
    idle = [each for each in loaded if not each.pinned and (not each.busy or each.name in yielding)]
    victims = shortest_prefix(idle, shortage.short_bytes)
    need_bytes = _need(difference, shortage)
    if shortage.short_bytes > need_bytes:
        why = f"{need} needs {missing_text(need_bytes, shortage.short_bytes, limit=shortage.limit)}"
    else:
        why = f"{need} needs {format_bytes(need_bytes)}, {format_bytes(shortage.short_bytes)} more than"
        why += f" {shortage.limit} leaves"
    if victims:
        names = named(each.name for each in victims)
        kind, why = AdmissionKind.EVICT, f"{why}; {names} {'is' if len(victims) == 1 else 'are'} idle"
    else:
        kind = AdmissionKind.WAIT
    blockers = tuple(each.name for each in snapshot.entries if _holds(each, ledger))
    if kind is AdmissionKind.WAIT:
        names = named(blockers)
        why = f"{why}; it waits for {names}" if names else f"{why}, and nobody can give way"
    return Admission(
        kind,
        why,
        need_bytes=need_bytes,
        limit_bytes=shortage.limit_bytes,
        binding=shortage.binding,
        limit=shortage.limit,
        short_bytes=shortage.short_bytes,
        victims=tuple(each.name for each in victims),
        blockers=blockers if kind is AdmissionKind.WAIT else (),
        candidates=candidates_of(loaded, victims),
    )


def _holds(entry: EntrySnapshot, ledger: Ledger) -> bool:
    """Whether it has memory that will come back by itself."""
    return entry.state in (EntryState.LOADING, EntryState.UNLOADING) or ledger.requests(entry.name) > 0


def _system_short(snapshot: Snapshot, limits: Limits) -> Admission:
    available_bytes = snapshot.reading.system_available_bytes
    why = (
        f"the system has {format_bytes(available_bytes)} available, less than `min_available`"
        f" {format_bytes(limits.min_available_bytes)} (system)"
    )
    short_bytes = limits.min_available_bytes - available_bytes
    return Admission(
        AdmissionKind.WAIT, why, limit_bytes=limits.min_available_bytes, binding="system", short_bytes=short_bytes
    )


def _alone(ask: Ask, prompt_tokens: int) -> tuple[int, int]:
    """What stays and what passes of a prompt that runs alone in the smallest chunks."""
    alone = Ledger()
    chunk = chunks(ask.chunk_tokens)[-1]
    difference = alone.if_admitted(ask.model, ask.costs, prompt_tokens, chunk)
    return difference.stays_bytes, difference.transient_bytes


def _longest(ask: Ask, kept_bytes: int, limits: Limits) -> int:
    """The longest prompt that fits alone; 0 when none does."""
    low, high = 0, ask.prompt_tokens
    while low + 1 < high:
        middle = (low + high) // 2
        if _shortage(kept_bytes, Difference(*_alone(ask, middle)), limits).short_bytes <= 0:
            low = middle
        else:
            high = middle
    return low


def _lru_key(entry: EntrySnapshot) -> tuple[float, str]:
    return (entry.last_used_s, entry.name)
