"""The rungs that both ladders are built of: what costs nobody a request, and when there is nothing to decide."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from omlxd.core.case import Case, lru_first, lru_order, unused_for
from omlxd.core.choice import necessary
from omlxd.core.decision import CancelLoad, Decision, DropCache, Outcome, TrimPrefixCaches, Unload
from omlxd.core.idle_words import IdleChoice
from omlxd.core.memory import Policy
from omlxd.core.snapshot import Candidate, EntrySnapshot
from omlxd.core.units import format_bytes


def drop_cache(case: Case) -> Decision | None:
    """Rung 1: freed buffers go first, since nobody misses them; the only action a reading inside a step may cause."""
    both_bytes, hard_bytes = case.reading.active_bytes + case.reading.cache_bytes, case.limits.hard_bytes
    if not hard_bytes or not case.reading.cache_bytes or both_bytes <= hard_bytes:
        return None
    reason = (
        f"active and cache memory {format_bytes(both_bytes)} are over the hard limit {format_bytes(hard_bytes)};"
        f" the cache holds {format_bytes(case.reading.cache_bytes)}"
    )
    return case.answer("drop_cache", DropCache(), reason)


def system_short(case: Case) -> Decision | None:
    """Other programs leave the system too little: what costs nobody anything goes; running requests stay."""
    if case.pressure_bytes > case.limits.soft_bytes > 0 or not case.limits.system_short(case.reading):
        return None
    missing_bytes = case.limits.min_available_bytes - case.reading.system_available_bytes
    case = replace(case, system_short_bytes=missing_bytes)
    if case.reading.cache_bytes >= missing_bytes and DropCache() not in case.futile:
        return case.answer("cache", DropCache(), case.over_text)
    if case.reading.at_rest and not case.unloading:
        for rung in (trim_prefix_caches, unload_idle, cancel_load):
            if (decision := rung(case)) is not None and decision.action not in case.futile:
                return decision
    return case.answer("short", None, case.over_text, Outcome.SYSTEM_SHORT)


def within_limit(case: Case) -> Decision | None:
    """R2, R4: no limit is no pressure, and usage equal to the limit is not over it."""
    soft_bytes = case.limits.soft_bytes
    if soft_bytes <= 0:
        return case.answer("within_limit", None, "no limit is enforced", Outcome.WITHIN_LIMIT)
    if case.pressure_bytes > soft_bytes:
        return None
    text = f"{format_bytes(case.pressure_bytes)} is within the soft limit {format_bytes(soft_bytes)}"
    return case.answer("within_limit", None, text, Outcome.WITHIN_LIMIT)


def only_at_rest(case: Case) -> Decision | None:
    """A step in flight holds memory that it gives back by itself; it costs nobody anything."""
    if case.reading.at_rest:
        return None
    return case.answer("not_at_rest", None, f"{case.over_text}, but a step is in flight", Outcome.NOT_AT_REST)


def await_unloading(case: Case) -> Decision | None:
    """Memory that is on its way back is not freed twice."""
    if not case.unloading:
        return None
    names = ", ".join(f"`{entry.name}`" for entry in case.unloading[:3])
    return case.answer("unloading", None, f"{case.over_text}, and {names} is being unloaded", Outcome.UNLOADING)


def trim_prefix_caches(case: Case) -> Decision | None:
    """Rung 2: what ended requests left for later ones, as far as needed, unless it would spare no model its unload.

    Nobody is kept out by them (the plan that grants a block has them trimmed first), so no block lacks theirs.
    """
    kept_bytes = sum([entry.prefix_bytes for entry in case.loaded])
    if kept_bytes <= 0 or case.wanted is not None:
        return None
    if kept_bytes < case.short_bytes:
        idle = idle_models(case)
        untrimmed = victims_of(case, idle, case.short_bytes)
        trimmed = victims_of(case, idle, case.short_bytes - kept_bytes, lambda entry: entry.committed_bytes)
        if untrimmed and len(untrimmed) <= len(trimmed):
            return None
    keep_bytes = max(0, kept_bytes - case.short_bytes)
    reason = f"{case.over_text}; prefix caches hold {format_bytes(kept_bytes)} and"
    reason += f" are trimmed to {format_bytes(keep_bytes)}" if keep_bytes else " are emptied"
    return case.answer("trim_prefix_caches", TrimPrefixCaches(keep_bytes), reason)


def unload_idle(case: Case) -> Decision | None:
    """Rung 3: a model that nobody uses, of the shortest LRU prefix that suffices, while more than one is loaded."""
    if len(case.loaded) < 2 or not (idle := idle_models(case)):
        return None
    chosen = victims_of(case, idle, case.short_bytes) or idle[: len(case.loaded) - 1]
    victim = chosen[0]
    reason = f"{case.over_text}; `{victim.name}` is idle ({unused_for(victim, case.now_s)})"
    if len(idle) > 1 and victim is not idle[0]:
        reason += f", and unloading it spares `{idle[0].name}`"
    candidates = model_candidates(case, victim, chosen, IdleChoice(idle, chosen).why_it_goes(victim))
    return case.answer("unload", Unload(victim.name), reason, candidates=candidates)


def cancel_load(case: Case) -> Decision | None:
    """Rung 4, R8: nothing can be unloaded and a load is in progress: the newest is stopped at its next slice."""
    if not case.loading:
        return None
    newest = max(case.loading, key=lambda entry: (entry.loading_order or 0, entry.name))
    retried = case.limits.policy is Policy.GRACEFUL
    end = "is stopped and tried again later" if retried else "is cancelled"
    reason = f"{case.over_text}; nothing can be unloaded, so the load of `{newest.name}` {end}"
    chosen = Candidate(newest.name, True, "the newest load", newest.weights_bytes, newest.last_used_s)
    return case.answer("cancel_load", CancelLoad(newest.name, retried), reason, candidates=(chosen,))


def idle_models(case: Case) -> list[EntrySnapshot]:
    """The loaded models that may go without a loss, least recently used first."""
    return lru_order(each for each in case.loaded if not (each.pinned or each.running or each.waiting or each.leases))


def frees_bytes(entry: EntrySnapshot) -> int:
    """What is free when the loaded model is gone."""
    held_bytes, promised_bytes = entry.weights_bytes + entry.kv_bytes, entry.promised_bytes
    return (held_bytes if held_bytes > promised_bytes else promised_bytes) + entry.prefix_bytes


def victims_of(
    case: Case,
    order: Sequence[EntrySnapshot],
    short_bytes: int,
    frees: Callable[[EntrySnapshot], int] = frees_bytes,
) -> list[EntrySnapshot]:
    """Those of `order` that have to go; empty when they do not suffice, since one model stays loaded."""
    victims = necessary(order, short_bytes, frees)
    return victims if len(victims) < len(case.loaded) else []


def model_candidates(
    case: Case, victim: EntrySnapshot, chosen: Sequence[EntrySnapshot], why_chosen: str
) -> tuple[Candidate, ...]:
    """The loaded models, least recently used first, and why each was or was not taken."""
    order = lru_first(case.loaded)
    if all(entry is not victim for entry in order):
        order[-1] = victim
    next_ones: Collection[str] = {entry.name for entry in chosen}
    words = IdleChoice((), chosen, suffice=sum(map(frees_bytes, chosen)) >= case.short_bytes)

    def why(entry: EntrySnapshot) -> str:
        if entry is victim:
            return why_chosen
        if entry.pinned:
            return "pinned"
        if entry.name in next_ones:
            return "next, should this not suffice"
        if entry.busy:
            return "busy"
        return words.why_it_stays(entry)

    return tuple(
        Candidate(entry.name, entry is victim, why(entry), entry.weights_bytes, entry.last_used_s) for entry in order
    )
